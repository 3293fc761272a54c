"""What the monitor costs a step: host CPU time over a bare Trainer, and over one with an empty callback.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.monitor_cost`` runs it alone.

One fit holds all arms. At the beginning of a training step the Trainer's callbacks, and what its data fetcher calls,
are switched to the next arm's for a block of steps; the order of the arms is new in every round. An arm's figure is the
median over a block's steps, the first left out, and differences are taken within a round: what slows the machine down
slows all arms of a round, and memory lies where it lies for all of them. Two bare arms tell what a difference of
nothing looks like.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_flops import FlopsProfilerCallback

from .machine import restart_in_one_thread_environment
from .ratios import Estimate, Target, median_with_interval
from .time_report import RESULT, write_section

logger = logging.getLogger("benchmarks.monitor_cost")

MODULE = "benchmarks.monitor_cost"
WARM_UP_STEPS = 200
BLOCK_STEPS = 50
"""In a shorter block an arm would run with code that the others have driven out of the processor's cache."""
OVER_BARE = Target(limit=20, unit="µs")
OVER_EMPTY = Target(limit=8, unit="µs")
NEW_LENGTHS = "monitor=True, the window closed, ever new lengths"
BARE, BARE_AGAIN, EMPTY, MONITOR = "bare Trainer", "bare Trainer again", "empty callback", "monitor"


