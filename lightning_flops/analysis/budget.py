"""The breakdown of a step: one account of where peak x time went, in eight rows that add up to the step's wall time.

The times of a step's parts are those of a typical step. What filled each part is known of the traced step alone, so
its shares divide them. What neither shows is not guessed: such rows are n/a, and their time stands in ``compute``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from lightning_flops.analysis.advice import ROWS_OF_RULE
from lightning_flops.analysis.compare_split import apportioned
from lightning_flops.analysis.rates import mean, per_second
from lightning_flops.records import OperatorCell, WindowRecord
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.budget import Budget, BudgetKey, BudgetRow, RunKey, RunShare
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import PartTiming, TimingProfile
from lightning_flops.schema.trace import StepFilling, TracedStep

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
    cells: Iterable[OperatorCell], *, peak_of: Callable[[str], float | None], counted_steps: int
) -> SecondsAtPeak:
    """The FLOPs of *cells*, of *counted_steps* together, at the peaks that *peak_of* knows by dtype."""
    model, others = Counter[str](), Counter[str]()
    for cell in cells:
        (model if cell.phase in ("forward", "backward") else others)[cell.dtype] += cell.flops
        others[cell.dtype] -= cell.skipped

    def seconds(flops: Counter[str]) -> float | None:
        found = 0.0
        for dtype, spent in flops.items():
            at_peak = per_second(amount=abs(spent), seconds=peak_of(dtype)) if spent else 0.0
            if at_peak is None:
                return None
            found += math.copysign(at_peak, spent)
        return mean(total=found, steps=counted_steps)

    return SecondsAtPeak(model=seconds(model), others=seconds(others))


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
    """The account of one step, a *step_word* for users; None if no step was timed.

    *memory_sec* is what moving the bytes of all operators that are not matmul-like takes at the bandwidth of the
    device's memory, and *own_sec* what the profiler's window took beyond the steps in it.
    """
    if timing is None or timing.global_step.typical_sec <= 0:
        return None
    filling = None if traced is None else traced.filling
    times_ns: dict[BudgetKey, int | None] = {**dict.fromkeys(_ROWS), **_spent_ns(timing.parts, filling)}
    notes = []
    if filling is None:
        times_ns |= dict.fromkeys(_OF_TRACE)
        notes.append(
            "Other operators, communication and idle are n/a without a trace that shows what filled the phases."
        )
    elif traced is not None and not traced.like_counted:
        notes.append(
            f"What filled each part is that of {step_word} {traced.index}, whose shapes are not those of all timed "
            f"{step_word}s."
        )
    if at_peak.model is not None:
        model_ns, others_ns = _ns(at_peak.model), _ns(at_peak.others or 0.0)
        left_ns = (times_ns["compute"] or 0) - model_ns - others_ns
        if left_ns < 0:
            notes.append("FLOPs at the peak are n/a: matmul-like operators took less time than that.")
        else:
            times_ns |= {"model": model_ns, "compute": left_ns}
            times_ns["other_flops"] = None if at_peak.others is None else others_ns
            if at_peak.others is None:
                notes.append(
                    "Recomputed FLOPs and the optimizer's at the peak are n/a: the peak of a dtype is unknown."
                )
            if lower_bound:
                notes.append(
                    "The FLOPs are lower bounds, and so are the rows at the peak; the row after is at most that."
                )
    operators_ns = times_ns["operators"]
    memory_ns = None if memory_sec is None or operators_ns is None else min(operators_ns, _ns(memory_sec))
    budget = Budget(
        wall_ns=sum(ns or 0 for ns in times_ns.values()),
        rows=tuple(
            BudgetRow(key=key, time_ns=times_ns[key], memory_ns=memory_ns if key == "operators" else None, advice=())
            for key in _ROWS
        ),
        traced_step=None if filling is None or traced is None else traced.index,
        run=_run(timing, own_sec=own_sec),
        notes=tuple(notes),
    )
    return link_advice(budget, advice)


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _spent_ns(parts: Iterable[PartTiming], filling: StepFilling | None) -> Counter[BudgetKey]:
    """Nanoseconds of each row before any peak; what no trace divides is computing."""
    spent = Counter[BudgetKey](dict.fromkeys(_ROWS[2:], 0))
    fillings = {} if filling is None else {one.name: one for one in filling.parts}
    for part in parts:
        if _NO_COMPUTE.issuperset(part.phases):
            spent["data" if _DATA.issuperset(part.phases) else "other"] += _ns(part.typical_sec)
            continue
        inside = [fillings[phase] for phase in part.phases if phase in fillings]
        weights: dict[BudgetKey, int] = {
            "operators": sum(one.operators_ns for one in inside),
            "communication": sum(one.communication_ns for one in inside),
            "idle": sum(one.idle_ns + one.copies_ns for one in inside),
            "compute": sum(one.matmul_ns for one in inside),  # the last, which has all where nothing is known
        }
        spent.update(dict(zip(weights, apportioned(_ns(part.typical_sec), list(weights.values())), strict=True)))
    return spent


def link_advice(budget: Budget, advice: Sequence[Advice]) -> Budget:
    """*budget* whose rows name the rules of *advice* that lower them."""
    inside = [row.key for row in budget.rows if row.time_ns is None and row.key in _OF_TRACE]

    def rules(row: BudgetRow) -> tuple[str, ...]:
        if not row.time_ns:
            return ()
        keys = {row.key, *(inside if row.key == "compute" else ())}
        return tuple(one.rule for one in advice if keys & ROWS_OF_RULE[one.rule])

    return replace(budget, rows=tuple(replace(row, advice=rules(row)) for row in budget.rows))


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
    label = "the profiler: reading the trace and making this report"
    share = RunShare(key="report", label=label, time_ns=_ns(seconds))
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
    return tuple(RunShare(key=key, label=label, time_ns=_ns(seconds)) for key, label, seconds in times)
