"""``flops_formula``: the FLOPs of whole models as a function of their batch's sizes, held to counts by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import ConfigError, flops_formula
from lightning_flops.cli import main
from tests.corpus.transformers_parts import attention_scores, convolution, linear, tokens
from tests.models_by_hand import model_named

SIZES = [(1, 3), (2, 9), (5, 17), (3, 40)]
"""Of batch and sequence; some lie between sizes that are counted in search of the formula, others do not."""

SENTENCES: Any = {"input_ids": (0, 1)}


@pytest.mark.parametrize(
    ("name", "names", "example", "vary", "sizes"),
    [
        ("BERT", "batch sequence", (2, 4), SENTENCES, SIZES),
        ("GPT-2", "batch sequence", (2, 4), SENTENCES, SIZES),
        pytest.param(
            "T5", "batch sequence target", (2, 6, 4), {"input_ids": (0, 1), "labels": {1: "target"}},
            [(1, 3, 5), (3, 9, 7), (4, 11, 8), (2, 30, 2)], marks=pytest.mark.slow,
        ),
        ("Mixtral", "batch sequence", (2, 4), SENTENCES, SIZES),
        ("LoRA", "batch sequence", (2, 4), SENTENCES, SIZES),
        # Images of 9 pixels lose a row at patches of 4: the formula is of multiples, and 9 is counted by itself.
        pytest.param(
            "ViT", "batch height width", (2, 8, 8), {"pixel_values": (0, 2, 3)}, [(3, 8, 16), (2, 16, 24), (1, 9, 11)],
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_whole_models(name: str, names: str, example: tuple[int, ...], vary: Any, sizes: list[tuple[int, ...]]) -> None:
    model = model_named(name)
    formula = flops_formula(model.make(), model.batch(*example), vary=vary)
    assert formula.holds
    for one in sizes:
        answer, cost = formula(**dict(zip(names.split(), one, strict=True))), model.cost(*one)
        assert (answer.forward, answer.backward, answer.recompute) == (cost.forward, cost.backward, cost.recompute)
        assert answer.hardware_flops == cost.hardware
    sources = [answer.source for answer in formula.report().asked]
    assert "formula" in sources
    if name == "ViT":
        assert sources == ["formula", "formula", "counted"]


class CausalAttention(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def test_causal_attention_counts_in_full_in_the_formula_too() -> None:
    formula = flops_formula(
        CausalAttention(), torch.randn(2, 3, 4, 6, requires_grad=True), vary={0: {0: "batch", 2: "length"}}
    )
    assert formula.holds
    assert "FLOPs by size" in formula._repr_html_()  # for a notebook
    for batch, length in SIZES:
        answer = formula(batch=batch, length=length)
        assert answer.forward == 2 * attention_scores(batch, 3, length, length, 6)
        assert answer.hardware_flops == 7 * attention_scores(batch, 3, length, length, 6)


def test_strided_convolutions_have_no_formula_and_are_counted() -> None:
    # As the front of a Conformer: of every two positions one is left, twice.
    strided = nn.Sequential(nn.Conv1d(3, 4, 3, stride=2), nn.Conv1d(4, 5, 3, stride=2))
    formula = flops_formula(strided, torch.randn(2, 3, 41), vary={0: {0: "batch", 2: "frames"}})
    assert not formula.holds
    assert "no polynomial" in str(formula.report().reason)
    for samples, frames in [(2, 50), (3, 51), (1, 90)]:
        first = (frames - 3) // 2 + 1
        second = (first - 3) // 2 + 1
        answer = formula(batch=samples, frames=frames)
        assert answer.forward == convolution(samples, 4, first, 3, 3) + convolution(samples, 5, second, 4, 3)
        assert answer.source == "counted"


def test_a_threshold_far_away_ends_the_formula() -> None:
    """As of relative positions that end at a distance: above 20 the length no longer matters."""

    class Bounded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(x[:, :20])

    formula = flops_formula(Bounded(), torch.randn(2, 4, 3), vary={0: (0, 1)})
    assert formula(batch=2, sequence=100).forward == linear(2 * 20, 3, 4)
    assert formula(batch=2, sequence=10).forward == linear(2 * 10, 3, 4)
    assert not formula.holds


@pytest.mark.parametrize(
    ("vary", "words"),
    [
        ({}, "vary must be a mapping from a tensor of the batch to its axes, got {}"),
        ("input_ids", "vary must be a mapping from a tensor of the batch to its axes, got 'input_ids'"),
        (["input_ids"], r"vary must be a mapping from .*, got \['input_ids'\]"),
        (None, "vary must be a mapping from .*, got None"),
        ({"input_ids": 0}, r"vary\['input_ids'\] must be axes, or a mapping from axes to names, got 0"),
        ({"input_ids": "01"}, r"vary\['input_ids'\] must be axes, .*, got '01'"),
        ({"input_ids": ["batch"]}, "vary names axis 'batch' of 'input_ids', which has 2 axes"),
        ({"input_ids": [[0, 1]]}, r"vary names axis \[0, 1\] of 'input_ids'"),
        ({"input_ids": {0: None}}, "vary must name axis 0 of 'input_ids' by a text, got None"),
        ({"labels": (0,)}, "vary names 'labels'; the batch's tensors are 'input_ids'"),
        ({"input_ids": (2,)}, "which has 2 axes"),
        ({"input_ids": {0: "size", 1: "size"}}, "both named size"),
    ],
)
def test_what_cannot_vary_is_an_error(vary: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        flops_formula(nn.Embedding(3, 2), {"input_ids": tokens(31, 2, 4)}, vary=vary)


def test_sizes_must_be_named() -> None:
    formula = flops_formula(nn.Linear(3, 4), torch.randn(2, 5, 3), vary={0: (0, 1)})
    with pytest.raises(TypeError, match="needs a size for sequence"):
        formula(batch=2)
    with pytest.raises(TypeError, match="knows no size length, but batch, sequence"):
        formula(batch=2, sequence=3, length=4)
    with pytest.raises(TypeError, match="sequence must be an integer >= 1, got 0"):
        formula(batch=2, sequence=0)


EXAMPLE = """
import torch
from torch import nn

