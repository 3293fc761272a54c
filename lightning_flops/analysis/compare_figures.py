"""Figures and settings of two runs, what of a difference is chance, and conditions that may end a CI job.

Of one run a side, chance is Welch's t (Biometrika 34, 1947) over the means of batches of neighbouring steps. Steps that
follow one another are alike: a core slows down for a while. So each run's timed steps are cut into batches of n^(1/3)
neighbours, at least five of them, whose means are nearly independent (A. Law and W. Kelton, "Simulation Modeling and
Analysis"). It is the noise *within* the two runs: what changes from one start of a program to the next, no run can see
of itself. Of several runs a side, chance is Student's t over the means of whole runs, which have that as well.
"""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.rates import peak_seconds, per_second, ratio
from lightning_flops.errors import ComparisonError
from lightning_flops.schema.comparison import ComparedRun, Comparison, FigureDifference
from lightning_flops.schema.profile import Profile
from lightning_flops.units import NOT_AVAILABLE, plain, shown, si

LEAST_STEPS = 4  # timed steps of each run, below which nothing is said of noise
FLOPS_PER_BYTE = 10.0  # where a device's own are not known: an A100's in float32, 19.5 TFLOP/s on 2.0 TB/s
# Student's t of ``CONFIDENCE``, two-sided, from two degrees of freedom on; the last of all beyond.
_T = (9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.90, 2.88, 2.86, 2.85)

Floats = npt.NDArray[np.float64]
# Figures of the wall clock, which say little of a run that was starved of processors.
WALL = ("global_step_sec", "samples_per_sec", "tokens_per_sec", "mfu", "hfu", "data_wait_ratio")
Runs = Sequence[Floats]  # something in each step of each run of a side
# A figure of one run, and what it is in each step, or in proportion to that; None of an exact count.
OfRun = tuple[float | None, Floats | None]
Figure = tuple[float | None, Runs | None, str]  # the same of the runs of a side, and why it may not be known

_OF_PROFILE = ("micro_steps", "samples", "tokens", "params", "trainable_params")
_SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_FORM = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*")


def too_few(source: str, number: int, what: str) -> list[str]:
    """The sentence on the run *source* if the *number* of its steps, or of *what* it has, is below ``LEAST_STEPS``."""
    words = f"What is noise is not known: {source} has {number} {what}, and less than {LEAST_STEPS} say nothing of "
    return [f"{words}their spread."] if number < LEAST_STEPS else []


def noise_ns(a: Runs, b: Runs) -> int | None:
    """How far the difference of the means of *a* and *b*, seconds of each step of both sides, may be chance."""
    width = _half_width(a, b)
    return None if width is None else round(1e9 * width)


def times(a: Figure, b: Figure) -> dict[str, Any]:
    """The fields of the difference of *a* and *b*, seconds that both sides know."""
    a_ns, b_ns = (round(1e9 * (seconds or 0.0)) for seconds, *_ in (a, b))
    return {"a_ns": a_ns, "b_ns": b_ns, "noise_ns": noise_ns(a[1] or (), b[1] or ())}


def noise_factor(a: Runs, b: Runs) -> float | None:
    """By what the ratio B / A of a figure, known of each step, may be multiplied or divided; 1 where one is 0."""
    means = [float(np.mean([one.mean() for one in side])) for side in (a, b)]
    if not all(means):
        return 1.0
    width = _half_width(*([one / mean for one in side] for side, mean in zip((a, b), means, strict=True)))
    return None if width is None else math.exp(width)


def identity(sources: Sequence[str], about: str, **more: Any) -> ComparedRun:
    """What a comparison says of a side, whose runs are of these *sources*."""
    runs = len(sources)
    about = f"{plain(runs)} runs: {about}" if runs > 1 else about
    return ComparedRun(source=name_of(sources), runs=runs, about=about, **more)


def name_of(sources: Sequence[str]) -> str:
    """The runs of a side in words."""
    more = len(sources) - 1 if len(set(sources)) > 1 else 0
    return f"{sources[0]} and {more} more" if more else sources[0]


