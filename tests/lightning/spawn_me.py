"""Trains in two processes that the Trainer spawns, and prints what this one knows of it; run by test_launchers."""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from tests.lightning.nets import logger_in, new_trainer


class Net(LightningModule):
    """Of a module, so that a process that is spawned finds it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    root, rows = "lightning.pytorch", torch.ones(96, 4)
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=2)
    settings: dict[str, Any] = {"strategy": "ddp_spawn", "devices": 2}
    run = new_trainer(root, sys.argv[1], callback, logger=logger_in(sys.argv[1], "CSVLogger", root), **settings)
    before = callback.profile
    run.fit(Net(), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]  # a tensor is a dataset, too
    print(f"before {before}, after {[one.timing and one.timing.global_step_sec for one in callback.profiles]}")  # noqa: T201
