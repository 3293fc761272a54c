"""Fits twice while somebody has replaced the clocks of ``time``, and writes what came of it; for test_replaced_clock.

The package is first imported in the second fit, which is profiled.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ThroughputMonitor
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

CLOCKS = ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns")
BATCHES, BATCH, IN, OUT = 12, 6, 4, 3
STEP = 1_000_000
"""What a replaced clock goes on by at each reading; exact, also as a float."""

FOUND = "found.json"

true_now = time.perf_counter


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(IN, OUT)
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.linear(batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logger(CSVLogger):
    """Keeps what Lightning's own monitor logs, whose times are those of the replaced clock."""

    def __init__(self, folder: str) -> None:
        super().__init__(folder)
        self.times: list[float] = []

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        self.times += [value for name, value in metrics.items() if name == "train/time"]


def fit(folder: str, make: Callable[[], list[Any]]) -> dict[str, Any]:
    readings: Counter[str] = Counter()

    def replaced(name: str) -> Callable[[], float]:
        def read() -> float:
            readings[name] += 1
            return STEP * readings[name]

        return read

    torch.manual_seed(3)
    net, logger = Net(), Logger(folder)
    rows: DataLoader[Any] = DataLoader(torch.randn(BATCHES * BATCH, IN), batch_size=BATCH)  # type: ignore[arg-type]
    began = true_now()
    with ExitStack() as stack:
        for name in CLOCKS:
            stack.enter_context(mock.patch.object(time, name, replaced(name)))
        trainer = pl.Trainer(
            accelerator="cpu",
            callbacks=[ThroughputMonitor(batch_size_fn=len), *make()],
            enable_checkpointing=False,
            enable_model_summary=False,
            enable_progress_bar=False,
            log_every_n_steps=1,
            logger=logger,
            max_epochs=1,
        )
        trainer.fit(net, rows)
    return {"losses": net.losses, "logged": logger.times, "readings": readings, "took_sec": true_now() - began}


def main(folder: str) -> None:
    profilers: list[Any] = []

    def profiler() -> list[Any]:
        assert "lightning_flops.session" not in sys.modules
        from lightning_flops import FlopsProfilerCallback

        profilers.append(FlopsProfilerCallback(profile_step=1, timing_steps=3))
        return profilers

    plain = fit(folder, list)
    profiled = fit(folder, profiler)
    (callback,) = profilers
    assert callback.profile is not None
    assert callback.throughput is not None
    found = {"profile": callback.profile.to_json(), "throughput": callback.throughput.to_json()}
    Path(folder, FOUND).write_text(json.dumps({"plain": plain, "profiled": profiled, **found}))


if __name__ == "__main__":
    main(sys.argv[1])
