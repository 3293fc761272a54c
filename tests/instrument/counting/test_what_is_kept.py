"""What a user keeps of a run, an output or the counts, keeps nothing of the counter alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.pytorch import count_flops


def on_this_thread(model: nn.Module) -> Tensor:
    """An output whose graph has a hook for a backward on another thread."""
    output: Tensor = model(torch.randn(2, 3))
    return output


@pytest.fixture(autouse=True)
def without_garbage_collection() -> Iterator[None]:
    """Only what nothing refers to any more goes."""
    with FlopCounter(nn.Linear(3, 5)):
        pass  # what a first time imports leaves frames behind
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("causal_attention", ["full", "half"])
def test_kept_counts_keep_no_model_and_no_garbage_collection_is_needed_for_it(
    causal_attention: Literal["full", "half"],
) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7))
    with count_flops(model, causal_attention=causal_attention) as counts:
        on_this_thread(model).sum().backward()  # type: ignore[no-untyped-call]
    alive = weakref.ref(model)
    del model
    assert alive() is None
    assert counts.forward == 2 * 2 * 3 * 5 + 2 * 2 * 5 * 7
