"""What differs between two sides, each one run or several of one program: times by cause, figures, and conditions.

A run is the parts of its step and its figures, whatever it was read from: ``compare`` makes one of a profile, of traces
or of a throughput. Every nanosecond of the difference of two steps belongs to a piece of a part, and has a cause.

The time of a piece of work is ``t = W s``: an amount of work ``W = FLOPs + R x bytes``, by the seconds *s* that one
unit of it takes. *R* is how many FLOPs the device does while it moves a byte. The logarithms of their changes add up,
and apportion the difference ``t_B - t_A``:

    work        L(t_A, t_B) ln(W_B / W_A)
    efficiency  L(t_A, t_B) ln(s_B / s_A)          L(x, y) = (y - x) / ln(y / x), the logarithmic mean; L(x, x) = x

J. K. Montgomery (1937) and Y. Vartia (Scand. J. Statist. 3, 1976), known as LMDI (B. W. Ang, Energy Policy 33, 2005).
What only one run has, or where only one counted any work, is work; where neither counted any, it is efficiency. No
work explains more than the time that it is in, all of ``t_B`` or all of ``t_A``: counts that would were not seen in one
of the runs. Work is rounded to whole nanoseconds, and efficiency is the rest, so sums are exact.

Of one run a side, chance is Welch's t (Biometrika 34, 1947) over the means of batches of neighbouring steps. Steps that
follow one another are alike: a core slows down for a while. So each run's timed steps are cut into batches of n^(1/3)
neighbours, at least five of them, whose means are nearly independent (A. Law and W. Kelton, "Simulation Modeling and
Analysis"). It is the noise *within* the two runs: what changes from one start of a program to the next, no run can see
of itself. Of several runs a side, chance is Student's t over the means of whole runs, which have that as well.

A run whose threads together waited for processors for a share *s* of its time *t* takes between ``t (1 - s)`` and *t*
where none need wait: whatever waits for a thread waits no longer than that one does. So the noise of a difference has
what the slower run may have waited there, which is at most ``s t`` of the step.
"""

from __future__ import annotations

import math
import operator
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from lightning_flops.analysis.rates import FLOPS_PER_BYTE
from lightning_flops.analysis.timing import whole_ns
from lightning_flops.errors import ComparisonError
from lightning_flops.schema.comparison import (
    STARTS,
    Cause,
    CausedDifference,
    ComparedRun,
    Comparison,
    FigureDifference,
)
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import phases_text
from lightning_flops.trace.intervals import Floats
from lightning_flops.units import NOT_AVAILABLE, percent, plain, plural, shown, si

