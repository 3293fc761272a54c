"""How true the latency is that a standalone profiler reports: over the same forward's with no profiler there.

``python -m benchmarks.standalone_latency`` runs where DeepSpeed is installed, in one process on one thread. Every round
takes every reading once, in a new random order and each after an untimed forward, after a round that is not measured.
Median of the ratios of each round and its 95% bootstrap interval, and the median difference. The first row of a model
says how far two readings of the same thing differ on this machine.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

from lightning_flops import FlopsProfiler, get_model_profile

from .machine import RESULTS
from .page import described, table, write_page
from .ratios import ratio
from .runner import in_rounds, start
from .workloads import encoder

Forward = Callable[[], Any]


def _bare(model: nn.Module, batch: torch.Tensor, forward: Forward) -> float:
    """Seconds of a forward that nothing listens to."""
    begin = time.perf_counter()
    forward()
    return time.perf_counter() - begin


def _ours(model: nn.Module, batch: torch.Tensor, forward: Forward, *, count: bool) -> float:
    """What our profiler reports of a forward that it counts, or of the one after."""
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    forward()
    if not count:
        profiler.start_profile(count=False)
        forward()
    profiler.end_profile()
    return float(profiler.get_total_duration())


def _ours_whole(model: nn.Module, batch: torch.Tensor, forward: Forward) -> float:
    """What our report says that a forward takes."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, torch.no_grad():
        get_model_profile(model, args=[batch], detailed=False)
    (line,) = (line for line in printed.getvalue().splitlines() if line.startswith("fwd latency:"))
    number, unit = line.partition("(")[0].split()[-2:]
    return float(number) * {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]


def _deepspeeds(model: nn.Module, batch: torch.Tensor, forward: Forward) -> float:
    """What DeepSpeed's profiler reports of a forward."""
    from deepspeed.profiling.flops_profiler import FlopsProfiler as DeepSpeedProfiler

    profiler = DeepSpeedProfiler(model)
    profiler.start_profile()
    forward()
    profiler.stop_profile()
    seconds = float(profiler.get_total_duration())
    profiler.end_profile()
    return seconds


BARE = "no profiler"
READINGS: dict[str, Callable[..., float]] = {
    BARE: _bare,
    "no profiler, measured again": _bare,
    "ours, `get_model_profile`: the total": _ours_whole,
    "ours, `get_model_profile`: the tree's root": partial(_ours, count=False),
    "ours, `start_profile()` … `stop_profile()`, said to be an upper bound": partial(_ours, count=True),
    "DeepSpeed, both ways": _deepspeeds,
}


def _rows(name: str, model: nn.Module, batch: torch.Tensor, rounds: int) -> list[list[str | None]]:
    def forward() -> None:
        with torch.no_grad():
            model(batch)

    def taken(reading: Callable[..., float]) -> float:
        forward()
        return reading(model, batch, forward)

    seconds = in_rounds({name: partial(taken, reading) for name, reading in READINGS.items()}, rounds)
    bare = seconds.pop(BARE)
    modules = sum(1 for _ in model.modules())
    rows: list[list[str | None]] = [[f"**{name}**, {modules} modules, {median(bare) * 1e6:,.0f} µs", None, None]]
    for reading, values in seconds.items():
        extra = median(one - other for one, other in zip(values, bare, strict=True))
        rows.append([reading, ratio(values, bare).text(3), f"{extra * 1e6:+,.0f} µs"])
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes the report, and returns 0."""
    options = start(__file__, __doc__, RESULTS / "standalone_latency.md", arguments, rounds=201)
    torch.manual_seed(0)
    small = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 7))
    rows = [
        *_rows("five tiny layers", small.eval(), torch.randn(2, 3), options.rounds),
        *_rows("encoder, 4 × 64", encoder(64, 4).eval(), torch.randn(8, 32, 64), options.rounds),
        *_rows("encoder, 4 × 256", encoder(256, 4).eval(), torch.randn(8, 64, 256), options.rounds),
    ]
    lines = table(["", "reported ÷ true", "reported − true"], rows)
    write_page(options.output, [*described(__doc__, "torch", "deepspeed"), *lines])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