def of_side(runs: Sequence[Mapping[str, OfRun]], why: Mapping[str, str]) -> dict[str, Figure]:
    """Each figure of a side: the mean of its *runs*', known where it is of each."""
    found: dict[str, Figure] = {}
    for name in runs[0]:
        values, steps = zip(*(one[name] for one in runs), strict=True)
        value = None if None in values else values[0] if len(set(values)) == 1 else statistics.fmean(values)
        found[name] = value, None if value is None or steps[0] is None else steps, why.get(name, "")
    return found


def _half_width(a: Runs, b: Runs) -> float | None:
    """Half of the interval of the difference of two sides' means; None where too few steps show it."""
    if min(len(a), len(b)) > 1:
        of_runs = [np.array([one.mean() for one in side]) for side in (a, b)]
        squares = sum(float(one.var()) * len(one) for one in of_runs)
        freedom = len(a) + len(b) - 2
        return _t(freedom) * math.sqrt(squares / freedom * (1 / len(a) + 1 / len(b)))
    if min(map(len, (*a, *b))) < LEAST_STEPS:
        return None
    batches = [np.concatenate([batch_means(one) for one in side]) for side in (a, b)]
    squares_of = [float(one.var(ddof=1)) / len(one) for one in batches]
    if not sum(squares_of):
        return 0.0
    parts = [square**2 / (len(one) - 1) for square, one in zip(squares_of, batches, strict=True)]
    return _t(int(sum(squares_of) ** 2 / sum(parts))) * math.sqrt(sum(squares_of))


def _t(freedom: int) -> float:
    return _T[min(freedom, len(_T) + 1) - 2]


