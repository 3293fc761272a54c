"""What the monitor costs a step: host CPU time over a bare Trainer, and over one with an empty callback.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.monitor_cost`` runs it alone.

One fit holds all arms. At the beginning of a training step the Trainer's callbacks, and what its data fetcher calls,
are switched to the next arm's for a block of steps; the order of the arms is new in every round. A block has two
figures, of all its steps but the first: the median step, and the mean. Differences are taken within a round: what slows
the machine down slows all arms of a round, and memory lies where it lies for all of them. Those of means are averaged
over as many rounds as the monitor puts anything off, so all of that is in them. Two bare arms tell what nothing looks
like.

Between windows the monitor counts a few steps, which takes at most half a percent of the run's time. Such a step is in
no figure, and how many there were is said.
"""

from __future__ import annotations

import argparse
import gc
import logging
import random
import tempfile
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_flops import FlopsProfilerCallback

from .arms import BLOCK_STEPS, Arms, steps_of
from .machine import restart_in_one_thread_environment
from .ratios import Estimate, Target, median_with_interval
from .time_report import RESULT, write_section

logger = logging.getLogger("benchmarks.monitor_cost")

MODULE = "benchmarks.monitor_cost"
OVER_BARE = Target(limit=20, unit="µs")
OVER_EMPTY = Target(limit=8, unit="µs")
NEW_LENGTHS = "monitor=True, the window closed, ever new lengths"
WITH_LOGGER = f"{NEW_LENGTHS}, with a logger"
TOGETHER = 20
"""Rounds in which an arm has a thousand steps: as many as the monitor's log holds."""

ARMS = BARE, BARE_AGAIN, EMPTY, MONITOR = "bare Trainer", "bare Trainer again", "empty callback", "monitor"


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


class Unwritten(Logger):
    """A logger that writes nothing: what is measured is not what writing costs."""

    @property
    def name(self) -> str:
        """None is needed."""
        return ""

    @property
    def version(self) -> str:
        """None is needed."""
        return ""

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Nothing."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""


class Batches(Dataset[list[torch.Tensor]]):
    """Batches that are made when they are asked for, as a data loader makes them."""

    def __init__(self, steps: int, *, new_lengths: bool) -> None:
        """Draws the length of the second tensor of each batch; 1 without *new_lengths*."""
        numbers = random.Random(1)
        self._rows = [torch.randn(16, 64) for _ in range(64)]
        self._lengths = [numbers.randrange(1, 5_000) if new_lengths else 1 for _ in range(steps)]
        self._longest = torch.empty(16, 5_000)

    def __len__(self) -> int:
        """One for each step."""
        return len(self._lengths)

    def __getitem__(self, index: int) -> list[torch.Tensor]:
        """A batch whose tensors are new objects."""
        return [self._rows[index % 64].view(16, 64), self._longest[:, : self._lengths[index]]]


class Switch:
    """Switches one fit's callbacks and fetch taps to those of an arm.

    Args:
        profiler: the callback under test.
    """

    def __init__(self, profiler: FlopsProfilerCallback) -> None:
        """Makes the empty callback."""
        self.trainer: Any = None
        self._profiler = profiler
        self._callbacks: Mapping[str, list[Callback]] = {
            BARE: [], BARE_AGAIN: [], EMPTY: [EmptyCallback()], MONITOR: [profiler],
        }  # fmt: skip

    def turn_to(self, arm: str) -> None:
        """What follows is a step of *arm*."""
        self.trainer.callbacks[:] = self._callbacks[arm]
        fetcher, loop = self.trainer.fit_loop._data_fetcher, self.trainer.fit_loop.epoch_loop
        for name, method in (("_start_profiler", "_on_before_fetch"), ("_stop_profiler", "_on_after_fetch")):
            tapped, plain = getattr(loop, method), types.MethodType(getattr(type(loop), method), loop)
            setattr(fetcher, name, tapped if arm == MONITOR else plain)
        if arm == MONITOR and (fit := self._profiler._fit) is not None:
            # The steps of the other arms are no updates of its first step, which would be like no step it knows.
            fit._last_global_step = fit._optimizer_steps()

    def counted(self) -> int:
        """How many steps the profiler has counted between windows so far."""
        fit = self._profiler._fit
        return 0 if fit is None else fit.session.flops.samples.taken

    def end(self) -> None:
        """The fit ends as it began."""
        self.trainer.should_stop = True
        self.turn_to(MONITOR)