LEAST_STEPS = 4  # timed steps of each run, below which nothing is said of noise
# Figures of the wall clock, which waiting for processors lengthens, or makes less.
WALL = ("global_step_sec", "samples_per_sec", "tokens_per_sec", "mfu", "hfu", "data_wait_ratio")
_STARVED = 0.05  # from this share of lost processor time on, the times of a run say little of its program
# Student's t of ``CONFIDENCE``, two-sided, from two degrees of freedom on; the last of all beyond.
_T = (9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25, 3.17, 3.11, 3.05, 3.01, 2.98, 2.95, 2.92, 2.90, 2.88, 2.86, 2.85)
_SIGNS = {">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le}
_FORM = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*")

Runs = Sequence[Floats]  # something in each step of each run of a side
Part = tuple[str, ...]  # what a step is divided into; of several names, what a run cannot separate
Row = tuple[str | None, str | None]  # names of a module in A and in B; both None for what no module owns
Sums = Counter[Any]  # ns of both sides and of each cause of their difference; of a row also of each run, by its number


class Work(NamedTuple):
    """Counts of a piece of work in one step; whole numbers where one step was counted."""

    flops: float = 0
    bytes: float = 0


class Figure(NamedTuple):
    """A number of one run."""

    value: float | None
    steps: Floats | None = None  #: What it is in each step, or in proportion to that; None of an exact count.
    why: str = ""  #: Why it is not known.


# Time and work of the pieces of a part of a step, by whose they are, None for no module, and what they are a wait for.
Pieces = dict[tuple[str | None, Cause | None], tuple[int, Work]]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is compared of one run; without a profile, a part of a step is one piece without counts."""

    source: str
    about: str  #: Its model, device and steps, in words.
    unit: str  #: What one of its steps is called.
    steps: int
    parts: Mapping[Part, tuple[float, Floats]]  #: Seconds of each part, mean and in each step; a step is their sum.
    figures: Mapping[str, Figure]
    set_up: Mapping[str, str] = field(default_factory=dict)  #: How it is set up, its ``peaks`` among this, in words.
    starts_share: float = STARTS  #: By what another start of its program may differ.
    starved: float = 0.0  #: Which share of its steps its threads were ready to run and had no processor, together.
    lower_bound: bool = False  #: Whether some of its FLOPs could not be counted.
    notes: Sequence[str] = ()  #: What limits a comparison with it, in sentences.
    inside: Mapping[Part, Any] = field(default_factory=dict)  #: Parts of which is known what filled them.

    def seconds(self, part: Part) -> Floats:
        """What is in *part*, in each step."""
        found = [steps for names, (_, steps) in self.parts.items() if set(names) <= set(part)]
        return sum(found, start=np.zeros(self.steps))

    def ns(self, part: Part) -> int:
        """Nanoseconds of *part*."""
        return sum(whole_ns(mean) for names, (mean, _) in self.parts.items() if set(names) <= set(part))

    def pieces(self, part: Part, *, by_module: bool) -> Pieces:
        """What *part* consists of, which adds up to it."""
        return {(None, None): (self.ns(part), Work())}


def compare_sides(
    a: Sequence[Run],
    b: Sequence[Run],
    *,
    kind: Literal["profiles", "traces", "throughput"],
    step: str,
    order: Sequence[str],
    rows: Sequence[Row] = (),
    flops_per_byte: float = FLOPS_PER_BYTE,
    notes: Sequence[str] = (),
    **more: Any,
) -> tuple[Comparison, Mapping[Row, Sums]]:
    """The sides *a* and *b* compared, and the sums of each of the *rows*, the modules of both.

    Args:
        a: the runs of one side.
        b: the runs of the other.
        kind: what is known of them.
        step: what a step is called.
        order: the names of all parts of a step.
        rows: modules with their partners.
        flops_per_byte: what a byte weighs.
        notes: sentences on the comparison.
        more: other fields of the comparison.
    """
    every, settings = _parts_of_both([*a, *b], order), _setting_differences(a[0].set_up, b[0].set_up)
    whole, of_parts, of_rows = Sums(), defaultdict[Part, Sums](Sums), defaultdict[Row, Sums](Sums)
    of_a, of_b = _identity(a), _identity(b)
    for part in every:
        by_module = all(part in run.inside for run in (*a, *b))
        in_a, in_b = (_pieces(side, part, rows, place, by_module=by_module) for place, side in enumerate((a, b)))
        for row, wait in in_a | in_b:
            own_a, work_a = in_a.get((row, wait), ([0] * len(a), None))
            own_b, work_b = in_b.get((row, wait), ([0] * len(b), None))
            a_ns, b_ns = round(statistics.fmean(own_a)), round(statistics.fmean(own_b))
            causes: Mapping[Cause, int] = {wait: b_ns - a_ns} if wait else {}
            if kind == "profiles" and not wait:
                causes = split(a_ns=a_ns, b_ns=b_ns, a=work_a, b=work_b, flops_per_byte=flops_per_byte)
                of_rows[row].update(dict(enumerate((*own_a, *own_b))))
            for sums in (whole, of_parts[part], of_rows[row]):
                sums.update(causes, a_ns=a_ns, b_ns=b_ns)
    waits = {"a_ns": round(of_a.starved_share * whole["a_ns"]), "b_ns": round(of_b.starved_share * whole["b_ns"])}
    for sums in (whole, *of_parts.values(), *of_rows.values()):
        slower = max(waits, key=sums.__getitem__)
        sums["waits_ns"] = min(sums[slower], waits[slower])
    compared = Comparison(
        kind=kind,
        a=of_a,
        b=of_b,
        settings=settings if kind == "profiles" else {},
        figures=tuple(
            _figure_difference(name, [run.figures[name] for run in a], [run.figures[name] for run in b], settings)
            for name in a[0].figures
        ),
        step=_difference(step, tuple(order), whole, a, b),
        parts=tuple(_difference(phases_text(part), part, of_parts[part], a, b) for part in every),
        notes=(*notes, *_notes(a, b)),
        **more,
    )
    return compared, of_rows


def _difference(name: str, part: Part, sums: Sums, a: Sequence[Run], b: Sequence[Run]) -> CausedDifference:
    chance = noise_ns([run.seconds(part) for run in a], [run.seconds(part) for run in b])
    return CausedDifference(name=name, **times(sums, chance))


def _setting_differences(a: Mapping[str, str], b: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """What is set up differently."""
    both = {name: (a.get(name, NOT_AVAILABLE), b.get(name, NOT_AVAILABLE)) for name in {**b, **a}}
    return {name: texts for name, texts in both.items() if texts[0] != texts[1]}


def _parts_of_both(runs: Sequence[Run], order: Sequence[str]) -> list[Part]:
    """The parts that all runs separate; what some separate in other ways is one part."""
    alike = set.intersection(*(set(run.parts) for run in runs))
    rest = {name for run in runs for part in run.parts.keys() - alike for name in part}
    joined = tuple(name for name in order if name in rest)
    return sorted([*alike, *([joined] if joined else [])], key=lambda part: order.index(part[0]))


def _pieces(
    side: Sequence[Run], part: Part, rows: Sequence[Row], place: int, *, by_module: bool
) -> dict[tuple[Row, Cause | None], tuple[list[int], Work]]:
    """What a part of the step consists of: times in each run of a side, and the mean of their work."""
    found, row_of = [run.pieces(part, by_module=by_module) for run in side], {row[place]: row for row in rows}
    means = {}
    for name, wait in found[0]:
        own, works = zip(*(one[name, wait] for one in found), strict=True)
        row = (None, None) if name is None else row_of[name]
        means[row, wait] = list(own), Work(*map(statistics.fmean, zip(*works, strict=True)))
    return means


def times(sums: Sums, chance: int | None) -> dict[str, Any]:
    """The fields of a difference with these *sums*, of which *chance* may be the spread of steps or runs."""
    causes = {cause: sums[cause] for cause in get_args(Cause) if sums[cause]}
    return {
        "a_ns": sums["a_ns"],
        "b_ns": sums["b_ns"],
        "causes": causes,
        "noise_ns": None if chance is None else chance + sums["waits_ns"],
    }


def name_of(side: Sequence[Run]) -> str:
    """The runs of a side in words."""
    more = len(side) - 1 if len({run.source for run in side}) > 1 else 0
    return f"{side[0].source} and {more} more" if more else side[0].source


def _identity(side: Sequence[Run]) -> ComparedRun:
    """What a comparison says of a side, and which of its runs had to wait for processors."""
    first, several, share = side[0], len(side) > 1, statistics.median(run.starved for run in side)
    which = "each" if len({run.about for run in side}) == 1 else "the first"
    slow = [f"{run.source} ({percent(run.starved)} of its time)" for run in side if run.starved > _STARVED]
    again = "Repeat such runs where nothing else runs" + (", or leave them out." if len(side) - len(slow) > 1 else ".")
    return ComparedRun(
        source=name_of(side),
        runs=len(side),
        about=f"{plain(len(side))} runs, {which} {first.about}" if several else first.about,
        starved_share=share if share > _STARVED else 0.0,
        starved_runs=f"{', '.join(slow)} had to wait for a processor. {again}" if several and slow else "",
        starts_share=max(run.starts_share for run in side),
    )


def _notes(a: Sequence[Run], b: Sequence[Run]) -> Iterator[str]:
    """What limits the comparison, in sentences, by the runs that they are on."""
    found = defaultdict[str, list[str]](list)
    for run in (*a, *b):
        has = f"{plain(run.steps)} {plural(run.unit, run.steps)}, and less than {LEAST_STEPS}"
        limits = {
            # Of several runs a side, noise is that between the runs.
            f"what is noise is not known: it has {has} say nothing of their spread.": run.steps < LEAST_STEPS
            and min(len(a), len(b)) == 1,
            "FLOPs are lower bounds: what could not be counted is not in them.": run.lower_bound,
            **dict.fromkeys(run.notes, True),
        }
        for note in (note for note, holds in limits.items() if holds):
            found[note].append(run.source)
    yield from (f"{' and '.join(dict.fromkeys(sources))}: {note}" for note, sources in found.items())


# ---- the causes of a difference of times


def split(
    *, a_ns: int, b_ns: int, a: Work | None, b: Work | None, flops_per_byte: float = FLOPS_PER_BYTE
) -> dict[Cause, int]:
    """The difference ``b_ns - a_ns`` of one piece of work by cause; *a* or *b* is None in a run that has no such."""
    difference = b_ns - a_ns
    if a is None or b is None:
        return {"modules": difference}
    flops, moved = b.flops - a.flops, flops_per_byte * (b.bytes - a.bytes)
    if not flops and not moved:
        return {"efficiency": difference}
    units_a, units_b = (one.flops + flops_per_byte * one.bytes for one in (a, b))
    if not units_a or not units_b:
        flops_ns = round(difference * (flops / (flops + moved)))
        return {"flops": flops_ns, "bytes": difference - flops_ns}
    per_unit = _logarithmic_mean(a_ns, b_ns) / _logarithmic_mean(units_a, units_b)
    more = (flops + moved) * per_unit
    if more and not -a_ns <= more <= b_ns:
        per_unit *= (b_ns if more > 0 else -a_ns) / more
    flops_ns, bytes_ns = round(flops * per_unit), round(moved * per_unit)
    return {"flops": flops_ns, "bytes": bytes_ns, "efficiency": difference - flops_ns - bytes_ns}


def _logarithmic_mean(x: float, y: float) -> float:
    """``(y - x) / ln(y / x)`` of two numbers that are not below zero: between them; 0 if one of them is 0."""
    low, high = sorted((x, y))
    if low <= 0 or low == high:
        return max(0.0, low)
    return (high - low) / math.log1p((high - low) / low)


# ---- what is chance


def noise_ns(a: Runs, b: Runs) -> int | None:
    """How far the difference of the means of *a* and *b*, seconds of each step of both sides, may be chance."""
    width = _half_width(a, b)
    return None if width is None else round(1e9 * width)


def noise_factor(a: Runs, b: Runs) -> float | None:
    """By what the ratio B / A of a figure, known of each step, may be multiplied or divided; 1 where one is 0."""
    means = [float(np.mean([one.mean() for one in side])) for side in (a, b)]
    if not all(means):
        return 1.0
    width = _half_width(*([one / mean for one in side] for side, mean in zip((a, b), means, strict=True)))
    return None if width is None else math.exp(width)


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


# ---- figures of both, and conditions on them


def _figure_difference(
    name: str, of_a: Sequence[Figure], of_b: Sequence[Figure], settings: Mapping[str, tuple[str, str]]
) -> FigureDifference:
    """A figure of both sides; shares of other peaks have no ratio, which would mislead."""
    (a, steps_a, why_a), (b, steps_b, why_b), ratio, factor, reason = _of_side(of_a), _of_side(of_b), None, None, ""
    if a is None or b is None:
        which, why = ("A", why_a) if a is None else ("B", why_b)
        reason = f"not known in {which}: {why}".removesuffix(": ")
    elif name in ("mfu", "hfu") and "peaks" in settings:
        reason = "it is of other peaks: {} in A, {} in B".format(*settings["peaks"])
    elif b and not a:
        reason = "0 in A"
    else:
        ratio = b / a if a else 1.0
        # A mean of 0 is 0 in each step, whether these are known or not.
        factor = noise_factor(steps_a, steps_b) if a and b and steps_a and steps_b else 1.0
        reason = "single steps are not known, or too few to say what is noise" if factor is None else ""
    return FigureDifference(name=name, a=a, b=b, ratio=ratio, noise_factor=factor, reason=reason)


def _of_side(figures: Sequence[Figure]) -> tuple[float | None, Runs, str]:
    """The mean of a figure of several runs, what it is in their steps, and why it is not known."""
    why = next((one.why for one in figures if one.value is None), "")
    return mean_if_known([one.value for one in figures]), [one.steps for one in figures if one.steps is not None], why


def mean_if_known(values: Sequence[float | None]) -> float | None:
    """The mean of *values*; None if one of them is not known, or if there are none."""
    known = [one for one in values if one is not None]
    return statistics.mean(known) if known and len(known) == len(values) else None


def set_up_of(profile: Profile) -> dict[str, str]:
    """Context, model and settings as text."""
    settings = {f"settings.{one.name}": getattr(profile.settings, one.name) for one in fields(profile.settings)}
    peaks = profile.peaks_flops_per_sec
    known = {one.dtype: peaks[one.dtype] for one in profile.dtypes if one.dtype in peaks}
    found: dict[str, Any] = {
        **profile.set_up,
        **{f"context.{one.name}": getattr(profile.context, one.name) for one in fields(profile.context)},
        **{name: getattr(profile, name) for name in ("micro_steps", "samples", "tokens", "params", "trainable_params")},
        "dtypes": ", ".join(one.dtype for one in profile.dtypes),
        "peaks": peaks_text(known),
        "memory_bandwidth": si(profile.memory_bytes_per_sec, "B/s"),
        **settings,
    }
    return {name: _as_text(value) for name, value in found.items()}


def _as_text(value: Any) -> str:
    if value is None:
        return NOT_AVAILABLE
    return f"{value:,}" if isinstance(value, (int, float)) and not isinstance(value, bool) else str(value) or "(none)"


def peaks_text(peaks: Mapping[str, float]) -> str:
    """*peaks*, FLOP/s by dtype, in words; what rounds to the same is the same."""
    return ", ".join(f"{si(peak, 'FLOP/s')} ({dtype})" for dtype, peak in sorted(peaks.items()))


Verdict = Literal["holds", "does not hold", "is inconclusive"]


def judge(comparison: Comparison, condition: str) -> tuple[Verdict, str]:
    """Whether the ratio B / A of a figure keeps *condition* whatever value within its noise is the true one, and why.

    That is inconclusive of a figure by the wall clock where what a run waited for processors may decide it, and of any
    time where it holds, but would not for what two starts of one program may differ by, which one run a side does not
    show.

    Raises:
        ComparisonError: *condition* is none, or the figure, or its noise, is not known.
    """
    figure, sign, limit = _asked(comparison, condition)
    name = figure.name
    if figure.ratio is None or figure.ends is None:
        raise ComparisonError(f"{condition}: {name} cannot be compared: {figure.reason}")
    words, starts, (least, greatest) = f"{name} B/A is {figure.ratio:.4g}", 0.0, figure.ends
    if figure.noise_factor != 1:
        words, starts = f"{words}, by noise between {least:.4g} and {greatest:.4g}", comparison.starts_share
    a, b = comparison.a.starved_share, comparison.b.starved_share
    less, more = (0.0, 0.0) if name not in WALL else (b, a) if name == WALL[0] else (a, b)
    least, most = least * (1 - less), limit * (1 - more)  # of which the greatest may be more by what the side waited
    keeps = {sign(least, limit), sign(greatest, most)}
    if (less or more) and (len(keeps) > 1 or name == "data_wait_ratio"):
        return "is inconclusive", f"{words}, but {' and '.join(comparison.starved)} had to wait for processors"
    if keeps != {True}:
        return "does not hold", f"{words}: within noise" if sign(figure.ratio, limit) else words
    if sign(least / (1 + starts), limit) and sign(greatest * (1 + starts), most):
        return "holds", words
    return "is inconclusive", f"{words}, and two starts of one program may differ by {starts:.0%} more"


def _asked(comparison: Comparison, condition: str) -> tuple[FigureDifference, Callable[[float, float], bool], float]:
    """The figure, the sign and the number of *condition*."""
    found = _FORM.fullmatch(condition)
    if found is None:
        raise ComparisonError(
            "must be a figure, one of > >= < <=, and a number, as 'global_step_sec > 1.05', "
            f"got {shown(condition, chars=60)}"
        )
    figures = {one.name: one for one in comparison.figures}
    if found[1] not in figures:
        raise ComparisonError(f"{condition}: {found[1]} cannot be compared: it is none of {', '.join(figures)}")
    return figures[found[1]], _SIGNS[found[2]], float(found[3])
