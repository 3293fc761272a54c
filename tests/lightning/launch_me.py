"""Trains two ranks by the launcher that the command line names; run by test_launchers.

Everything that a spawned process needs to unpickle lives at module level.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_flops import FlopsProfilerCallback
from lightning_flops.measure.timing.clocks import WallClock
from lightning_flops.run import window as instruments
from tests.fake_clock import FakeNow
from tests.lightning.nets import SlowSGD, loader, new_trainer, trunk

NOW = FakeNow()
"""This rank's clock: each row it loads takes half a second, a forward two, a backward four and an update eight."""


def main(root: str, strategy: str, folder: str) -> None:
    base: Any = importlib.import_module(root).LightningModule
    globals()["Net"] = type(
        "Net",
        (base,),
        {
            "__module__": __name__,
            "__init__": _init,
            "training_step": _training_step,
            "backward": _backward,
            "configure_optimizers": _configure_optimizers,
        },
    )
    instruments.clock_for = lambda device: WallClock(NOW)  # type: ignore[attr-defined]
    if __name__ == "__main__":
        torch.manual_seed(3)
        logger = importlib.import_module(f"{root}.loggers").CSVLogger(folder, name="run", version=0)
        callback = FlopsProfilerCallback(profile_step=1, timing_steps=2)
        run = new_trainer(root, folder, callback, strategy=strategy, devices=2, logger=logger)
        run.fit(globals()["Net"](), loader(24, on_fetch=_load))
        assert callback.profile is not None and callback.throughput is not None
        left = {"profile": callback.profile.to_json(), "throughput": callback.throughput.to_json()}
        Path(folder, f"returned{run.global_rank}.json").write_text(json.dumps(left))


def _init(self: Any) -> None:
    super(globals()["Net"], self).__init__()
    self.net = trunk()


def _load() -> None:
    NOW.sleep(0.5)


def _backward(self: Any, loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]
    NOW.sleep(4.0)


def _configure_optimizers(self: Any) -> torch.optim.Optimizer:
    optimizer = SlowSGD(self.parameters(), lr=0.01)
    optimizer.now = NOW
    return optimizer


def _training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
    NOW.sleep(2.0)
    return nn.functional.mse_loss(self.net(batch[0]), batch[1])


if len(sys.argv) == 4:
    main(*sys.argv[1:])
