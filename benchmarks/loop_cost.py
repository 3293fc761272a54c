"""What ``profile_training`` costs a step of a plain loop outside of a window: host CPU time over the bare loop.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.loop_cost`` runs it alone.

The same model trains in blocks of steps, without and with the profiler around a block; the order of the arms is new in
every round, and where Python's objects lie in memory, which is worth a microsecond, is new in every process. A block
has two figures, of its steps after those in which a window is open: the median step, and the mean of all, which has in
it what is put off to the step in which the monitor is read. Differences are taken within a round. Two bare arms tell
what a difference of nothing looks like.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import profile_training

from .machine import restart_in_one_thread_environment
from .monitor_cost import OVER_BARE, over
from .time_report import RESULT, write_section

logger = logging.getLogger("benchmarks.loop_cost")

MODULE = "benchmarks.loop_cost"
BARE, BARE_AGAIN = "bare loop", "bare loop again"
BLOCK_STEPS = 212
READ_EVERY = 50
UNSEEN_STEPS = 12
"""In these steps of a block a window may be open."""

ARMS: dict[str, dict[str, Any] | None] = {
    BARE: None,
    BARE_AGAIN: None,
    "monitor=True, the window closed": {"profile_step": 0, "timing_steps": 1, "trace": False},
    "monitor=False, the window closed": {"profile_step": 0, "timing_steps": 1, "trace": False, "monitor": False},
    "timer_only=True": {"timer_only": True},
}


class Block:
    """A loop over a small model, in which a microsecond shows."""

    def __init__(self) -> None:
        """Makes the model, its optimizer and the data."""
        self.model = nn.Linear(64, 64)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        rows = [torch.randn(2, 64)] * BLOCK_STEPS
        self.data: DataLoader[torch.Tensor] = DataLoader(rows, batch_size=None)  # type: ignore[arg-type]

    def run(self, settings: dict[str, Any] | None) -> tuple[float, float]:
        """CPU microseconds of the median and of the mean step, under the profiler if there are *settings*."""
        taken: list[float] = []
        profiling = (
            contextlib.nullcontext()
            if settings is None
            else profile_training(self.model, self.optimizer, log_every_n_steps=READ_EVERY, **settings)
        )
        with profiling:
            began = time.process_time()
            for rows in self.data:
                self.model(rows).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                now = time.process_time()
                taken.append(now - began)
                began = time.process_time()
        return 1e6 * median(taken[UNSEEN_STEPS:]), 1e6 * mean(taken[UNSEEN_STEPS:])


def measure(*, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """CPU microseconds of the median step and of the mean step under each arm, one figure for each round."""
    block, generator = Block(), random.Random(0)
    for settings in ARMS.values():
        block.run(settings)
    medians: dict[str, list[float]] = {arm: [] for arm in ARMS}
    means: dict[str, list[float]] = {arm: [] for arm in ARMS}
    gc.collect()
    for _ in range(rounds):
        for arm in generator.sample(list(ARMS), k=len(ARMS)):
            of_median, of_mean = block.run(ARMS[arm])
            medians[arm].append(of_median)
            means[arm].append(of_mean)
    return medians, means


def measure_in_processes(number: int, *, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """As ``measure``, with as many *rounds* in each of so many processes, one after the other."""
    medians: dict[str, list[float]] = {arm: [] for arm in ARMS}
    means: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder, "figures.json")
        for _ in range(number):
            subprocess.run(
                [sys.executable, "-m", MODULE, "--rounds", str(rounds), "--figures", str(figures)], check=True
            )
            for every, of_process in zip((medians, means), json.loads(figures.read_text()), strict=True):
                for arm, taken in of_process.items():
                    every[arm] += taken
    return medians, means


def report(samples: dict[str, list[float]], means: dict[str, list[float]], *, processes: int) -> list[str]:
    """The section of the results."""
    lines = [
        "## What profile_training costs a step of a plain loop",
        "",
        f"Host CPU µs a step of a small network, outside of a window; blocks of {BLOCK_STEPS} steps in a new order in "
        f"each of {len(samples[BARE])} rounds, in {processes} processes one after the other; medians of the rounds' "
        f"differences with 95% bootstrap intervals. The monitor is read every {READ_EVERY} steps. The mean of all "
        "steps has that in it, and so all that is put off.",
        "",
        "| arm | the median step | over the bare loop | target | mean over the bare loop |",
        "|---|---:|---:|---|---:|",
    ]
    for arm, taken in samples.items():
        bare = over(samples, arm, BARE)
        ours = ARMS[arm] is not None
        lines.append(
            f"| {arm} | {median(taken):.0f} | {'' if arm == BARE else bare.text(1)} | "
            f"{OVER_BARE.verdict(bare) if ours else ''} | {'' if arm == BARE else over(means, arm, BARE).text(1)} |"
        )
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="of each process")
    parser.add_argument("--processes", type=int, default=12)
    parser.add_argument("--figures", type=Path, help="write this process's figures there, and nothing else")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    restart_in_one_thread_environment(MODULE)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lightning_flops").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    if options.figures is not None:
        options.figures.write_text(json.dumps(measure(rounds=options.rounds)))
        return 0
    figures = measure_in_processes(options.processes, rounds=options.rounds)
    write_section(options.output, "loop_cost", report(*figures, processes=options.processes))
    logger.info("wrote %s", options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
