"""What a step costs outside of windows under each adapter: host time over the same training without the profiler.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.step_cost`` runs it alone.

The same small network trains in short trainings, one after the other in one process: in a loop of its own, in a
Lightning ``Trainer`` and in that of transformers, bare and with the profiler, in a new order in every round. Each
logs every 50 steps, to something that writes nothing, and the profiler's readings go along. The figure of a training is
the mean of its steps but the first ones, in which the profiler counts what it is free to count; differences are taken
within a round. Two bare arms tell what a difference of nothing looks like.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback, profile_training

from .machine import restart_in_one_thread_environment
from .ratios import Estimate, Target, median_with_interval
from .time_report import RESULT, write_section

logger = logging.getLogger("benchmarks.step_cost")

MODULE = "benchmarks.step_cost"
OVER_BARE = Target(limit=60, unit="µs")
STEPS, UNSEEN_STEPS, LOG_EVERY = 800, 200, 50
NO_WINDOW = {"profile_step": 1_000_000}
BARE, BARE_AGAIN, MONITOR = "bare", "bare again", "monitor=True"
ARMS: Mapping[str, dict[str, Any] | None] = {
    BARE: None,
    BARE_AGAIN: None,
    MONITOR: NO_WINDOW,
    "timer_only=True": {**NO_WINDOW, "timer_only": True},
}
Settings = dict[str, Any] | None


class Taken(NamedTuple):
    """Microseconds of the mean step of one training."""

    cpu: float
    """Of the thread that trains."""
    wall: float


class Clock:
    """Reads both clocks where each step's forward begins."""

    def __init__(self) -> None:
        self.read: list[tuple[float, float]] = []

    def step_begins(self) -> None:
        """What follows until the next call is one step."""
        self.read.append((time.thread_time(), time.perf_counter()))

    def taken(self) -> Taken:
        """Of the steps after the first ones."""
        first, last = self.read[UNSEEN_STEPS], self.read[-1]
        steps = len(self.read) - 1 - UNSEEN_STEPS
        return Taken(*(1e6 * (end - begin) / steps for begin, end in zip(first, last, strict=True)))


def batches() -> list[torch.Tensor]:
    """One for each step."""
    return [torch.zeros(2, 64)] * STEPS


def own_loop(settings: Settings, clock: Clock, **_: Any) -> None:
    """A loop over a small model."""
    model = nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    if settings is None:
        profiler: Any = nullcontext()
    else:
        profiler = profile_training(model, optimizer, log_every_n_steps=LOG_EVERY, writer=lambda *_: None, **settings)
    with profiler:
        for rows in loader:
            clock.step_begins()
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


class SmallNet(LightningModule):
    """A step of well under a millisecond, in which a microsecond shows."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.clock = clock

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """A forward and a loss."""
        self.clock.step_begins()
        return self.layer(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, whose step is short."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Unwritten(Logger):
    """A logger that writes nothing: what is measured is not what writing costs."""

    name = version = ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Nothing."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


def lightning(settings: Settings, clock: Clock, *, folder: Path, accelerator: str = "cpu") -> None:
    """A fit of Lightning's."""
    trainer = Trainer(
        accelerator=accelerator, devices=1, max_epochs=1, logger=Unwritten(), log_every_n_steps=LOG_EVERY,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
        callbacks=[] if settings is None else [FlopsProfilerCallback(**settings)],
    )  # fmt: skip
    loader: Any = DataLoader(batches(), batch_size=None)  # type: ignore[arg-type]
    trainer.fit(SmallNet(clock), loader)


class NetWithLoss(nn.Module):
    """A forward and a loss, as the Trainer of transformers wants it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.clock = clock

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The loss."""
        self.clock.step_begins()
        return {"loss": self.layer(x).square().mean()}


def transformers(settings: Settings, clock: Clock, *, folder: Path, accelerator: str = "cpu") -> None:
    """A training of the Trainer of transformers."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from lightning_flops import FlopsProfilerTrainerCallback

    arguments = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=STEPS, report_to="none", save_strategy="no",
        logging_steps=LOG_EVERY, use_cpu=accelerator == "cpu", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    rows: Any = [{"x": torch.zeros(64)}] * (2 * STEPS)
    callbacks: list[Any] = [] if settings is None else [FlopsProfilerTrainerCallback(**settings)]
    trainer = Trainer(model=NetWithLoss(clock), args=arguments, train_dataset=rows, callbacks=callbacks)
    trainer.remove_callback(PrinterCallback)
    trainer.train()


Training = Callable[..., None]
TRAININGS: Mapping[str, Training] = {"own loop": own_loop, "Lightning": lightning, "transformers": transformers}
Samples = dict[str, dict[str, list[Taken]]]
"""By training, by arm: one figure for each round."""


def measure(
    trainings: Mapping[str, Training],
    *,
    rounds: int,
    folder: Path,
    accelerator: str = "cpu",
    arms: Mapping[str, Settings] = ARMS,
) -> Samples:
    """Every training under every arm, in a new order in each round, after a round that is in no figure."""
    generator = random.Random(0)
    samples: Samples = {name: {arm: [] for arm in arms} for name in trainings}
    pairs = [(name, arm) for name in trainings for arm in arms]
    for number in range(rounds + 1):
        for name, arm in generator.sample(pairs, k=len(pairs)):
            clock = Clock()
            gc.collect()
            trainings[name](arms[arm], clock, folder=folder, accelerator=accelerator)
            if number:
                samples[name][arm].append(clock.taken())
    return samples


def over_bare(by_arm: Mapping[str, Sequence[Taken]], arm: str, clock: str = "cpu") -> Estimate:
    """Microseconds that a step costs more under *arm* than bare, taken round by round."""
    pairs = zip(by_arm[arm], by_arm[BARE], strict=True)
    return median_with_interval([getattr(one, clock) - getattr(bare, clock) for one, bare in pairs])


def report(samples: Samples) -> list[str]:
    """The section of the results."""
    lines = [
        "## What a step costs outside of windows",
        "",
        f"Host µs a step of a small network: the mean of {STEPS - UNSEEN_STEPS - 1} steps of a training after its "
        f"first {UNSEEN_STEPS}. Trainings under each arm, in one process, in a new order in each of "
        f"{len(samples['Lightning'][BARE])} rounds; medians of the rounds' differences with 95% bootstrap intervals. "
        f"CPU is the time of the thread that trains. Every {LOG_EVERY} steps the run logs, to something that writes "
        "nothing, and with it the monitor. "
        "What the profiler counts in these steps to check its FLOPs is in the mean.",
        "",
        "| training | arm | CPU | over bare | wall | over bare | target: mean CPU over bare |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for name, by_arm in samples.items():
        for arm, taken in by_arm.items():
            means = [median(getattr(one, clock) for one in taken) for clock in Taken._fields]
            over = [over_bare(by_arm, arm, clock) for clock in Taken._fields]
            more = ["" if arm == BARE else one.text(1) for one in over]
            verdict = OVER_BARE.verdict(over[0]) if ARMS[arm] is not None else ""
            lines.append(f"| {name} | {arm} | {means[0]:.0f} | {more[0]} | {means[1]:.0f} | {more[1]} | {verdict} |")
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    restart_in_one_thread_environment(MODULE)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("lightning.pytorch", "lightning_flops"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(TRAININGS, rounds=options.rounds, folder=Path(folder))
    write_section(options.output, "step_cost", report(samples))
    logger.info("wrote %s", options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
