"""A repetition is heard of where grad is enabled inside a backward, and nothing of that stays behind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.records import PhaseFlops

ROWS, WIDTH = 5, 8
LAYER = 2 * ROWS * WIDTH * WIDTH


def test_an_exception_in_a_repetition_ends_it() -> None:
    """The next backward's products are the backward's."""
    layer = nn.Linear(WIDTH, WIDTH)
    fails = [False, True, False, False]

    def block(x: Tensor) -> Tensor:
        if fails.pop(0):
            raise ZeroDivisionError
        return torch.sigmoid(layer(x))

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with FlopCounter(layer) as counter:
        with pytest.raises(ZeroDivisionError):
            checkpoint(block, x, use_reentrant=False).sum().backward()
        checkpoint(block, x, use_reentrant=False).sum().backward()
        layer(x).sum().backward()
    counts = FlopCounts(counter.record())
    assert counts.total == PhaseFlops(forward=3 * LAYER, backward=2 * 2 * LAYER, recompute=LAYER)
    assert not counts.notes


def test_bytes_and_calls_of_what_is_repeated_without_grad_are_recompute() -> None:
    weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def block(x: Tensor) -> Tensor:
        with torch.no_grad():
            kept = (x @ weight).relu()
        return torch.sigmoid(x + kept)

    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with FlopCounter(None) as counter:
        checkpoint(block, x, use_reentrant=False).sum().backward()
    cells = {(cell.operator, cell.phase): cell for cell in counter.record().cells}
    for operator in ("aten.mm", "aten.relu"):
        forward, again = cells[operator, "forward"], cells[operator, "recompute"]
        assert (again.calls, again.flops) == (1, LAYER if operator == "aten.mm" else 0)
        assert (again.bytes_read, again.bytes_written) == (forward.bytes_read, forward.bytes_written)
        assert (operator, "backward") not in cells


class Reversible(torch.autograd.Function):
    """Adds a layer of one half to the other half; its backward works its input out of its output, and runs it again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module) -> Tensor:
        ctx.layer = layer
        left, right = x.chunk(2, -1)
        y = torch.cat([left, right + layer(left)], -1)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        left, right = ctx.saved_tensors[0].chunk(2, -1)
        with torch.no_grad():
            x = torch.cat([left, right - ctx.layer(left)], -1)
        with torch.enable_grad():
            left, right = x.requires_grad_().chunk(2, -1)
            y = torch.cat([left, right + ctx.layer(left)], -1)
        return *torch.autograd.grad(y, (x, *ctx.layer.parameters()), grads)[:1], None


def test_the_inverse_that_a_reversible_layer_runs_in_its_backward_is_recompute() -> None:
    layer = nn.Linear(8, 8, bias=False)
    with FlopCounter(layer) as counter:
        Reversible.apply(torch.randn(4, 16, requires_grad=True), layer).sum().backward()  # type: ignore[no-untyped-call]
    product = 2 * 4 * 8 * 8
    assert counter.total() == PhaseFlops(forward=product, backward=2 * product, recompute=2 * product)
