"""Whether a window of any length says how long a run waits for a loader that is slower than its steps.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.slow_loader`` runs it alone.

Four workers take 40 ms for each batch, so that one comes every 10 ms, and a step rests 5 ms: in the long run about half
of the time is waiting, and the counted step, which takes 1 s, lets the workers fill their queues. Medians, least and
greatest of the fits. What the last 100 steps of each fit waited, by a clock in the loader, is the truth; what that
clock says of the timed steps themselves shows how much of a difference is the profile's.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from lightning_flops import FlopsProfilerCallback

from .machine import RESULTS
from .page import described, met, table, write_section
from .runner import start
from .workloads import quiet_trainer

WORKERS, STEP_SEC, BATCH_SEC = 4, 0.005, 0.040
TOLERANCE = 0.03
LONG_RUN_STEPS = 100
COUNTED_STEP = 20
COUNTED_SEC = 1.0  # How long the counted step takes: enough for the workers to fill every queue


class _SlowRows(Dataset[torch.Tensor]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(BATCH_SEC)
        return torch.zeros(2, 4)


class _TimedIterator(_MultiProcessingDataLoaderIter):
    """The workers' batches, and by a clock of this benchmark's own how long each was waited for."""

    waits_sec: list[float]

    def __next__(self) -> Any:
        begin = time.perf_counter()
        try:
            return super().__next__()
        finally:
            self.waits_sec.append(time.perf_counter() - begin)


class _TimedLoader(DataLoader[torch.Tensor]):
    waits_sec: list[float]

    def _get_iterator(self) -> Any:
        iterator = _TimedIterator(self)
        self.waits_sec = iterator.waits_sec = []
        return iterator


class _ShortStep(LightningModule):
    """A step of 5 ms; the counted one is longer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.began: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.began.append(time.perf_counter())
        loss: torch.Tensor = self.layer(batch).square().mean()
        time.sleep(COUNTED_SEC if batch_idx == COUNTED_STEP else STEP_SEC)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What one fit showed."""

    waiting: float  # Share of the step that the profile calls waiting for data
    wait_sec: float  # Mean wait of a timed step, as the profile has it
    loader_wait_sec: float  # The same steps' by the loader's own clock
    timed_steps: int
    long_run_waiting: float  # Share of waiting in the fit's last steps by the loader's own clock


def measure(timing_steps: int) -> Fit:
    """One fit with a window of *timing_steps*."""
    steps = 60 + 3 * timing_steps + LONG_RUN_STEPS
    callback = FlopsProfilerCallback(profile_step=COUNTED_STEP, timing_steps=timing_steps, trace=False)
    net, loader = _ShortStep(), _TimedLoader(_SlowRows(steps), batch_size=None, num_workers=WORKERS)
    with tempfile.TemporaryDirectory() as folder:
        quiet_trainer(folder, callback).fit(net, loader)
    profile = callback.profile
    assert profile is not None and profile.timing is not None
    assert profile.timing.data_wait_sec is not None and profile.rates.data_wait_ratio is not None
    long_run_sec = net.began[-1] - net.began[-1 - LONG_RUN_STEPS]
    return Fit(
        waiting=profile.rates.data_wait_ratio,
        wait_sec=profile.timing.data_wait_sec,
        loader_wait_sec=mean(loader.waits_sec[step] for step in profile.timed_steps),
        timed_steps=len(profile.timed_steps),
        long_run_waiting=sum(loader.waits_sec[steps - LONG_RUN_STEPS : steps]) / long_run_sec,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    options = start(__file__, __doc__, RESULTS / "time.md", arguments, fits=5, timing_steps=[1, 5, 20, 50])
    columns = [">timing_steps", ">steps timed", ">waiting", ">in the long run", ">wait, ms"]
    columns += [
        ">by the loader's clock, ms",
        ">reported less that, most, ms",
        f"target: ± {100 * TOLERANCE:.0f} points",
    ]
    rows: list[list[object]] = []
    for timing_steps in options.timing_steps:
        fits = [measure(timing_steps) for _ in range(options.fits)]
        shares, truths = [fit.waiting for fit in fits], [fit.long_run_waiting for fit in fits]
        spans = [f"{median(each):.1%} [{min(each):.1%}–{max(each):.1%}]" for each in (shares, truths)]
        waits = [median(fit.wait_sec for fit in fits), median(fit.loader_wait_sec for fit in fits)]
        most = max((fit.wait_sec - fit.loader_wait_sec for fit in fits), key=abs)
        within = all(abs(fit.waiting - fit.long_run_waiting) <= TOLERANCE for fit in fits)
        timed = f"{median(fit.timed_steps for fit in fits):g}"
        rows.append(
            [timing_steps, timed, *spans, *(f"{1e3 * one:.2f}" for one in waits), f"{1e3 * most:+.2f}", met(within)]
        )
    lines = [*described(__doc__, "torch", "lightning", level="##"), *table(columns, rows)]
    write_section(options.output, "slow_loader", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
