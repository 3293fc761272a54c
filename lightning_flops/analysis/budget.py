"""The breakdown of a step: one account of where peak x time went, in eight rows that add up to the step's wall time.

The times of a step's parts are those of a typical step. What filled each part is known of the traced step alone, so
its shares divide them. What neither shows is not guessed: such rows are n/a, and their time stands in ``compute``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from typing import get_args

from lightning_flops.records import WindowRecord
from lightning_flops.schema.budget import Budget, BudgetKey
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

_BETWEEN_STEPS = {"checkpoint": "checkpoints", "epoch restart": "between epochs"}
"""Causes for which time is left out of the steps, in words; others are words."""


def build_budget(
    *,
    timing: TimingProfile | None,
    traced: TracedStep | None,
    peak_sec: tuple[float | None, float | None],
    memory_sec: float | None,
    lower_bound: bool,
    step_word: str = "step",
    own_sec: float = 0.0,
) -> Budget | None:
    """The account of one step.

    Args:
        timing: of the timed steps.
        traced: the traced step; None if there is none.
        peak_sec: seconds that the step's model FLOPs, and its hardware FLOPs, take at the device's peaks.
        memory_sec: seconds that moving the bytes of all operators that are not matmul-like takes at the bandwidth of
            the device's memory; None if that is not known.
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
    knows_peak = _take_peak(spent, peak_sec, notes)
    if lower_bound and knows_peak:
        notes.append("The FLOPs are lower bounds, and so are the rows at the peak; the row after them is at most that.")
    wall_ns, times_ns = _whole_nanoseconds(spent)
    operators_ns = times_ns["operators"]
    memory_ns = (
        None if memory_sec is None or operators_ns is None else min(operators_ns, round(memory_sec * _NS_PER_SEC))
    )
    return Budget(
        wall_ns=wall_ns,
        rows_ns=times_ns,
        memory_ns=memory_ns,
        run_ns=_run(timing, own_sec=own_sec),
        notes=tuple(notes),
    )


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


def _take_peak(spent: _Spent, peak_sec: tuple[float | None, float | None], notes: list[str]) -> bool:
    """Moves what the FLOPs take at the peak out of ``compute``; False if that is not known, or impossible.

    Where the traced step gives matmul-like operators less time than their FLOPs take at the peak, what it says of
    the phases is not used.
    """
    if peak_sec[0] is None:
        return False
    model = Fraction(peak_sec[0])
    others = Fraction() if peak_sec[1] is None else Fraction(peak_sec[1]) - model
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
    spent["other_flops"] = None if peak_sec[1] is None else others
    if peak_sec[1] is None:
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
    run_ns = {**profile.budget.run_ns, "the profiler: reading the trace and making this report": round(seconds * 1e9)}
    return replace(profile, budget=replace(profile.budget, run_ns=run_ns))


def _run(timing: TimingProfile, *, own_sec: float) -> dict[str, int]:
    """The timed steps, what came between them, and what the profiler took in addition."""
    times = {"timed steps": timing.global_step_sec * timing.timed_steps}
    if (stalls := timing.stalls) is not None:
        times["timed steps"] -= stalls.seconds
        times[f"stalls ({stalls.steps} of {timing.timed_steps} timed steps, mostly in {stalls.part})"] = stalls.seconds
    times |= {_BETWEEN_STEPS.get(cause, cause): seconds for cause, seconds in timing.excluded_sec.items()}
    if own_sec > 0:
        times["the profiler: counting and tracing"] = own_sec
    return {label: round(seconds * _NS_PER_SEC) for label, seconds in times.items()}
