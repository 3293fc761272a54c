"""What a user keeps of a run, an output or the counts, keeps nothing of the counter alive."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
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


def on_another_thread(model: nn.Module) -> Tensor:
    """An output whose graph has a hook on every node, which says whose it is."""
    outputs: list[Tensor] = []
    thread = threading.Thread(target=lambda: outputs.append(on_this_thread(model)))
    thread.start()
    thread.join()
    return outputs[0]


def with_its_backward_on_another_thread(model: nn.Module) -> Tensor:
    """An output whose graph has a hook on every node, which brings the dispatch mode."""
    output = on_this_thread(model)
    thread = threading.Thread(target=lambda: output.sum().backward(retain_graph=True))  # type: ignore[no-untyped-call]
    thread.start()
    thread.join()
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


@pytest.mark.parametrize("run", [on_this_thread, on_another_thread, with_its_backward_on_another_thread])
def test_a_kept_output_keeps_no_counter(run: Callable[[nn.Module], Tensor]) -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7))
    counter = FlopCounter(model)
    with counter:
        output = run(model)
    assert counter.total().forward == 2 * 2 * 3 * 5 + 2 * 2 * 5 * 7
    alive = weakref.ref(counter)
    del counter
    assert alive() is None
    output.sum().backward()  # type: ignore[no-untyped-call]  # with what is left of the hooks


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
