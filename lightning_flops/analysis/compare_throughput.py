"""Two runs compared by their throughput alone: how long a batch takes, and how long it is waited for.

Of runs without a profile nothing else is known. What of a difference is chance is seen in stretches of batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np

from lightning_flops.analysis import compare_figures as figures
from lightning_flops.schema.comparison import SHARED, CausedDifference, ComparedRun, Comparison, FigureDifference
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.units import plain, plural

_ONLY_PROFILES = (
    "Only profiles say which part of a step and which module a difference is in, how the runs are set up, and whether "
    "one had to wait for processors: train both without timer_only for that."
)
_Side = Sequence[ThroughputSummary]
_Of = Callable[[ThroughputSummary], float | None]


def compare_throughputs(a: _Side, b: _Side, *, sources: tuple[Sequence[str], Sequence[str]]) -> Comparison:
    """What a batch of the runs *b* takes longer than one of the runs *a*, and their rates; *sources* names the runs.

    Of several runs a side, figures are means over the runs, and noise is that between them.
    """
    sides = a, b

    def part(name: str, seconds: Callable[[ThroughputSummary], float], spread: _Spread) -> CausedDifference:
        of_a, of_b = (round(1e9 * fmean(map(seconds, side))) for side in sides)
        noise = figures.noise_ns(*([spread(one) for one in side] for side in sides))
        return CausedDifference(name=name, a_ns=of_a, b_ns=of_b, causes={}, noise_ns=noise)

    step = part("batch", _batch_sec, _batches)
    parts: tuple[CausedDifference, ...] = ()
    if all(one.reader_stretches_sec for side in sides for one in side):
        waits = part("data wait", _wait_sec, _waits)
        rest = part("the rest", _batch_sec, lambda one: _batches(one) - _waits(one))
        parts = waits, replace(rest, a_ns=step.a_ns - waits.a_ns, b_ns=step.b_ns - waits.b_ns)
    few = [] if figures.several(a, b) else [(sources[0][0], len(_batches(a[0]))), (sources[1][0], len(_batches(b[0])))]
    few = [one for one in few if one[1] < figures.LEAST_STEPS]
    return Comparison(
        kind="throughput",
        a=_identity(a, sources[0]),
        b=_identity(b, sources[1]),
        figures=tuple(_figures(a, b)),
        step=step,
        parts=parts,
        notes=(_ONLY_PROFILES, *(figures.too_few(source, f"{plain(number)} batches") for source, number in few)),
    )


_Spread = Callable[[ThroughputSummary], figures.Floats]


def _batches(one: ThroughputSummary) -> figures.Floats:
    return np.array(one.batch_stretches_sec)


def _waits(one: ThroughputSummary) -> figures.Floats:
    return np.array(one.reader_stretches_sec)


def _batch_sec(one: ThroughputSummary) -> float:
    return one.batch_cost_sec.average


def _wait_sec(one: ThroughputSummary) -> float:
    """Of a batch of the whole run: the reader cost is that of the batches that were waited for."""
    return (one.reader_ratio or 0.0) * one.batch_cost_sec.average


def _reader_sec(one: ThroughputSummary) -> float | None:
    return None if one.reader_cost_sec is None else one.reader_cost_sec.average


def _rate(unit: str) -> _Of:
    return lambda one: one.ips.average if one.ips is not None and one.ips_unit == unit else None


_FIGURES: Mapping[str, tuple[_Of, _Spread, str]] = {
    "samples_per_sec": (_rate("samples/s"), _batches, "how many samples a batch has was not known"),
    "batches_per_sec": (_rate("batches/s"), _batches, "its rate is in samples/s"),
    "tokens_per_sec": (lambda one: one.tokens_per_sec, _batches, "how many tokens a batch has was not known"),
    "batch_cost_sec": (_batch_sec, _batches, ""),
    "reader_cost_sec": (_reader_sec, _waits, "no wait was seen"),
    "data_wait_ratio": (lambda one: one.reader_ratio, lambda one: _waits(one) / _batches(one), "no wait was seen"),
    "mfu": (lambda one: one.mfu, _batches, "no step was counted, or no peak is known"),
}
"""What each is of a run, what in each stretch or in proportion to that, and why it may not be known."""


def _figures(a: _Side, b: _Side) -> Iterator[FigureDifference]:
    """What is known of one of the runs at least."""
    for name, (of, spread, why) in _FIGURES.items():
        sides: list[figures.Figure] = []
        for side in (a, b):
            known = [value for one in side if (value := of(one)) is not None]
            whole = len(known) == len(side)
            sides.append((fmean(known) if whole else None, [spread(one) for one in side] if whole else None, why))
        if any(value is not None for value, _, _ in sides):
            yield figures.figure_difference(name, sides[0], sides[1], peaks=("", ""))


def _identity(side: _Side, names: Sequence[str]) -> ComparedRun:
    number, batches = len(side), side[0].batches
    source = f"{names[0]} and {number - 1} more" if number > 1 else names[0]
    about = f"{plain(batches)} {plural('batch', batches)}, without a profile"
    about = f"{number} runs: {about}" if number > 1 else about
    others = "whether other programs ran beside it is not known"
    return ComparedRun(source=source, runs=number, about=about, starts_share=SHARED, others=others)