class SmallNet(LightningModule):
    """A step of well under a millisecond, in which a microsecond shows; it tells *on_step* where each step begins."""

    def __init__(self, on_step: Callable[[], None]) -> None:
        """Keeps *on_step*."""
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.on_step = on_step

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """A forward and a loss."""
        self.on_step()
        return self.layer(batch[0]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, whose step is short."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


class EmptyCallback(Callback):
    """No hook of its own; the Trainer calls the inherited ones, which do nothing."""


class Batches(Dataset[list[torch.Tensor]]):
    """Batches that are made when they are asked for, as a data loader makes them."""

    def __init__(self, steps: int, *, new_lengths: bool) -> None:
        """Draws the length of the second tensor of each batch; 1 without *new_lengths*."""
        numbers = random.Random(1)
        self._rows = [torch.randn(16, 64) for _ in range(64)]
        self._lengths = [numbers.randrange(1, 50_000) if new_lengths else 1 for _ in range(steps)]
        self._longest = torch.empty(50_000)

    def __len__(self) -> int:
        """One for each step."""
        return len(self._lengths)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        """A batch whose tensors are new objects."""
        return [self._rows[index % 64].view(16, 64), self._longest[: self._lengths[index]]]


class Switch:
    """Turns one fit's callbacks and fetch taps from arm to arm, and keeps the CPU time of each step.

    Args:
        profiler: the callback under test.
        rounds: blocks of each arm.
    """

    def __init__(self, profiler: FlopsProfilerCallback, *, rounds: int) -> None:
        """Draws the order of the arms."""
        self.profiler = profiler
        self.trainer: Any = None
        self.samples: dict[str, list[float]] = {BARE: [], BARE_AGAIN: [], EMPTY: [], MONITOR: []}
        generator = random.Random(0)
        self._plan = [arm for _ in range(rounds) for arm in generator.sample(list(self.samples), k=len(self.samples))]
        self._callbacks: Mapping[str, list[Callback]] = {
            BARE: [], BARE_AGAIN: [], EMPTY: [EmptyCallback()], MONITOR: [profiler],
        }  # fmt: skip
        self._steps = 0
        self._block: list[float] = []
        self._began = 0.0
        self._arm: str | None = None

    def step_begins(self) -> None:
        """Called from inside the training step: what follows until the next call is one sample of the present arm."""
        now = time.process_time()
        self._steps += 1
        if self._steps < WARM_UP_STEPS:
            return
        if self._arm is not None:
            self._block.append(now - self._began)
        if self._arm is None or len(self._block) == BLOCK_STEPS:
            self._end_block()
        self._began = time.process_time()

    def _end_block(self) -> None:
        if self._arm is not None:
            self.samples[self._arm].append(1e6 * median(self._block[1:]))
        self._block.clear()
        if not self._plan:
            self.trainer.should_stop = True
            self._turn_to(MONITOR)  # as the fit began
            return
        self._turn_to(self._plan.pop())

    def _turn_to(self, arm: str) -> None:
        self._arm = arm
        self.trainer.callbacks[:] = self._callbacks[arm]
        fetcher, loop = self.trainer.fit_loop._data_fetcher, self.trainer.fit_loop.epoch_loop
        for name, method in (("_start_profiler", "_on_before_fetch"), ("_stop_profiler", "_on_after_fetch")):
            tapped, plain = getattr(loop, method), types.MethodType(getattr(type(loop), method), loop)
            setattr(fetcher, name, tapped if arm == MONITOR else plain)
        if arm == MONITOR and (fit := self.profiler._fit) is not None:
            # The steps of the other arms are no updates of its first step, which would be like no step it knows.
            if fit.session.monitor is not None:
                fit.session.monitor.add_up()
            fit._last_global_step = fit._optimizer_steps()


def measure(
    profiler: FlopsProfilerCallback, *, rounds: int, folder: Path, new_lengths: bool, accelerator: str = "cpu"
) -> dict[str, list[float]]:
    """CPU microseconds of a step under each arm, one figure for each round.

    With *new_lengths* a second tensor of each batch, which costs nothing, has another length in nearly every step.
    """
    switch = Switch(profiler, rounds=rounds)
    steps = WARM_UP_STEPS + (rounds * len(switch.samples) + 2) * BLOCK_STEPS
    batches = Batches(steps, new_lengths=new_lengths)
    switch.trainer = Trainer(
        accelerator=accelerator, devices=1, max_epochs=1, logger=False, enable_checkpointing=False, barebones=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=[profiler],
    )  # fmt: skip
    gc.collect()
    switch.trainer.fit(SmallNet(switch.step_begins), DataLoader(batches, batch_size=None))
    return switch.samples


def over(samples: Mapping[str, Sequence[float]], arm: str, base: str) -> Estimate:
    """Microseconds that *arm* costs more than *base*, taken round by round."""
    return median_with_interval([one - other for one, other in zip(samples[arm], samples[base], strict=True)])


def report(by_setting: Mapping[str, Mapping[str, Sequence[float]]], *, rounds: int) -> list[str]:
    """The section of the results."""
    lines = [
        "## What the monitor costs a step",
        "",
        f"Host CPU µs a step of a small network; arms switched inside one fit in blocks of {BLOCK_STEPS} steps, in a "
        f"new order in each of {rounds} rounds; medians of the rounds' differences with 95% bootstrap intervals.",
        "",
        "| setting | arm | a step | over a bare Trainer | over an empty callback | targets |",
        "|---|---|---:|---:|---:|---|",
    ]
    for setting, samples in by_setting.items():
        for arm in samples:
            bare, empty = over(samples, arm, BARE), over(samples, arm, EMPTY)
            verdict = f"{OVER_BARE.verdict(bare)}; over empty {OVER_EMPTY.verdict(empty)}" if arm == MONITOR else ""
            lines.append(
                f"| {setting} | {arm} | {median(samples[arm]):.0f} | {'' if arm == BARE else bare.text(1)} | "
                f"{'' if arm == EMPTY else empty.text(1)} | {verdict} |"
            )
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    restart_in_one_thread_environment(MODULE)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("lightning.pytorch", "lightning_flops"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    settings: dict[str, dict[str, Any]] = {
        "monitor=True, the window closed": {"profile_step": 0, "timing_steps": 1, "trace": False},
        "timer_only=True": {"timer_only": True},
        NEW_LENGTHS: {"profile_step": 0, "timing_steps": 10, "trace": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        samples = {
            name: measure(
                FlopsProfilerCallback(**given),
                rounds=options.rounds,
                folder=Path(folder),
                new_lengths=name == NEW_LENGTHS,
            )
            for name, given in settings.items()
        }
    write_section(options.output, "monitor_cost", report(samples, rounds=options.rounds))
    logger.info("wrote %s", options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
