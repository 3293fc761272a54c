"""``get_model_profile(mode="generate")``: tokens, and the FLOPs of prefill and decoding, counted by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from lightning_flops import get_model_profile
from tests.fake_clock import FakeNow
from tests.left_on_torch import torch_state_and_warnings
from tests.standalone.nets import model_state

VOCABULARY, WIDTH, LAYERS, HEADS = 64, 32, 2, 4
ROWS, PROMPT, NEW = 2, 5, 4

PREFILL = "prefill flops (all up to the second forward of the model)"
DECODE = f"decode flops ({NEW - 1} later forwards)"


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=32,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip


def gpt2_flops(*, rows: int, tokens: int, seen: int) -> int:
    """One forward on *tokens* a row, which attend to *seen* positions; logits are of the last token alone.

    A layer's weights: qkv 3, output 1, feed-forward 4 and 4 times WIDTH x WIDTH.
    """
    weights = 12 * WIDTH * WIDTH
    attention = 2 * tokens * seen * WIDTH
    return 2 * rows * (LAYERS * (tokens * weights + attention) + WIDTH * VOCABULARY)


def prompt(rows: int = ROWS, length: int = PROMPT) -> Tensor:
    return torch.arange(1, 1 + rows * length).reshape(rows, length)


def profiled(
    model: Any, *args: Any, capsys: pytest.CaptureFixture[str], **kwargs: Any
) -> tuple[dict[str, str], tuple[Any, Any, Any]]:
    """The report's lines by their labels, and what was returned."""
    returned = get_model_profile(
        model, args=list(args), kwargs=kwargs, mode="generate", detailed=False, as_string=False
    )
    printed = capsys.readouterr().out
    return {line.partition(":")[0]: line.partition(":")[2].strip() for line in printed.splitlines()}, returned


def number(flops: int) -> str:
    return f"{round(flops / 1e3, 2)} K" if flops < 10**6 else f"{round(flops / 1e6, 2)} M"


