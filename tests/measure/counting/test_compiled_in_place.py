"""Modules compiled by ``module.compile()`` run their compiled code while they are counted, under their own names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.records import PhaseFlops

BATCH = 3


class Block(nn.Module):
    """Two products. (Torch does not compile a Sequential in place.)"""

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(self.first(x).tanh())
        return out


def counting_backend(ran: list[str]) -> Any:
    """A backend that writes down when it compiles a graph and when one runs."""

    def compiler(graph: Any, inputs: Any) -> Callable[..., Any]:
        ran.append("compiled")

        def run(*args: Any) -> Any:
            ran.append("ran")
            return graph(*args)

        return make_boxed_func(run)

    return aot_autograd(fw_compiler=compiler)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler's
@pytest.mark.parametrize("compiled_before", [True, False])
def test_a_block_compiled_in_place_stays_compiled_and_keeps_its_name(compiled_before: bool) -> None:
    torch._dynamo.reset()
    ran: list[str] = []
    model = nn.Sequential(nn.Linear(5, 5), Block(5, 7, 11), Block(11, 3, 4), nn.Linear(4, 2))
    for block in (model[1], model[2]):
        block.compile(backend=counting_backend(ran))
    x = torch.randn(BATCH, 5)

    def step() -> list[str]:
        ran.clear()
        model(x).sum().backward()
        return ran.copy()

    runs = ["ran"] * 4  # two blocks, forward and backward
    if compiled_before:
        step()
    with FlopCounter(model) as counter:
        counted = step()
    assert [what for what in counted if what == "ran"] == runs
    assert counted.count("compiled") == (0 if compiled_before else 4)
    assert step() == runs
    torch._dynamo.reset()
    counts = FlopCounts(counter.record())
    stem, head = 2 * BATCH * 5 * 5, 2 * BATCH * 4 * 2
    first, second = 2 * BATCH * (5 * 7 + 7 * 11), 2 * BATCH * (11 * 3 + 3 * 4)
    multiplying = {name: flops for name, flops in counts.own_by_module().items() if flops.total}
    assert multiplying == {
        "0": PhaseFlops(forward=stem, backward=stem),
        "1": PhaseFlops(forward=first, backward=2 * first),
        "2": PhaseFlops(forward=second, backward=2 * second),
        "3": PhaseFlops(forward=head, backward=2 * head),
    }
    assert not counts.notes
