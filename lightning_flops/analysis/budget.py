"""The breakdown of a step: one account of where peak x time went, in eight rows that add up to the step's wall time.

The times of a step's parts are those of a typical step. What filled each part is known of the traced step alone, so
its shares divide them. What neither shows is not guessed: such rows are n/a, and their time stands in ``compute``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import get_args

from lightning_flops.analysis.advice import ROWS_OF_RULE
from lightning_flops.analysis.rates import mean, peak_seconds
from lightning_flops.records import OperatorCell, WindowRecord
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.budget import Budget, BudgetKey, BudgetRow, RunKey, RunShare
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import PartTiming, TimingProfile
from lightning_flops.schema.trace import StepFilling, TracedStep

_NS_PER_SEC = 10**9

_ROWS: tuple[BudgetKey, ...] = get_args(BudgetKey)

_DATA = {"data_wait", "transfer"}
_NO_COMPUTE = {*_DATA, "bubble", "other"}
"""Phases of a step in which the model does nothing."""

_OF_TRACE: tuple[BudgetKey, ...] = ("operators", "communication", "idle")
"""The rows that a trace divides from ``compute``."""

_RUN_ROWS: Mapping[str, tuple[RunKey, str]] = {
    "validation": ("validation", "validation"),
    "checkpoint": ("checkpoint", "checkpoints"),
    "epoch restart": ("between_epochs", "between epochs"),
}
"""Causes for which time is left out of the steps, and their rows; a user may name others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecondsAtPeak:
    """Seconds of one step that its FLOPs take at the peaks of their dtypes; None where a peak is not known."""

    model: float | None
    others: float | None
    """Recomputed FLOPs and the optimizer's, less what fused masked attention skips of all of them."""


def seconds_at_peak(
    cells: Iterable[OperatorCell],
    *,
    peak_of: Callable[[str], float | None],
    counted_steps: int,
) -> SecondsAtPeak:
    """The FLOPs of *cells*, of *counted_steps* together, at the peaks that *peak_of* knows by dtype."""
    sums: dict[str, defaultdict[str, int]] = {
        name: defaultdict(int) for name in ("model", "recompute", "optimizer", "skipped")
    }
    for cell in cells:
        name = "model" if cell.phase in ("forward", "backward") else cell.phase
        sums[name][cell.dtype] += cell.flops
        sums["skipped"][cell.dtype] += cell.skipped

    def seconds(flops: Mapping[str, int]) -> float | None:
        peaks = {dtype: peak_of(dtype) for dtype in flops}
        # Where half the scores are counted, more than that may be executed: a negative amount.
        above = peak_seconds(flops={one: max(0, spent) for one, spent in flops.items()}, peaks_flops_per_sec=peaks)
        below = peak_seconds(flops={one: max(0, -spent) for one, spent in flops.items()}, peaks_flops_per_sec=peaks)
        return None if above is None or below is None else mean(total=above - below, steps=counted_steps)

    model, recompute, optimizer, skipped = (seconds(flops) for flops in sums.values())
    others = None if recompute is None or optimizer is None or skipped is None else recompute + optimizer - skipped
    return SecondsAtPeak(model=model, others=others)


def build_budget(
    *,
    timing: TimingProfile | None,
    traced: TracedStep | None,
    at_peak: SecondsAtPeak,
    memory_sec: float | None,
    advice: Sequence[Advice],
    lower_bound: bool,
    step_word: str = "step",
    own_sec: float = 0.0,
) -> Budget | None:
    """The account of one step.

    Args:
        timing: of the timed steps.
        traced: the traced step; None if there is none.
        at_peak: what the counted FLOPs take at the peak.
        memory_sec: seconds that moving the bytes of all operators that are not matmul-like takes at the bandwidth of
            the device's memory; None if that is not known.
        advice: what the rows link to.
        lower_bound: FLOPs are lower bounds, so what is "slower than the peak" is at most that.
        step_word: what users call a step of this run.
        own_sec: what the profiler's window took beyond the steps in it.

    Returns:
        None if no step was timed.
    """
    if timing is None or timing.global_step.typical_sec <= 0:
        return None
    filling = None if traced is None else traced.filling
    notes: list[str] = []
    spent = _spent(timing.parts, filling)
    if filling is None:
        notes.append(
            "Other operators, communication and idle are n/a without a trace that shows what filled the phases."
        )
    elif traced is not None and not traced.like_counted:
        notes.append(
            f"What filled each part is that of {step_word} {traced.index}, whose shapes are not those of all timed "
            f"{step_word}s."
        )
    knows_peak = at_peak.model is not None and _take_peak(spent, at_peak, notes)
    if lower_bound and knows_peak:
        notes.append("The FLOPs are lower bounds, and so are the rows at the peak; the row after them is at most that.")
    wall_ns, times_ns = _whole_nanoseconds(spent)
    operators_ns = times_ns["operators"]
    memory_ns = (
        None if memory_sec is None or operators_ns is None else min(operators_ns, round(memory_sec * _NS_PER_SEC))
    )
    budget = Budget(
        wall_ns=wall_ns,
        rows=tuple(
            BudgetRow(key=key, time_ns=times_ns[key], memory_ns=memory_ns if key == "operators" else None, advice=())
            for key in _ROWS
        ),
        traced_step=None if filling is None or traced is None else traced.index,
        run=_run(timing, own_sec=own_sec),
        notes=tuple(notes),
    )
    return link_advice(budget, advice)


