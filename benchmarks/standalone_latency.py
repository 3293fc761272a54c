"""How true the latency is that a standalone profiler reports: over the same forward's with no profiler there.

``python -m benchmarks.standalone_latency`` runs where DeepSpeed is installed, in one process on one thread. Every round
takes every reading once, in a new random order and each after a forward that nobody times, after a round that is not
measured. It writes ``benchmarks/results/standalone_latency.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import random
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from statistics import median

import torch
from torch import nn

from lightning_flops import FlopsProfiler, get_model_profile

from .machine import code_in_words, machine_in_words, restart_in_one_thread_environment, versions
from .ratios import ratio

logger = logging.getLogger("benchmarks.standalone_latency")

MODULE = "benchmarks.standalone_latency"
RESULT = Path(__file__).resolve().parent / "results" / "standalone_latency.md"
BARE = "no profiler"
AGAIN = "no profiler, measured again"
WHOLE = "ours, `get_model_profile`: the total"
TREE = "ours, `get_model_profile`: the tree's root"
COUNTED = "ours, `start_profile()` … `stop_profile()`, said to be an upper bound"
DEEPSPEED = "DeepSpeed, both ways"


@dataclass(frozen=True, slots=True)
class Subject:
    """A model in eval mode and its input."""

    name: str
    model: nn.Module
    batch: torch.Tensor

    def forward(self) -> None:
        """One forward without gradients."""
        with torch.no_grad():
            self.model(self.batch)


def subjects() -> list[Subject]:
    """From a model whose forward is mostly Python to one whose forward is mostly arithmetic."""

    def encoder(width: int, layers: int) -> nn.Module:
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True)
        return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7))
    return [
        Subject("five tiny layers", small.eval(), torch.randn(2, 3)),
        Subject("encoder, 4 × 64", encoder(64, 4).eval(), torch.randn(8, 32, 64)),
        Subject("encoder, 4 × 256", encoder(256, 4).eval(), torch.randn(8, 64, 256)),
    ]


def bare(subject: Subject) -> float:
    """Seconds of a forward that nothing listens to."""
    start = time.perf_counter()
    subject.forward()
    return time.perf_counter() - start


def ours(subject: Subject, *, count: bool) -> float:
    """What our profiler reports of a forward that it counts, or of the one after."""
    profiler = FlopsProfiler(subject.model)
    profiler.start_profile()
    subject.forward()
    if not count:
        profiler.start_profile(count=False)
        subject.forward()
    profiler.end_profile()
    seconds = profiler.get_total_duration()
    assert isinstance(seconds, float)
    return seconds


def ours_whole(subject: Subject) -> float:
    """What our report says that a forward takes."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, torch.no_grad():
        get_model_profile(subject.model, args=[subject.batch], detailed=False)
    (line,) = (line for line in printed.getvalue().splitlines() if line.startswith("fwd latency:"))
    number, unit = line.split()[-2:]
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def deepspeeds(subject: Subject) -> float:
    """What DeepSpeed's profiler reports of a forward."""
    from deepspeed.profiling.flops_profiler import FlopsProfiler as DeepSpeedProfiler

    profiler = DeepSpeedProfiler(subject.model)
    profiler.start_profile()
    subject.forward()
    profiler.stop_profile()
    seconds = float(profiler.get_total_duration())
    profiler.end_profile()
    return seconds


READINGS: dict[str, Callable[[Subject], float]] = {
    BARE: bare,
    AGAIN: bare,
    WHOLE: ours_whole,
    TREE: lambda subject: ours(subject, count=False),
    COUNTED: lambda subject: ours(subject, count=True),
    DEEPSPEED: deepspeeds,
}


def measured(subject: Subject, rounds: int) -> dict[str, list[float]]:
    """Seconds that each reading gave, round by round."""
    generator = random.Random(0)
    seconds: dict[str, list[float]] = {name: [] for name in READINGS}
    for number in range(rounds + 1):
        for name in generator.sample(list(READINGS), len(READINGS)):
            subject.forward()
            taken = READINGS[name](subject)
            if number:
                seconds[name].append(taken)
    return seconds


def rows(subject: Subject, seconds: dict[str, list[float]]) -> list[str]:
    """Lines of the result's table."""
    plain = median(seconds[BARE])
    modules = sum(1 for _ in subject.model.modules())
    lines = [f"| **{subject.name}**, {modules} modules, {plain * 1e6:,.0f} µs | | |"]
    for name in list(READINGS)[1:]:
        extra = median(taken - without for taken, without in zip(seconds[name], seconds[BARE], strict=True))
        lines.append(f"| {name} | {ratio(seconds[name], seconds[BARE]).text(3)} | {extra * 1e6:+,.0f} µs |")
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes the report, and returns 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--rounds", type=int, default=201)
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    restart_in_one_thread_environment(MODULE)
    logging.basicConfig(level=logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    table = [line for subject in subjects() for line in rows(subject, measured(subject, options.rounds))]
    packages = ", ".join(f"{name} {version}" for name, version in versions(["torch", "deepspeed"]).items())
    text = f"""# The latency a standalone profiler reports, over the true one

`python -m {MODULE}`: what each profiler says that a forward takes, over what the same forward
takes with no profiler, in {options.rounds} rounds of one process on one thread, in random order. Median of the ratios
of each round and its 95% bootstrap interval; beside it the median difference. The first row of a model says how far two
readings of the same thing differ on this machine, which others used at the same time.

{date.today().isoformat()}, {code_in_words()}. {machine_in_words()}. {packages}.

| | reported ÷ true | reported − true |
|---|---|---|
{chr(10).join(table)}
"""
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(text, encoding="utf-8")
    print(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
