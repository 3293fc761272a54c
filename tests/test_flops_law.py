"""``flops_law``: the FLOPs of whole models as a function of their batch's sizes, held to counts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import ConfigError, flops_law
from lightning_flops.cli import main
from lightning_flops.schema.law import LawReport
from tests.corpus.transformers_parts import (
    above_the_diagonal,
    attention_scores,
    convolution,
    encoder_layer,
    linear,
    tiny,
    tokens,
)

SIZES = [(1, 3), (2, 9), (5, 17), (3, 40)]
"""Of batch and sequence; some lie between sizes that are counted in search of the law, others do not."""


def ids(vocabulary: int = 31) -> dict[str, Any]:
    return {"input_ids": tokens(vocabulary, 2, 4), "attention_mask": torch.ones(2, 4, dtype=torch.long)}


def test_bert() -> None:
    model = tiny(
        "BertForMaskedLM", "BertConfig", vocab_size=31, hidden_size=12, num_hidden_layers=1, num_attention_heads=3,
        intermediate_size=20, max_position_embeddings=64, attn_implementation="eager",
    )  # fmt: skip
    law = flops_law(model, ids(), vary={"input_ids": (0, 1)})
    assert law.holds
    for batch, sequence in SIZES:
        rows = batch * sequence
        forward = encoder_layer(batch, sequence, 12, 3, 20) + linear(rows, 12, 12) + linear(rows, 12, 31)
        answer = law(batch=batch, sequence=sequence)
        assert (answer.forward, answer.backward, answer.recompute) == (forward, 2 * forward, 0)
    assert {answer.source for answer in law.report().asked} == {"law", "counted"}


def test_gpt2_with_fused_attention() -> None:
    """The backward of fused attention repeats the scores."""
    model = tiny(
        "GPT2LMHeadModel", "GPT2Config", vocab_size=31, n_positions=64, n_embd=12, n_layer=1, n_head=2, n_inner=20,
        bos_token_id=0, eos_token_id=1, attn_implementation="sdpa",
    )  # fmt: skip
    law = flops_law(model, {"input_ids": tokens(31, 2, 4), "use_cache": False}, vary={"input_ids": (0, 1)})
    assert law.holds
    for batch, sequence in SIZES:
        rows = batch * sequence
        scores = attention_scores(batch, 2, sequence, sequence, 6)
        forward = (
            linear(rows, 12, 36) + 2 * scores + linear(rows, 12, 12) + 2 * linear(rows, 12, 20) + linear(rows, 12, 31)
        )
        answer = law(batch=batch, sequence=sequence)
        assert (answer.forward, answer.backward, answer.recompute) == (forward, 2 * forward, scores)


class CausalAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_what_causal_attention_skips_is_a_law_too() -> None:
    """In the forward, the backward and what the backward repeats the kernel skips what is above the diagonal."""
    law = flops_law(CausalAttention(), torch.randn(2, 3, 4, 6, requires_grad=True), vary={0: {0: "batch", 2: "length"}})
    assert law.holds
    for batch, length in SIZES:
        answer = law(batch=batch, length=length)
        assert answer.forward == 2 * attention_scores(batch, 3, length, length, 6)
        assert answer.causal_skipped == (2 + 4 + 1) * 2 * batch * 3 * above_the_diagonal(length) * 6
        assert answer.hardware_flops == answer.model_flops + answer.recompute - answer.causal_skipped


@pytest.mark.slow
def test_t5_has_two_lengths() -> None:
    model = tiny(
        "T5ForConditionalGeneration", "T5Config", vocab_size=31, d_model=12, d_kv=5, d_ff=20, num_layers=1,
        num_decoder_layers=1, num_heads=3, decoder_start_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    batch = {"input_ids": tokens(31, 2, 6), "decoder_input_ids": tokens(31, 2, 4), "use_cache": False}
    law = flops_law(model, batch, vary={"input_ids": (0, 1), "decoder_input_ids": {1: "target"}})
    assert law.holds
    for samples, source, target in [(1, 3, 5), (3, 9, 7), (4, 11, 8), (2, 30, 2)]:
        source_rows, target_rows = samples * source, samples * target
        forward = (
            4 * linear(source_rows, 12, 15)
            + 2 * attention_scores(samples, 3, source, source, 5)
            + 2 * linear(source_rows, 12, 20)
            + 4 * linear(target_rows, 12, 15)
            + 2 * attention_scores(samples, 3, target, target, 5)
            + 2 * linear(target_rows, 12, 15)
            + 2 * linear(source_rows, 12, 15)
            + 2 * attention_scores(samples, 3, target, source, 5)
            + 2 * linear(target_rows, 12, 20)
            + linear(target_rows, 12, 31)
        )
        answer = law(batch=samples, sequence=source, target=target)
        assert (answer.forward, answer.backward) == (forward, 2 * forward)


def grouped_query_attention(batch: int, sequence: int) -> int:
    """12 channels, 6 heads of 4, which share 2 heads of keys and values."""
    rows = batch * sequence
    return (
        linear(rows, 12, 24)
        + 2 * linear(rows, 12, 8)
        + 2 * attention_scores(batch, 6, sequence, sequence, 4)
        + linear(rows, 24, 12)
    )


def test_qwen2_shares_heads_of_keys() -> None:
    model = tiny(
        "Qwen2ForCausalLM", "Qwen2Config", vocab_size=31, hidden_size=12, intermediate_size=20, num_hidden_layers=1,
        num_attention_heads=6, num_key_value_heads=2, head_dim=4, attn_implementation="eager",
    )  # fmt: skip
    law = flops_law(model, {**ids(), "use_cache": False}, vary={"input_ids": (0, 1)})
    assert law.holds
    attention_module: Any = model.get_submodule("model.layers.0.self_attn")
    size = int(attention_module.head_dim)
    for batch, sequence in SIZES:
        rows = batch * sequence
        attention = (
            2 * linear(rows, 12, 6 * size)
            + 2 * linear(rows, 12, 2 * size)
            + 2 * attention_scores(batch, 6, sequence, sequence, size)
        )
        forward = attention + 3 * linear(rows, 12, 20) + linear(rows, 12, 31)
        answer = law(batch=batch, sequence=sequence)
        assert (answer.forward, answer.backward) == (forward, 2 * forward)


def test_mixtral_sends_every_token_to_two_experts() -> None:
    model = tiny(
        "MixtralForCausalLM", "MixtralConfig", vocab_size=31, hidden_size=12, intermediate_size=20,
        num_hidden_layers=1, num_attention_heads=6, num_key_value_heads=2, head_dim=4, num_local_experts=4,
        num_experts_per_tok=2, max_position_embeddings=64, attn_implementation="eager",
        experts_implementation="batched_mm",
    )  # fmt: skip
    law = flops_law(model, {**ids(), "use_cache": False}, vary={"input_ids": (0, 1)})
    assert law.holds
    for batch, sequence in SIZES:
        rows = batch * sequence
        experts = 2 * (linear(rows, 12, 40) + linear(rows, 20, 12))
        forward = grouped_query_attention(batch, sequence) + linear(rows, 12, 4) + experts + linear(rows, 12, 31)
        answer = law(batch=batch, sequence=sequence)
        assert (answer.forward, answer.backward) == (forward, 2 * forward)


@pytest.mark.slow
def test_vit_whose_images_change_in_whole_patches() -> None:
    """Images of 9 pixels lose a row at patches of 4: the law is of multiples, and 9 is counted by itself."""
    model = tiny(
        "ViTForImageClassification", "ViTConfig", hidden_size=12, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=20, image_size=(8, 8), patch_size=4, num_channels=2, num_labels=5,
        attn_implementation="eager",
    )  # fmt: skip
    batch = {"pixel_values": torch.randn(2, 2, 8, 8), "interpolate_pos_encoding": True}
    law = flops_law(model, batch, vary={"pixel_values": (0, 2, 3)})
    assert law.holds
    for samples, height, width in [(3, 8, 16), (2, 16, 24), (1, 9, 11)]:
        patches = (height // 4) * (width // 4)
        patching = convolution(samples, 12, patches, 2, 16)
        rest = encoder_layer(samples, patches + 1, 12, 2, 20) + linear(samples, 12, 5)
        answer = law(batch=samples, height=height, width=width)
        assert (answer.forward, answer.backward) == (patching + rest, patching + 2 * rest)
    assert [answer.source for answer in law.report().asked] == ["law", "law", "counted"]


def test_lora_has_no_gradients_of_the_frozen_weights() -> None:
    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(31, 12)
            self.frozen = nn.Linear(12, 12, bias=False)
            self.down, self.up = nn.Linear(12, 3, bias=False), nn.Linear(3, 12, bias=False)
            for module in (self.embed, self.frozen):
                module.requires_grad_(False)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = self.embed(input_ids)
            return self.frozen(hidden) + self.up(self.down(hidden))  # type: ignore[no-any-return]

    law = flops_law(LoRA(), {"input_ids": tokens(31, 2, 4)}, vary={"input_ids": (0, 1)})
    for batch, sequence in SIZES:
        rows = batch * sequence
        answer = law(batch=batch, sequence=sequence)
        assert answer.forward == linear(rows, 12, 12) + linear(rows, 12, 3) + linear(rows, 3, 12)
        # Of the frozen product nothing; of `down` its weight's; of `up` its weight's and its input's.
        assert answer.backward == linear(rows, 12, 3) + 2 * linear(rows, 3, 12)


def test_activation_checkpointing_is_a_law_of_its_own() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(31, 12), nn.Sequential(nn.Linear(12, 20), nn.Linear(20, 5))

        def forward(self, input_ids: torch.Tensor) -> Any:
            return torch.utils.checkpoint.checkpoint(self.layers, self.embed(input_ids), use_reentrant=False)

    law = flops_law(Checkpointed(), {"input_ids": tokens(31, 2, 4)}, vary={"input_ids": (0, 1)})
    for batch, sequence in SIZES:
        first, second = linear(batch * sequence, 12, 20), linear(batch * sequence, 20, 5)
        answer = law(batch=batch, sequence=sequence)
        assert (answer.forward, answer.backward) == (first + second, 2 * (first + second))
        assert answer.recompute == first  # nothing in the backward needs the second's output again


def strided() -> nn.Module:
    """As the front of a Conformer: of every two positions one is left, twice."""
    return nn.Sequential(nn.Conv1d(3, 4, 3, stride=2), nn.Conv1d(4, 5, 3, stride=2))


def test_strided_convolutions_have_no_law_and_are_counted() -> None:
    law = flops_law(strided(), torch.randn(2, 3, 41), vary={0: {0: "batch", 2: "frames"}})
    assert not law.holds
    assert "no polynomial" in str(law.reason)
    for samples, frames in [(2, 50), (3, 51), (1, 90)]:
        first = (frames - 3) // 2 + 1
        second = (first - 3) // 2 + 1
        answer = law(batch=samples, frames=frames)
        assert answer.forward == convolution(samples, 4, first, 3, 3) + convolution(samples, 5, second, 4, 3)
        assert answer.source == "counted"


def test_a_threshold_far_away_ends_the_law() -> None:
    """As of relative positions that end at a distance: above 20 the length no longer matters."""

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x[:, :20])

    law = flops_law(Bounded(), torch.randn(2, 4, 3), vary={0: (0, 1)})
    assert law(batch=2, sequence=100).forward == linear(2 * 20, 3, 4)
    assert law(batch=2, sequence=10).forward == linear(2 * 10, 3, 4)
    assert not law.holds


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ({}, "vary must name"),
        ({"labels": (0,)}, "vary names 'labels', which is no tensor"),
        ({"input_ids": (2,)}, "which has 2 axes"),
        ({"input_ids": {0: "size", 1: "size"}}, "both named size"),
    ],
)
def test_what_cannot_vary_is_an_error(vary: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        flops_law(nn.Embedding(3, 2), {"input_ids": tokens(31, 2, 4)}, vary=vary)


def test_sizes_must_be_named() -> None:
    law = flops_law(nn.Linear(3, 4), torch.randn(2, 5, 3), vary={0: (0, 1)})
    with pytest.raises(TypeError, match="needs a size for sequence"):
        law(batch=2)
    with pytest.raises(TypeError, match="knows no size length, but batch, sequence"):
        law(batch=2, sequence=3, length=4)
    with pytest.raises(TypeError, match="sequence must be an integer >= 1, got 0"):
        law(batch=2, sequence=0)


EXAMPLE = """
import torch
from torch import nn