def measure(
    profiler: FlopsProfilerCallback,
    *,
    rounds: int,
    folder: Path,
    new_lengths: bool,
    accelerator: str = "cpu",
    trainer_logger: Logger | None = None,
) -> Arms:
    """CPU microseconds of a step under each arm: of each block the mean and the median.

    With *new_lengths* a second tensor of each batch, which costs nothing, has another length in nearly every step. The
    *trainer_logger* is the Trainer's under all arms.
    """
    switch = Switch(profiler)
    arms = Arms(
        ARMS,
        rounds=rounds,
        turn_to=switch.turn_to,
        end=switch.end,
        apart=switch.counted,
    )
    batches = Batches(steps_of(ARMS, rounds=rounds), new_lengths=new_lengths)
    switch.trainer = Trainer(
        accelerator=accelerator, devices=1, max_epochs=1, logger=trainer_logger or False,
        enable_checkpointing=False, barebones=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[profiler],
    )  # fmt: skip
    gc.collect()
    switch.trainer.fit(SmallNet(arms.step_begins), DataLoader(batches, batch_size=None))
    return arms


def over(samples: Mapping[str, Sequence[float]], arm: str, base: str, *, together: int = 1) -> Estimate:
    """Microseconds that *arm* costs more than *base*, taken round by round and averaged over so many *together*."""
    rounds = [one - other for one, other in zip(samples[arm], samples[base], strict=True)]
    groups = [rounds[first : first + together] for first in range(0, len(rounds) - together + 1, together)]
    return median_with_interval([mean(group) for group in groups])


def table(
    by_setting: Mapping[str, tuple[Mapping[str, Sequence[float]], Mapping[str, Sequence[float]]]],
    *,
    targets: Mapping[str, Mapping[str, Target]],
    together: int = 1,
) -> list[str]:
    """Rows of each arm: its median step and its mean one, over a bare Trainer and over an empty callback.

    Args:
        by_setting: the medians and the means of each arm's blocks.
        targets: for each arm that has some, what it may cost over another arm.
        together: as for ``over``, of the means.
    """
    lines = [
        "| setting | arm | the median step | over bare | over empty | the mean over bare | over empty | targets |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for setting, (medians, means) in by_setting.items():
        for arm in medians:
            cells = [
                "" if arm == base else over(of, arm, base, together=number).text(1)
                for of, number in ((medians, 1), (means, together))
                for base in (BARE, EMPTY)
            ]
            verdicts = [
                f"{word} over {base}: {target.verdict(over(of, arm, base, together=number))}"
                for base, target in targets.get(arm, {}).items()
                for word, of, number in (("median", medians, 1), ("mean", means, together))
            ]
            lines.append(
                f"| {setting} | {arm} | {median(medians[arm]):.0f} | {' | '.join(cells)} | {'; '.join(verdicts)} |"
            )
    return lines


def report(by_setting: Mapping[str, Arms], *, rounds: int) -> list[str]:
    """The section of the results."""
    apart = ", ".join(f"{arms.steps_apart} with {name}" for name, arms in by_setting.items())
    lines = [
        "## What the monitor costs a step",
        "",
        f"Host CPU µs a step of a small network; arms switched inside one fit in blocks of {BLOCK_STEPS} steps, in a "
        f"new order in each of {rounds} rounds; medians of the rounds' differences with 95% bootstrap intervals. The "
        f"Trainer logs once in a block. Differences of means are averaged over {TOGETHER} rounds first, in which an "
        "arm has as many steps as anything is put off, so all of that is in them. Steps that are "
        f"counted between windows have a budget of their own, 0.5% of the run's time, and are in no figure: {apart}. "
        "With a logger, which writes nothing, the monitor is read whenever the Trainer logs; without one nobody gets "
        "the readings, and most are not made.",
        "",
        *table(
            {name: (arms.medians, arms.means) for name, arms in by_setting.items()},
            targets={MONITOR: {EMPTY: OVER_EMPTY}},
            together=TOGETHER,
        ),
    ]
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=480)
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
        WITH_LOGGER: {"profile_step": 0, "timing_steps": 10, "trace": False},
    }
    with tempfile.TemporaryDirectory() as folder:
        by_setting = {
            name: measure(
                FlopsProfilerCallback(**given),
                rounds=options.rounds,
                folder=Path(folder),
                new_lengths=name in (NEW_LENGTHS, WITH_LOGGER),
                trainer_logger=Unwritten() if name == WITH_LOGGER else None,
            )
            for name, given in settings.items()
        }
    write_section(options.output, "monitor_cost", report(by_setting, rounds=options.rounds))
    logger.info("wrote %s", options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
