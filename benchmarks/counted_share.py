"""What share of a run's wall time is spent in steps that are counted outside of windows, where every length is new.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.counted_share`` runs it alone.

A small transformer trains on sentences of random lengths under ``profile_training``. A counted step's time is all of
its wall time, and not only what counting adds to it.
"""

from __future__ import annotations

import argparse
import logging
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from lightning_flops import profile_training

from .machine import restart_in_one_thread_environment
from .ratios import Target
from .time_report import RESULT, write_section

logger = logging.getLogger("benchmarks.counted_share")

MODULE = "benchmarks.counted_share"
VOCAB, WIDTH, BATCH = 50, 16, 4
SHORTEST, LONGEST = 9, 100
SHARE = Target(limit=0.5, unit="%")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training."""

    seconds: float
    """From the profiler's begin to the last step."""
    counted_outside: int
    """Steps that were counted outside of the window."""
    counted_sec: float
    """Wall time of those steps."""
    in_window: int
    """Steps that the window counted."""
    foretold: int
    unknown: int

    @property
    def percent(self) -> float:
        """The share, in percent."""
        return 100 * self.counted_sec / self.seconds


class Encoder(nn.Module):
    """One layer of a transformer between an embedding and a head."""

    def __init__(self) -> None:
        """Makes the layers."""
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Logits of each token."""
        logits: torch.Tensor = self.head(self.layer(self.embed(ids)))
        return logits


def train(*, seconds: float, seed: int) -> Run:
    """Trains for so long, on sentences that *seed* decides."""
    torch.manual_seed(seed)
    numbers, model = random.Random(seed), Encoder()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile_training(model, optimizer, profile_step=2, timing_steps=8, trace=False) as profiler:
        loop = profiler._loop
        if loop is None:
            raise RuntimeError("the profiler has not begun")
        samples, began = loop.session.flops.samples, time.perf_counter()
        while time.perf_counter() - began < seconds:
            ids = torch.randint(VOCAB, (BATCH, numbers.randint(SHORTEST, LONGEST)))
            model(ids).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        elapsed = samples.elapsed_sec
    summary = profiler.throughput
    if summary is None:
        raise RuntimeError("nothing was monitored")
    return Run(
        seconds=elapsed,
        counted_outside=samples.taken,
        counted_sec=samples.seconds,
        in_window=summary.steps_counted - samples.taken,
        foretold=summary.steps_predicted,
        unknown=summary.steps_unknown,
    )


def report(runs: Sequence[Run]) -> list[str]:
    """The section of the results."""
    lines = [
        "## The share of a run that is spent in steps counted outside of windows",
        "",
        f"A small transformer on batches of {BATCH} sentences of {SHORTEST} to {LONGEST} tokens, all of one length "
        "within a batch. The time of a counted step is all of its wall time.",
        "",
        "| run, s | steps | counted in the window | counted outside | their time, ms | of the run | foretold | n/a "
        "| target |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for run in runs:
        steps = run.in_window + run.counted_outside + run.foretold + run.unknown
        met = "met" if run.percent <= SHARE.limit else "**missed**"
        lines.append(
            f"| {run.seconds:.1f} | {steps:,} | {run.in_window} | {run.counted_outside} | {1e3 * run.counted_sec:.1f} "
            f"| {run.percent:.3f}% | {run.foretold:,} | {run.unknown:,} | ≤ {SHARE.limit:g}{SHARE.unit}: {met} |"
        )
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--seconds", type=float, nargs="+", default=[20.0, 60.0], help="how long each run trains")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    restart_in_one_thread_environment(MODULE)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("lightning_flops").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    runs = [train(seconds=seconds, seed=seed) for seed, seconds in enumerate(options.seconds)]
    write_section(options.output, "counted_share", report(runs))
    logger.info("wrote %s", options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
