"""docs/mfu.md: the FLOPs of its models by hand, and the rows that its program writes."""

from __future__ import annotations

import pytest

from docs import write_mfu

LAYER_OF_LLAMA_3_8B = 4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 14336  # Q, K, V, output; gate, up, down
BY_HAND = {  # forward and backward of a token are 6 FLOPs a weight, and 12 a token of the scores in each channel
    ("MPT 7b", 2048): 6 * (32 * 12 * 4096**2 + 4096 * 50368) + 12 * 32 * 2048 * 4096,
    ("TinyLlama 1.1B", 2048): (
        6 * (22 * (2048 * (2048 + 256 + 256 + 2048) + 3 * 2048 * 5632) + 2048 * 32000) + 12 * 22 * 2048 * 2048
    ),
    ("Llama 3 8B", 8192): 6 * (32 * LAYER_OF_LLAMA_3_8B + 4096 * 128256) + 12 * 32 * 8192 * 4096,
}


@pytest.mark.parametrize("model", BY_HAND)
def test_flops_of_a_token_are_those_by_hand(model: tuple[str, int]) -> None:
    name, sequence = model
    width, layers = {"MPT 7b": (4096, 32), "TinyLlama 1.1B": (2048, 22), "Llama 3 8B": (4096, 32)}[name]
    assert write_mfu.flops_per_token(name, sequence) == (BY_HAND[model], 6 * layers * sequence * width)


def test_the_page_has_a_row_of_every_run_and_these_as_they_come_out_now() -> None:
    page = write_mfu.PAGE.read_text(encoding="utf-8")
    assert page.count("\n| ") == len(write_mfu.RUNS) + 1 >= 16
    for run in write_mfu.RUNS:
        if run.model in ("MPT 125m", "MPT 7b", "TinyLlama 1.1B", "Llama 3 8B"):
            assert f"\n{write_mfu.row_of(run)}\n" in page
