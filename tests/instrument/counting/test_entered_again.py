"""A counter entered again while it is entered, and calls that end without a word."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.records import PhaseFlops

BATCH = 2
FIRST = 2 * BATCH * 3 * 5  # Linear(3, 5)
SECOND = 2 * BATCH * 5 * 7  # Linear(5, 7)


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7))


def batch() -> Tensor:
    return torch.randn(BATCH, 3)


def test_a_counter_entered_while_it_is_entered_counts_once() -> None:
    model = two_layers()
    counter, other = FlopCounter(model), FlopCounter(model)
    with counter, other:
        with counter:
            model(batch())
        model(batch())
    for each in (counter, other):
        assert FlopCounts(each.record()).forward == 2 * (FIRST + SECOND)


def test_a_counter_entered_by_a_module_on_another_thread_leaves_that_module_running() -> None:
    model = two_layers()
    counter = FlopCounter(model)

    class Enters(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with counter:
                x = model[0](x)
            return model[2](model[1](x))  # type: ignore[no-any-return]

    enters = Enters()
    model.add_module("enters", enters)
    modes: list[int] = []

    def work() -> None:
        enters(batch())
        modes.append(torch._C._len_torch_dispatch_stack())

    with counter:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    by_module = FlopCounts(counter.record()).by_module()
    assert (by_module["0"].forward, by_module["2"].forward) == (FIRST, SECOND)
    assert modes == [0]


def test_threads_that_follow_each_other_do_not_get_each_others_backwards() -> None:
    """Each numbers its autograd nodes from zero."""
    first, second = nn.Linear(5, 5), nn.Linear(5, 5)
    model = nn.ModuleDict({"first": first, "second": second})
    counter = FlopCounter(model)

    def work(order: tuple[nn.Module, nn.Module]) -> None:
        with counter:
            order[1](order[0](torch.ones(1, 5))).sum().backward()

    for order in ((first, second), (second, first)):
        thread = threading.Thread(target=work, args=(order,))
        thread.start()
        thread.join()
    product = 2 * 5 * 5
    by_module = FlopCounts(counter.record()).by_module()
    # The layer that comes first, in one thread the one and in the other the other, needs no gradient of its input.
    assert by_module["first"] == by_module["second"] == PhaseFlops(forward=2 * product, backward=(1 + 2) * product)