def link_advice(budget: Budget, advice: Sequence[Advice]) -> Budget:
    """*budget* whose rows name the rules of *advice* that lower them."""
    inside = [row.key for row in budget.rows if row.time_ns is None and row.key in _OF_TRACE]

    def rules(row: BudgetRow) -> tuple[str, ...]:
        if not row.time_ns:
            return ()
        keys = {row.key, *(inside if row.key == "compute" else ())}
        return tuple(one.rule for one in advice if keys & ROWS_OF_RULE[one.rule])

    return replace(budget, rows=tuple(replace(row, advice=rules(row)) for row in budget.rows))


_Spent = dict[BudgetKey, Fraction | None]


def _spent(parts: Iterable[PartTiming], filling: StepFilling | None) -> _Spent:
    """Seconds of each row before any peak; None is what no trace shows."""
    spent: defaultdict[BudgetKey, Fraction] = defaultdict(Fraction)
    fillings = {} if filling is None else {one.name: one for one in filling.parts}
    for part in parts:
        seconds = Fraction(part.typical_sec)
        if _NO_COMPUTE.issuperset(part.phases):
            row: BudgetKey = "data" if _DATA.issuperset(part.phases) else "other"
            spent[row] += seconds
            continue
        inside = [fillings[phase] for phase in part.phases if phase in fillings]
        weights: dict[BudgetKey, int] = {
            "compute": sum(one.matmul_ns for one in inside),
            "operators": sum(one.operators_ns for one in inside),
            "communication": sum(one.communication_ns for one in inside),
            "idle": sum(one.idle_ns + one.copies_ns for one in inside),
        }
        whole = sum(weights.values())
        if not whole:
            weights["compute"] = whole = 1
        for key, weight in weights.items():
            spent[key] += seconds * weight / whole
    known = _Spent({key: spent[key] for key in _ROWS if filling is not None or key not in _OF_TRACE})
    return {**dict.fromkeys(_ROWS), **known, "model": None, "other_flops": None}


def _take_peak(spent: _Spent, at_peak: SecondsAtPeak, notes: list[str]) -> bool:
    """Moves what the FLOPs take at the peak out of ``compute``; False if that is impossible.

    Where the traced step gives matmul-like operators less time than their FLOPs take at the peak, what it says of
    the phases is not used.
    """
    model, others = Fraction(at_peak.model or 0.0), Fraction(at_peak.others or 0.0)
    compute = spent["compute"] or Fraction()
    if model + others > compute:
        joined = compute + sum((spent[key] or Fraction() for key in _OF_TRACE), Fraction())
        if model + others > joined:
            notes.append(
                "FLOPs at the peak are n/a: they would take longer at the peak than they did, so the peak is wrong."
            )
            return False
        notes.append(
            "Other operators, communication and idle are n/a: the traced step gives matmul-like operators less time "
            "than their FLOPs take at the peak."
        )
        compute = joined
        spent.update(dict.fromkeys(_OF_TRACE))
    spent |= {"model": model, "compute": compute - model - others}
    spent["other_flops"] = None if at_peak.others is None else others
    if at_peak.others is None:
        notes.append("Recomputed FLOPs and the optimizer's at the peak are n/a: the peak of a dtype is not known.")
    return True


def _whole_nanoseconds(spent: _Spent) -> tuple[int, dict[BudgetKey, int | None]]:
    """The sum, and each row: rounded as a running sum, so that the rows add up to it."""
    total, before = Fraction(), 0
    times_ns: dict[BudgetKey, int | None] = {}
    for key in _ROWS:
        total += spent[key] or Fraction()
        reached = round(total * _NS_PER_SEC)
        times_ns[key] = None if spent[key] is None else reached - before
        before = reached
    return before, times_ns


def own_seconds(window: WindowRecord, timing: TimingProfile | None) -> float:
    """Wall seconds by which batches took longer for being counted or traced; 0 where nothing was timed to compare."""
    batches = sum(step.micro_steps for step in window.timed_steps)
    if timing is None or not batches:
        return 0.0
    usual_sec = timing.global_step_sec * timing.timed_steps / batches
    return max(0.0, window.slowed_sec - window.slowed_batches * usual_sec)


def with_report_sec(profile: Profile, seconds: float) -> Profile:
    """*profile* whose budget has, in addition, the wall seconds that making the report took."""
    if profile.budget is None:
        return profile
    share = RunShare(
        key="report",
        label="the profiler: reading the trace and making this report",
        time_ns=round(seconds * _NS_PER_SEC),
    )
    return replace(profile, budget=replace(profile.budget, run=(*profile.budget.run, share)))


def _run(timing: TimingProfile, *, own_sec: float) -> tuple[RunShare, ...]:
    """The timed steps, what came between them, and what the profiler took in addition."""
    times: list[tuple[RunKey, str, float]] = [("training", "timed steps", timing.global_step_sec * timing.timed_steps)]
    if (stalls := timing.stalls) is not None:
        times[0] = (*times[0][:2], times[0][2] - stalls.seconds)
        words = f"stalls ({stalls.steps} of {timing.timed_steps} timed steps, mostly in {stalls.part})"
        times.append(("stalls", words, stalls.seconds))
    for cause, seconds in timing.excluded_sec.items():
        times.append((*_RUN_ROWS.get(cause, ("elsewhere", cause)), seconds))
    if own_sec > 0:
        times.append(("profiler", "the profiler: counting and tracing", own_sec))
    return tuple(RunShare(key=key, label=label, time_ns=round(seconds * _NS_PER_SEC)) for key, label, seconds in times)