def example():
    torch.manual_seed(0)
    return nn.Linear(3, 4), torch.randn(2, 5, 3)
"""


def test_the_command_prints_the_law(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(EXAMPLE)
    where = f"{tmp_path}/model.py:example"
    assert main(["law", where, "--vary", "0=0,1", "--at", "batch=8,sequence=7"]) == 0
    printed = capsys.readouterr().out
    assert "forward = B·24·S\n" in printed  # 2 x 3 x 4 for each row
    assert "backward = B·24·S\n" in printed  # of the weight alone
    assert "1,344" in printed  # 8 x 7 x 24
    assert main(["law", where, "--vary", "0=0:batch,1:length", "--at", "batch=8,length=7", "--json"]) == 0
    report = LawReport.from_json(capsys.readouterr().out)
    assert report.holds
    assert (report.asked[0].forward, report.asked[0].backward) == (1344, 1344)
    assert json.loads(report.to_json())["sums"][0]["terms"] == [
        {"numerator": 24, "denominator": 1, "powers": {"batch": 1, "length": 1}}
    ]


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(EXAMPLE)
    assert main(["law", f"{tmp_path}/model.py:none", "--vary", "0=0,1"]) == 1
    assert "KeyError: 'none'" in capsys.readouterr().err
    assert main(["law", f"{tmp_path}/model.py:example", "--vary", "0=0,1", "--at", "batch=8"]) == 1
    assert "--at: law() needs a size for sequence" in capsys.readouterr().err
