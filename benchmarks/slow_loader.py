"""Whether a window of any length tells how long a run waits for a loader that is slower than its steps.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.slow_loader`` runs it alone.

Four workers take 40 ms for each batch, so that one comes every 10 ms, and a step takes 5 ms from batch to batch, the
training loop's own work included: in the long run half of the time is waiting, and the step that is counted lets the
workers fetch ahead. Loader and step sleep, so the truth does not depend on the machine as long as it wakes them in
time; what the whole fit waited after its start is the check.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_flops import FlopsProfilerCallback

from .machine import restart_in_one_thread_environment
from .time_report import RESULT, write_section

logger = logging.getLogger("benchmarks.slow_loader")

MODULE = "benchmarks.slow_loader"
WORKERS = 4
STEP_SEC = 0.005
BATCH_SEC = 0.040
TRUTH, TOLERANCE = 0.50, 0.03
LONG_RUN_STEPS = 100
COUNTED_SEC = 1.0
"""How long the counted step takes: enough for the workers to fill every queue."""


class SlowRows(Dataset[torch.Tensor]):
    """Rows of which one is a batch, and takes its time."""

    def __init__(self, length: int) -> None:
        """Keeps *length*."""
        self.length = length

    def __len__(self) -> int:
        """Batches of an epoch."""
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        """One batch."""
        time.sleep(BATCH_SEC)
        return torch.zeros(2, 4)


class Pace:
    """How long a step has to rest, so that all of it but the waiting takes ``STEP_SEC``."""

    def __init__(self) -> None:
        """Before the first batch."""
        self.delivered = 0.0
        self.rest_sec = 0.0
        self._own_sec: deque[float] = deque(maxlen=25)

    def asked(self, now: float) -> None:
        """The loop asks for the next batch: what it did since the last one, its rest left out, is its own work."""
        if self.delivered:
            self._own_sec.append(now - self.delivered - self.rest_sec)

    def rest(self) -> None:
        """Rest as long as the loop's own work leaves."""
        begin = time.perf_counter()
        own_sec = median(self._own_sec) if self._own_sec else 0.0
        time.sleep(max(0.0, STEP_SEC - own_sec))
        self.rest_sec = time.perf_counter() - begin


class TimedIterator(_MultiProcessingDataLoaderIter):
    """The workers' batches, and by a clock of this benchmark's own how long each was waited for."""

    waits_sec: list[float]
    pace: Pace

    def __next__(self) -> Any:
        """The next batch."""
        begin = time.perf_counter()
        self.pace.asked(begin)
        try:
            return super().__next__()
        finally:
            self.pace.delivered = time.perf_counter()
            self.waits_sec.append(self.pace.delivered - begin)


class TimedLoader(DataLoader[torch.Tensor]):
    """A DataLoader whose waits are kept."""

    waits_sec: list[float]
    pace: Pace

    def _get_iterator(self) -> Any:
        iterator = TimedIterator(self)
        iterator.pace = self.pace
        self.waits_sec = iterator.waits_sec = []
        return iterator