def test_gpt2s_prefill_takes_the_prompt_and_every_other_forward_one_token(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gpt2()
    lines, (flops, macs, _) = profiled(
        model, prompt(), capsys=capsys, max_new_tokens=NEW, do_sample=False, use_cache=True
    )
    prefill = gpt2_flops(rows=ROWS, tokens=PROMPT, seen=PROMPT)
    decode = sum(gpt2_flops(rows=ROWS, tokens=1, seen=PROMPT + step) for step in range(1, NEW))
    assert (flops, macs) == (prefill + decode, (prefill + decode) // 2)
    assert (lines[PREFILL], lines[DECODE]) == (number(prefill), number(decode))
    assert lines["new tokens"] == f"{ROWS * NEW} ({ROWS} sequences x {NEW})"
    assert float(lines["tokens/second = new tokens / fwd latency"]) > 0


def test_without_a_cache_every_forward_takes_all_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = profiled(tiny_gpt2(), prompt(), capsys=capsys, max_new_tokens=NEW, do_sample=False, use_cache=False)
    lengths = [PROMPT + step for step in range(NEW)]
    prefill, *decode = (gpt2_flops(rows=ROWS, tokens=length, seen=length) for length in lengths)
    assert (lines[PREFILL], lines[DECODE]) == (number(prefill), number(sum(decode)))


def test_one_new_token_is_all_prefill(capsys: pytest.CaptureFixture[str]) -> None:
    lines, (flops, _, _) = profiled(tiny_gpt2(), capsys=capsys, input_ids=prompt(), max_new_tokens=1, do_sample=False)
    assert flops == gpt2_flops(rows=ROWS, tokens=PROMPT, seen=PROMPT)
    assert lines[PREFILL] == number(flops)
    assert lines["decode flops (0 later forwards)"] == "0"


def test_llamas_grouped_heads_and_gates_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_hidden_layers=LAYERS,
            num_attention_heads=HEADS, num_key_value_heads=2, max_position_embeddings=32,
            bos_token_id=None, eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip

    def forward(tokens: int, seen: int) -> int:
        # q and o are WIDTH x WIDTH, k and v half as wide; three matrices of the gated feed-forward.
        weights = 3 * WIDTH * WIDTH + 3 * WIDTH * 48
        return 2 * ROWS * (LAYERS * (tokens * weights + 2 * tokens * seen * WIDTH) + WIDTH * VOCABULARY)

    lines, _ = profiled(model, prompt(), capsys=capsys, max_new_tokens=NEW, do_sample=False)
    decode = sum(forward(1, PROMPT + step) for step in range(1, NEW))
    assert (lines[PREFILL], lines[DECODE]) == (number(forward(PROMPT, PROMPT)), number(decode))


def test_sampling_draws_the_same_tokens_in_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gpt2()
    model.generation_config.eos_token_id = 7  # a call may end early, but then all of them
    random = torch.get_rng_state()
    lines, _ = profiled(model, prompt(rows=1), capsys=capsys, max_new_tokens=20, do_sample=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert "n/a" not in lines["new tokens"]


def test_several_sequences_of_one_prompt_and_beams_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"max_new_tokens": NEW, "do_sample": False, "num_beams": 3, "num_return_sequences": 2}
    lines, _ = profiled(tiny_gpt2(), prompt(), capsys=capsys, return_dict_in_generate=True, **settings)
    assert lines["new tokens"] == f"{2 * ROWS * NEW} ({2 * ROWS} sequences x {NEW})"
    # All three beams of a row start from the prompt.
    assert lines[PREFILL] == number(gpt2_flops(rows=3 * ROWS, tokens=PROMPT, seen=PROMPT))


def test_an_encoders_work_is_prefill_and_its_output_does_not_tell_the_tokens(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4,
            eos_token_id=None, pad_token_id=0,
        )
    )  # fmt: skip
    settings = {"max_new_tokens": NEW, "do_sample": False, "decoder_start_token_id": 0}
    lines, (flops, _, _) = profiled(model, prompt(), capsys=capsys, **settings)
    assert lines["new tokens"] == "n/a (the output of an encoder and decoder does not begin with the input)"
    assert "tokens/second = new tokens / fwd latency" not in lines
    # Keys and values of the encoder's output are made once, in the first forward of the decoder.
    own = 4 * WIDTH * WIDTH
    other = 2 * WIDTH * WIDTH
    feed = 2 * WIDTH * 64

    def decoder(seen: int) -> int:
        return own + 2 * seen * WIDTH + other + 2 * PROMPT * WIDTH + feed + WIDTH * VOCABULARY

    encoder = PROMPT * (own + feed) + 2 * PROMPT * PROMPT * WIDTH
    prefill = 2 * ROWS * (encoder + PROMPT * other + decoder(1))
    decode = 2 * ROWS * sum(decoder(1 + step) for step in range(1, NEW))
    assert flops == prefill + decode
    assert (lines[PREFILL], lines[DECODE]) == (number(prefill), number(decode))


class Wrapper(nn.Module):
    """Hands ``generate`` on, as adapters do, and is never called itself."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        return self.model.generate(*args, **kwargs)  # type: ignore[operator]


def test_a_wrapper_that_is_never_called_has_the_forwards_of_what_is_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    lines, _ = profiled(Wrapper(tiny_gpt2()), prompt(), capsys=capsys, max_new_tokens=NEW, do_sample=False)
    assert lines[PREFILL] == number(gpt2_flops(rows=ROWS, tokens=PROMPT, seen=PROMPT))
    assert DECODE in lines


class Generating(nn.Module):
    """Calls *function* in place of generating."""

    def __init__(self, function: Callable[[Generating, Tensor], Any]) -> None:
        super().__init__()
        self.function = function
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]

    def generate(self, tokens: Tensor) -> Any:
        return self.function(self, tokens)


def longer(tokens: Tensor, by: int) -> Tensor:
    return torch.cat([tokens, torch.zeros(len(tokens), by, dtype=tokens.dtype)], dim=1)


def several_a_forward(self: Generating, tokens: Tensor) -> Tensor:
    self(torch.ones(1, 4))
    return longer(tokens, 3)


def prompt_in_pieces(self: Generating, tokens: Tensor) -> Tensor:
    for _ in range(3):
        self(torch.ones(1, 4))
    return longer(tokens, 2)


def nothing_called(self: Generating, tokens: Tensor) -> Tensor:
    return longer(tokens, 2)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (several_a_forward, "1 forwards made 3 tokens, so some made several"),
        (prompt_in_pieces, "3 forwards made 2 tokens, so the prompt may have taken several"),
        (nothing_called, "no forward of the model was seen"),
    ],
)
def test_where_prefill_and_decoding_cannot_be_told_apart_the_report_says_why(
    function: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, _ = profiled(Generating(function), prompt(), capsys=capsys)
    assert lines["prefill flops"] == lines["decode flops"] == f"n/a ({reason})"


@pytest.mark.parametrize(
    ("given", "made", "reason"),
    [
        (torch.ones(1, 4), torch.ones(1, 6), "the input is no table of token ids"),
        (prompt(), "text", "the output is no table of token ids"),
        (prompt(), prompt()[:, :3], "the output is not the input made longer"),
        (prompt(), longer(prompt() + 1, 2), "the output does not begin with the input"),
        (prompt(), longer(prompt(rows=3), 2), "the output is not the input made longer"),
    ],
)
def test_where_new_tokens_cannot_be_told_the_report_says_why(
    given: Tensor, made: Any, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines, _ = profiled(Generating(lambda self, tokens: made), given, capsys=capsys)
    assert lines["new tokens"] == f"n/a ({reason})"
    assert "tokens/second = new tokens / fwd latency" not in lines


def test_calls_that_make_different_numbers_of_tokens_have_no_rate(capsys: pytest.CaptureFixture[str]) -> None:
    lengths = iter(range(1, 9))
    lines, _ = profiled(Generating(lambda self, tokens: longer(tokens, next(lengths))), prompt(), capsys=capsys)
    assert lines["new tokens"] == "n/a (one call made more of them than another)"


def test_prefill_and_decoding_have_a_time_and_a_rate_each(now: FakeNow, capsys: pytest.CaptureFixture[str]) -> None:
    # Of each call: before its first forward, and in each of three forwards. The second and the third call are timed.
    calls = iter([(9.0, 9.0), (50.0, 50.0), (1.0, 2.0), (3.0, 4.0), (50.0, 50.0)])

    def generate(self: Generating, tokens: Tensor) -> Tensor:
        before, each = next(calls)
        now.sleep(before)
        for _ in range(3):
            self(torch.ones(1, 4))
            now.sleep(each)
        return longer(tokens, 3)

    get_model_profile(Generating(generate), args=[prompt()], mode="generate", timed_runs=2)
    printed = capsys.readouterr().out
    lines = {line.partition(":")[0]: line.partition(":")[2].strip() for line in printed.splitlines()}
    prefill, decode = (1 + 2 + 3 + 4) / 2, (2 * 2 + 2 * 4) / 2
    assert lines["fwd latency"] == f"{prefill + decode:.0f} s (mean of 2 runs)"
    assert lines["prefill latency"] == f"{prefill:.0f} s (mean of 2 runs)"
    assert lines["decode latency"] == f"{decode:.0f} s (mean of 2 runs)"
    assert lines["prefill tokens/second = prompt tokens / prefill latency"] == (
        f"{ROWS * PROMPT / prefill:.2f} ({ROWS * PROMPT} tokens)"
    )
    assert lines["decode tokens/second = new tokens after the first / decode latency"] == (
        f"{ROWS * 2 / decode:.2f} ({ROWS * 2} tokens)"
    )


def test_timed_calls_that_call_the_model_more_often_have_no_phases(capsys: pytest.CaptureFixture[str]) -> None:
    calls = iter([1, 2, 3, 3])

    def generate(self: Generating, tokens: Tensor) -> Tensor:
        for _ in range(next(calls)):
            self(torch.ones(1, 4))
        return longer(tokens, 2)

    lines, _ = profiled(Generating(generate), prompt(), capsys=capsys)
    assert lines["prefill latency, decode latency"] == "n/a (2 forwards were counted, and 3 were seen in a timed call)"


@pytest.mark.parametrize("failing_call", [1, 2, 3, 4])
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_whichever_generation_raises_nothing_is_left(failing_call: int, error: type[BaseException]) -> None:
    calls = []

    def fail(self: Generating, tokens: Tensor) -> Tensor:
        calls.append(tokens)
        self(torch.ones(1, 4))
        if len(calls) == failing_call:
            self.layer.register_forward_hook(raises)
        self(torch.ones(1, 4))
        return longer(tokens, 2)

    def raises(*_: Any) -> None:
        self_hooks = model.layer._forward_hooks
        self_hooks.clear()
        raise error("mine")

    model = Generating(fail)
    before, torch_before, random = model_state(model), torch_state_and_warnings(), torch.get_rng_state()
    with pytest.raises(error, match="mine"):
        get_model_profile(model, args=[prompt()], mode="generate", print_profile=False)
    assert len(calls) == failing_call
    assert torch_state_and_warnings() == torch_before
    assert model_state(model) == before
    assert torch.equal(torch.get_rng_state(), random)
