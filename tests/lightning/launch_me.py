"""Trains two ranks by the launcher that the command line names; run by test_launchers.

Everything that a spawned process needs to unpickle lives at module level.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import torch
from torch import nn

from lightning_flops import FlopsProfilerCallback
from tests.lightning.nets import loader, new_trainer, trunk


def main(root: str, strategy: str, folder: str) -> None:
    base: Any = importlib.import_module(root).LightningModule
    globals()["Net"] = type(
        "Net",
        (base,),
        {
            "__module__": __name__,
            "__init__": _init,
            "training_step": _training_step,
            "configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.01),
        },
    )
    if __name__ == "__main__":
        torch.manual_seed(3)
        logger = importlib.import_module(f"{root}.loggers").CSVLogger(folder, name="run", version=0)
        callback = FlopsProfilerCallback(profile_step=1, timing_steps=2)
        run = new_trainer(root, folder, callback, strategy=strategy, devices=2, logger=logger)
        run.fit(globals()["Net"](), loader(24))


def _init(self: Any) -> None:
    super(globals()["Net"], self).__init__()
    self.net = trunk()


def _training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
    return nn.functional.mse_loss(self.net(batch[0]), batch[1])


if len(sys.argv) == 4:
    main(*sys.argv[1:])