class ShortStep(LightningModule):
    """A step of 5 ms; the counted one is longer."""

    def __init__(self, counted: int, pace: Pace) -> None:
        """Keeps which step is counted."""
        super().__init__()
        self.pace = pace
        self.layer = nn.Linear(4, 1)
        self.counted = counted
        self.began: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Mostly a rest."""
        self.began.append(time.perf_counter())
        loss: torch.Tensor = self.layer(batch).square().mean()
        if batch_idx == self.counted:
            time.sleep(COUNTED_SEC)
        self.pace.rest()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD, whose step is short."""
        return torch.optim.SGD(self.parameters(), lr=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one fit showed."""

    waiting: float
    """Share of the step that the profile calls waiting for data."""
    step_sec: float
    wait_sec: float
    """Mean wait of a timed step, as the profile has it."""
    loader_wait_sec: float
    """The same steps' by the loader's own clock."""
    timed_steps: int
    first_timed: int
    """Steps from the counted one to the first that was timed."""
    long_run_step_sec: float
    """Mean of the fit's last steps by the model's own clock."""
    long_run_waiting: float
    """Share of waiting in them by the loader's own clock."""


def measure(timing_steps: int) -> Outcome:
    """One fit with a window of *timing_steps*."""
    steps = 60 + 3 * timing_steps + LONG_RUN_STEPS
    callback = FlopsProfilerCallback(profile_step=20, timing_steps=timing_steps, trace=False)
    pace = Pace()
    net = ShortStep(20, pace)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=[callback],
        )  # fmt: skip
        loader = TimedLoader(SlowRows(steps), batch_size=None, num_workers=WORKERS)
        loader.pace = pace
        trainer.fit(net, loader)
    profile = callback.profile
    waits_sec = loader.waits_sec
    long_run_sec = net.began[-1] - net.began[-1 - LONG_RUN_STEPS]
    assert profile is not None and profile.timing is not None
    assert profile.timing.data_wait_sec is not None and profile.rates.data_wait_ratio is not None
    return Outcome(
        waiting=profile.rates.data_wait_ratio,
        step_sec=profile.timing.global_step_sec,
        wait_sec=profile.timing.data_wait_sec,
        loader_wait_sec=mean(waits_sec[step] for step in profile.timed_steps),
        timed_steps=len(profile.timed_steps),
        first_timed=profile.timed_steps[0] - profile.counted_steps[0],
        long_run_step_sec=long_run_sec / LONG_RUN_STEPS,
        long_run_waiting=sum(waits_sec[steps - LONG_RUN_STEPS : steps]) / long_run_sec,
    )


def report(outcomes: dict[int, list[Outcome]]) -> list[str]:
    """The section of the results."""
    lines = [
        "## A loader slower than the step",
        "",
        f"{WORKERS} workers, one batch every {1e3 * BATCH_SEC / WORKERS:.0f} ms, a step of {1e3 * STEP_SEC:.0f} ms: "
        f"{TRUTH:.0%} waiting in the long run. The counted step takes {COUNTED_SEC:g} s, in which the workers fill "
        f"their queues. Medians, least and greatest of {len(next(iter(outcomes.values())))} fits. What the last "
        f"{LONG_RUN_STEPS} steps of each fit waited, by a clock in the loader, is the truth on this machine; what it "
        "says of the timed steps themselves shows how much of a difference is the machine's, which does not wake "
        "sleepers in time, and how much the profile's.",
        "",
        "| timing_steps | steps timed | settled before | waiting | in the long run | step, ms | in the long run, ms | "
        "wait, ms | by the loader's clock, ms | reported less that, most, ms | "
        f"target {TRUTH:.0%} ± {100 * TOLERANCE:.0f} |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for timing_steps, fits in outcomes.items():
        shares, truths = [fit.waiting for fit in fits], [fit.long_run_waiting for fit in fits]
        met = all(abs(share - TRUTH) <= TOLERANCE for share in shares)
        lines.append(
            f"| {timing_steps} | {median(fit.timed_steps for fit in fits):g} "
            f"| {median(fit.first_timed - 1 for fit in fits):g} "
            f"| {median(shares):.1%} [{min(shares):.1%}–{max(shares):.1%}] "
            f"| {median(truths):.1%} [{min(truths):.1%}–{max(truths):.1%}] "
            f"| {1e3 * median(fit.step_sec for fit in fits):.2f} "
            f"| {1e3 * median(fit.long_run_step_sec for fit in fits):.2f} "
            f"| {1e3 * median(fit.wait_sec for fit in fits):.2f} "
            f"| {1e3 * median(fit.loader_wait_sec for fit in fits):.2f} "
            f"| {1e3 * max((fit.wait_sec - fit.loader_wait_sec for fit in fits), key=abs):+.2f} "
            f"| {'met' if met else '**missed**'} |"
        )
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--fits", type=int, default=5)
    parser.add_argument("--timing-steps", type=int, nargs="*", default=[1, 5, 20, 50])
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    restart_in_one_thread_environment(MODULE)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning_flops"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    outcomes = {steps: [measure(steps) for _ in range(options.fits)] for steps in options.timing_steps}
    write_section(options.output, "slow_loader", report(outcomes))
    logger.info("wrote %s", options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