def batch_means(steps: Floats) -> Floats:
    """The *steps*, n times in their order, as means over batches of about n^(1/3) neighbours, which are alike.

    There are at least five batches if there are five steps; steps at the end that fill no batch are left out.
    """
    length = max(1, min(round(math.pow(len(steps), 1 / 3)), len(steps) // 5))
    means: Floats = steps[: len(steps) // length * length].reshape(-1, length).mean(axis=1)
    return means


def differences(a: Mapping[str, Figure], b: Mapping[str, Figure], *, peaks: Sequence[str]) -> list[FigureDifference]:
    """What one of both sides knows at least; shares of other *peaks*, in words, have no ratio, which would mislead."""
    return [_difference(name, a[name], b[name], peaks) for name in a]


def _difference(name: str, in_a: Figure, in_b: Figure, peaks: Sequence[str]) -> FigureDifference:
    (a, of_a, why_a), (b, of_b, why_b), ratio, factor, reason = in_a, in_b, None, None, ""
    if a is None or b is None:
        which, words = ("A", why_a) if a is None else ("B", why_b)
        reason = f"not known in {which}" + (f": {words}" if words else "")
    elif name in ("mfu", "hfu") and peaks[0] != peaks[1]:
        reason = f"it is of other peaks: {peaks[0]} in A, {peaks[1]} in B"
    elif b and not a:
        reason = "0 in A"
    else:
        ratio = b / a if a else 1.0
        factor = 1.0 if of_a is None or of_b is None or not a else noise_factor(of_a, of_b)
        reason = "single steps are not known, or too few to say what is noise" if factor is None else ""
    return FigureDifference(name=name, a=a, b=b, ratio=ratio, noise_factor=factor, reason=reason)


Verdict = Literal["holds", "does not hold", "is inconclusive"]


def judge(comparison: Comparison, condition: str) -> tuple[Verdict, str]:
    """Whether the ratio B / A of a figure keeps *condition* whatever value within its noise is the true one, and why.

    That is inconclusive of a figure by the wall clock where a run was starved of processors, and of any time where it
    holds, but would not for what two starts of one program may differ by, which one run a side does not show.

    Raises:
        ComparisonError: *condition* is none, or the figure, or its noise, is not known.
    """
    found = _FORM.fullmatch(condition)
    if found is None:
        raise ComparisonError(
            "must be a figure, one of > >= < <=, and a number, as 'global_step_sec > 1.05', "
            f"got {shown(condition, chars=60)}"
        )
    name, sign, limit = found[1], _SIGNS[found[2]], float(found[3])
    figures = {one.name: one for one in comparison.figures}
    if name not in figures:
        raise ComparisonError(f"{condition}: {name} cannot be compared: it is none of {', '.join(figures)}")
    figure, starved = figures[name], [of for of, run in (("A", comparison.a), ("B", comparison.b)) if run.starved]
    words = f"{name} B/A is {figure.ratio:.4g}" if figure.ratio is not None else ""
    if words and starved and name in WALL:
        return "is inconclusive", f"{words}, but {' and '.join(starved)} had to wait for processors"
    if figure.ratio is None or figure.ends is None:
        raise ComparisonError(f"{condition}: {name} cannot be compared: {figure.reason}")
    if figure.noise_factor != 1:
        words += f", by noise between {figure.ends[0]:.4g} and {figure.ends[1]:.4g}"
    starts = 0.0 if figure.noise_factor == 1 else comparison.starts_share
    least, greatest = figure.ends
    if all(sign(one, limit) for one in (least / (1 + starts), greatest * (1 + starts))):
        return "holds", words
    if all(sign(one, limit) for one in figure.ends):
        return "is inconclusive", f"{words}, and two starts of one program may differ by {starts:.0%} more"
    return "does not hold", f"{words}: within noise" if sign(figure.ratio, limit) else words


def peaks_text(peaks: Mapping[str, float]) -> str:
    """*peaks*, FLOP/s by dtype, in words; what rounds to the same is the same."""
    return ", ".join(f"{si(peak, 'FLOP/s')} ({dtype})" for dtype, peak in sorted(peaks.items()))


def peaks_of(profile: Profile) -> str:
    """Peaks of the dtypes that ran, in words."""
    known = profile.peaks_flops_per_sec
    return peaks_text({one.dtype: known[one.dtype] for one in profile.dtypes if one.dtype in known})


def setting_differences(a: Profile, b: Profile) -> dict[str, tuple[str, str]]:
    """What is set up differently: context, model and settings."""
    of_a, of_b = _set_up(a), _set_up(b)
    both = {name: (of_a.get(name, NOT_AVAILABLE), of_b.get(name, NOT_AVAILABLE)) for name in of_b | of_a}
    return {name: texts for name, texts in both.items() if texts[0] != texts[1]}


def flops_per_byte(profiles: Sequence[Profile]) -> float:
    """FLOPs that these runs' devices do in the dtypes that ran while they move a byte; of other devices their mean."""
    known = []
    for one in profiles:
        spent = {dtype.dtype: float(dtype.hardware) for dtype in one.dtypes}
        peak = per_second(amount=sum(spent.values()), seconds=peak_seconds(spent, one.peaks_flops_per_sec))
        known.append(ratio(part=peak, whole=one.memory_bytes_per_sec))
    return statistics.geometric_mean([one or FLOPS_PER_BYTE for one in known])


def _set_up(profile: Profile) -> dict[str, str]:
    settings = {f"settings.{one.name}": getattr(profile.settings, one.name) for one in fields(profile.settings)}
    found: dict[str, Any] = {
        **profile.set_up,
        **{f"context.{one.name}": getattr(profile.context, one.name) for one in fields(profile.context)},
        **{name: getattr(profile, name) for name in _OF_PROFILE},
        "dtypes": ", ".join(one.dtype for one in profile.dtypes),
        "peaks": peaks_of(profile),
        "memory_bandwidth": si(profile.memory_bytes_per_sec, "B/s"),
        **settings,
    }
    return {name: _as_text(value) for name, value in found.items()}


def _as_text(value: Any) -> str:
    if value is None:
        return NOT_AVAILABLE
    return f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value) or "(none)"
