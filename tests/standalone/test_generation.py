"""``get_model_profile(mode="generate")``: all that a generation computes, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from lightning_flops import get_model_profile

VOCABULARY, WIDTH, LAYERS, HEADS = 64, 32, 2, 4
ROWS, PROMPT, NEW = 2, 5, 4
TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}


def tiny_gpt2() -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "n_embd": WIDTH,
        "n_layer": LAYERS,
        "n_head": HEADS,
        "n_positions": 32,
    }
    return GPT2LMHeadModel(GPT2Config(**sizes, **TOKENS))


def gpt2_flops(*, rows: int, tokens: int, seen: int) -> int:
    """One forward on *tokens* a row, which attend to *seen* positions; logits are of the last token alone.

    A layer's weights: qkv 3, output 1, feed-forward 4 and 4 times WIDTH x WIDTH.
    """
    weights = 12 * WIDTH * WIDTH
    attention = 2 * tokens * seen * WIDTH
    return 2 * rows * (LAYERS * (tokens * weights + attention) + WIDTH * VOCABULARY)


def prompt() -> Tensor:
    return torch.arange(1, 1 + ROWS * PROMPT).reshape(ROWS, PROMPT)


def flops_of(model: Any, **kwargs: Any) -> int:
    flops, macs, _ = get_model_profile(
        model, args=[prompt()], kwargs=kwargs, mode="generate", print_profile=False, as_string=False
    )
    assert flops == 2 * macs
    return int(flops)


def test_gpt2s_first_forward_takes_the_prompt_and_every_other_one_token() -> None:
    prefill = gpt2_flops(rows=ROWS, tokens=PROMPT, seen=PROMPT)
    decode = sum(gpt2_flops(rows=ROWS, tokens=1, seen=PROMPT + step) for step in range(1, NEW))
    settings: dict[str, Any] = {"do_sample": False, "use_cache": True}
    assert flops_of(tiny_gpt2(), max_new_tokens=NEW, **settings) == prefill + decode
    # The generation of one token is the prefill alone.
    assert flops_of(tiny_gpt2(), max_new_tokens=1, **settings) == prefill


def test_without_a_cache_every_forward_takes_all_tokens() -> None:
    lengths = [PROMPT + step for step in range(NEW)]
    expected = sum(gpt2_flops(rows=ROWS, tokens=length, seen=length) for length in lengths)
    assert flops_of(tiny_gpt2(), max_new_tokens=NEW, do_sample=False, use_cache=False) == expected


def test_llamas_grouped_heads_and_gates_are_counted() -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
    }
    heads: dict[str, Any] = {"num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 32}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, **TOKENS))

    def forward(tokens: int, seen: int) -> int:
        # q and o are WIDTH x WIDTH, k and v half as wide; three matrices of the gated feed-forward.
        weights = 3 * WIDTH * WIDTH + 3 * WIDTH * 48
        return 2 * ROWS * (LAYERS * (tokens * weights + 2 * tokens * seen * WIDTH) + WIDTH * VOCABULARY)

    decode = sum(forward(1, PROMPT + step) for step in range(1, NEW))
    assert flops_of(model, max_new_tokens=NEW, do_sample=False) == forward(PROMPT, PROMPT) + decode


def test_sampling_draws_the_same_tokens_in_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_gpt2()
    drawn: list[list[list[int]]] = []
    generate = model.generate

    def keep(*args: Any, **kwargs: Any) -> Any:
        output = generate(*args, **kwargs)
        drawn.append(output.tolist())
        return output

    model.generate = keep
    random = torch.get_rng_state()
    flops_of(model, max_new_tokens=20, do_sample=True)
    assert torch.equal(torch.get_rng_state(), random)
    assert len(drawn) == 4 and all(tokens == drawn[0] for tokens in drawn)  # to warm up, timed, counted, by modules
