"""Models whose batches all have the same shapes, some of which spend something else at every step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import torch
from torch import nn

from lightning_flops.schema.throughput import ThroughputSummary
from tests.every_step import DOORS, Data, Trained

STEPS = 130
"""The first check is due at step 103, the next one at step 206."""

LAYERS, WIDTH, ROWS = 10, 8, 8

PRODUCT = 2 * ROWS * WIDTH * WIDTH
"""FLOPs of one layer's forward: a multiply-add for each row and weight."""

WHOLE = STEPS * LAYERS * 3 * PRODUCT
"""Model FLOPs of a run in which every layer runs: one product in its forward, two in its backward."""


class Dropping(nn.Module):
    """Layers of which chance leaves some out.

    Args:
        keeps: the chance that a layer runs.
    """

    def __init__(self, keeps: float) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.keeps = keeps
        self.ran = 0

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        rows = rows.detach().requires_grad_()
        for layer in self.layers:
            if self.keeps == 1.0 or torch.rand(()) < self.keeps:
                rows = layer(rows)
                self.ran += 1
        return {"loss": rows.square().mean()}


@contextlib.contextmanager
def generous() -> Iterator[None]:
    """These runs are over in seconds, of which half a percent is no step: a check may take place all the same.

    Also where a busy machine lets a counted step take longer than all others together.
    """
    with (
        patch("lightning_flops.session.session.SHARE", 1e6),
        patch("lightning_flops.session.samples._GUESS", 0),
    ):
        yield


def train(door: str, folder: Path, *, keeps: float, profiled: bool = True) -> Trained:
    """Train such a model under *door*."""
    torch.manual_seed(3)
    model = Dropping(keeps).train()
    batches = tuple({"rows": torch.randn(ROWS, WIDTH)} for _ in range(STEPS))
    with generous():
        trained = DOORS[door](model, Data((), batches), folder, profiled)
    assert keeps < 1.0 or model.ran == STEPS * LAYERS
    return trained


def figures(summary: ThroughputSummary | None) -> dict[str, int | None]:
    """What a run says of its FLOPs, and how they are known."""
    assert summary is not None
    return {
        "counted": summary.steps_counted,
        "predicted": summary.steps_predicted,
        "unknown": summary.steps_unknown,
        "model_flops": summary.model_flops,
        "hardware_flops": summary.hardware_flops,
    }


CONFIRMED = {
    "counted": 2,
    "predicted": STEPS - 2,
    "unknown": 0,
    "model_flops": WHOLE,
    "hardware_flops": WHOLE,
}
REFUTED = {"counted": 2, "predicted": 0, "unknown": STEPS - 2, "model_flops": None, "hardware_flops": None}
