"""What a compiled backward repeats is told from its gradients by what it depends on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.torch_private import optional

BATCH, INPUTS, HIDDEN, OUTPUTS = 3, 5, 7, 11
FIRST, SECOND = 2 * BATCH * INPUTS * HIDDEN, 2 * BATCH * HIDDEN * OUTPUTS

aten = torch.ops.aten


class Checkpointed(nn.Module):
    """Two products under a checkpoint, which repeats both of them for the sigmoid behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, OUTPUTS), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return out


def compiled_and_run_once() -> Any:
    """The model, compiled for this batch, forward and backward."""
    torch._dynamo.reset()
    model: Any = torch.compile(Checkpointed(), backend="aot_eager")
    model(torch.randn(BATCH, INPUTS)).sum().backward()
    return model


def test_a_backward_that_cannot_be_read_counts_as_backward_and_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(function: Any) -> Any:
        raise LookupError("no graph is kept")

    model = compiled_and_run_once()
    monkeypatch.setattr(optional, "backward_graph", unreadable)
    with FlopCounter(model) as counter:
        model(torch.randn(BATCH, INPUTS)).sum().backward()
    counts = FlopCounts(counter.record())
    assert (counts.forward, counts.recompute) == (FIRST + SECOND, 0)
    assert counts.backward == FIRST + 2 * SECOND + FIRST + SECOND
    (note,) = counts.notes
    assert note.startswith("What the compiled backward of the root repeats of its forward could not be read apart")
