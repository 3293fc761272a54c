"""What a step costs outside of windows under each adapter: host µs over the same training without the profiler.

The same small network trains in short trainings, one after the other in one process: in a loop of its own, in a
Lightning ``Trainer``, in that of transformers and by a DeepSpeed engine, bare and with the profiler, in a new order in
every round. Each logs every 50 steps, to something that writes nothing, and the profiler's readings go along. The
figure of a training is the mean of its steps but the first 200; what the profiler counts in them to check its FLOPs is
in the mean. Differences are taken within a round: medians with 95% bootstrap intervals. CPU is the time of the thread
that trains. Two bare arms show how large a difference of nothing is.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers.logger import DummyLogger
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback, profile_training
from tests.lightning.nets import ROOT, new_trainer
from tests.ranks import DEEPSPEED_ON_CPU

from . import phase_times
from .machine import RESULTS
from .page import described, table, write_page
from .ratios import Target, difference
from .runner import in_rounds, start

OVER_BARE = Target(limit=60, unit="µs")
STEPS, UNSEEN_STEPS, LOG_EVERY = 800, 200, 50
NO_WINDOW = {"profile_step": 1_000_000}
BARE = "bare"
Settings = dict[str, Any] | None
ARMS: Mapping[str, Settings] = {
    BARE: None,
    "bare again": None,
    "monitor=True": NO_WINDOW,
    "timer_only=True": {**NO_WINDOW, "timer_only": True},
}


class Taken(NamedTuple):
    """Microseconds of the mean step of one training."""

    cpu: float  # Of the thread that trains
    wall: float


class SmallNet(LightningModule):
    """A step of well under a millisecond, in which a microsecond shows; it reads both clocks where one begins.

    It is the model of a loop, of Lightning's Trainer, and of that of transformers, which wants a forward with a loss.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self._read: list[tuple[float, float]] = []

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss of one step."""
        self._read.append((time.thread_time(), time.perf_counter()))
        return {"loss": self.layer(x).square().mean()}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """The same, as Lightning asks for it."""
        return self(batch)["loss"]  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def taken(self) -> Taken:
        """Microseconds of the mean of the steps after the first ones."""
        first, last = self._read[UNSEEN_STEPS], self._read[-1]
        steps = len(self._read) - 1 - UNSEEN_STEPS
        return Taken(*(1e6 * (end - begin) / steps for begin, end in zip(first, last, strict=True)))


def _batches() -> Any:
    """One for each step."""
    batches: Any = [torch.zeros(2, 64)] * STEPS
    return DataLoader(batches, batch_size=None)


def own_loop(net: SmallNet, settings: Settings, **_: Any) -> None:
    """A loop of one's own."""
    optimizer = net.configure_optimizers()
    logs: dict[str, Any] = {"log_every_n_steps": LOG_EVERY, "writer": lambda *_: None}
    with nullcontext() if settings is None else profile_training(net, optimizer, **logs, **settings):
        for rows in _batches():
            net(rows)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()


def lightning(net: SmallNet, settings: Settings, *, folder: Path) -> None:
    """A fit of Lightning's."""
    callbacks = [] if settings is None else [FlopsProfilerCallback(**settings)]
    trainer = new_trainer(ROOT, folder, *callbacks, logger=DummyLogger(), log_every_n_steps=LOG_EVERY)
    trainer.fit(net, _batches())


def transformers(net: SmallNet, settings: Settings, *, folder: Path) -> None:
    """A training of the Trainer of transformers."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from lightning_flops import FlopsProfilerTrainerCallback

    quiet: dict[str, Any] = {"report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    steps: dict[str, Any] = {"per_device_train_batch_size": 2, "max_steps": STEPS, "logging_steps": LOG_EVERY}
    arguments = TrainingArguments(output_dir=str(folder), dataloader_pin_memory=False, **steps, **quiet)
    rows: Any = [{"x": torch.zeros(64)}] * (2 * STEPS)
    callbacks: list[Any] = [] if settings is None else [FlopsProfilerTrainerCallback(**settings)]
    trainer = Trainer(model=net, args=arguments, train_dataset=rows, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def deepspeed(net: SmallNet, settings: Settings, *, folder: Path) -> None:
    """An engine of DeepSpeed's, which trains on this processor alone."""
    os.environ.update({**DEEPSPEED_ON_CPU, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": os.environ.get("MASTER_PORT", "29577")})
    import deepspeed

    from lightning_flops.deepspeed import attach

    deepspeed.init_distributed("gloo", verbose=False)
    config = {"train_micro_batch_size_per_gpu": 2, "steps_per_print": LOG_EVERY, "zero_allow_untested_optimizer": True}
    engine, *_rest = deepspeed.initialize(model=net, optimizer=net.configure_optimizers(), config=config)
    handle = None if settings is None else attach(engine, settings)
    for rows in _batches():
        engine.backward(engine(rows)["loss"])
        engine.step()
    if handle is not None:
        handle.detach()
    engine.destroy()


TRAININGS: Mapping[str, Any] = {
    "own loop": own_loop,
    "Lightning": lightning,
    "transformers": transformers,
    "DeepSpeed": deepspeed,
}


def _rows(name: str, rounds: int, folder: Path) -> list[list[object]]:
    """A training under every arm."""

    def taken(settings: Settings) -> Taken:
        net = SmallNet()
        gc.collect()
        TRAININGS[name](net, settings, folder=folder)
        return net.taken()

    samples = in_rounds({arm: partial(taken, settings) for arm, settings in ARMS.items()}, rounds)
    rows: list[list[object]] = []
    for arm, ones in samples.items():
        rows.append([name, arm])
        for mine, bare in zip(zip(*ones, strict=True), zip(*samples[BARE], strict=True), strict=True):
            rows[-1] += [f"{median(mine):.0f}", None if arm == BARE else difference(mine, bare).text(1)]
        over = difference([one.cpu for one in ones], [one.cpu for one in samples[BARE]])
        rows[-1].append(None if ARMS[arm] is None else OVER_BARE.verdict(over))
    return rows


def main() -> None:
    """Measures what steps cost and whether reported latencies are true, and writes the page of both."""
    named = {"sizes": list(phase_times.SIZES), "trainings": list(TRAININGS)}
    options = start(__file__, __doc__, RESULTS / "time.md", rounds=20, **named)
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in options.trainings:
            rows += _rows(name, options.rounds, Path(folder))
    columns = ["training", "arm", ">CPU", ">over bare", ">wall", ">over bare", "target: mean CPU over bare"]
    lines = ["# What times come to, and what timing costs", "", "Again: `make bench-time`.", ""]
    lines += phase_times.section(options.sizes, options.rounds)
    lines += [*described(__doc__, "torch", "lightning", "transformers", "deepspeed", level="##"), *table(columns, rows)]
    write_page(options.output, lines)


if __name__ == "__main__":
    main()