def example():
    torch.manual_seed(0)
    return nn.Linear(3, 4), torch.randn(2, 5, 3)
"""


def test_the_command_prints_the_formula(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(EXAMPLE)
    where = f"{tmp_path}/model.py:example"
    assert main(["formula", where, "--vary", "0=0,1", "--at", "batch=8,sequence=7"]) == 0
    printed = capsys.readouterr().out
    assert "forward = 24·batch·sequence\n" in printed  # 2 x 3 x 4 for each row
    assert "backward = 24·batch·sequence\n" in printed  # of the weight alone
    assert "1,344" in printed  # 8 x 7 x 24
    assert main(["formula", where, "--vary", "0=0:batch,1:length", "--at", "batch=8,length=7", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["reason"], report["asked"][0]["forward"], report["asked"][0]["backward"]) == (None, 1344, 1344)
    term = {"numerator": 24, "denominator": 1, "powers": {"batch": 1, "length": 1}}
    assert report["terms"][0] == {"bucket": "forward", "dtype": "float32", **term}


def test_the_command_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.py").write_text(EXAMPLE)
    (tmp_path / "broken.py").write_text("import torch\n1 / 0\n")
    (tmp_path / "text.py").write_text("def example(): return 'a text'\n")
    (tmp_path / "three.py").write_text("def example(): return 1, 2, 3\n")
    for given, words in [
        (["model.py:none", "--vary", "0=0,1"], "model.py has no function none, but example"),
        (["model.py", "--vary", "0=0,1"], "must be FILE.py:FUNCTION"),
        (["gone.py:example", "--vary", "0=0,1"], "gone.py cannot be run: FileNotFoundError"),
        (["broken.py:example", "--vary", "0=0,1"], "broken.py cannot be run: ZeroDivisionError"),
        (["text.py:example", "--vary", "0=0,1"], "must return a model and a batch, got 'a text'"),
        (["three.py:example", "--vary", "0=0,1"], "must return a model and a batch, got (1, 2, 3)"),
        (["model.py:example", "--vary", "0=0,1", "--at", "batch=8"], "--at: formula() needs a size for sequence"),
        (["model.py:example", "--vary", "1=0"], "vary names 1; the batch's tensors are 0 (by position)"),
    ]:
        assert main(["formula", f"{tmp_path}/{given[0]}", *given[1:]]) == 2
        assert words in capsys.readouterr().err
