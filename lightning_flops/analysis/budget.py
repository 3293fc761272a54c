"""The breakdown of a step: one account of where peak x time went, in eight rows that add up to the step's wall time.

The times of a step's parts are those of a typical step. What filled each part is known of the traced step alone. In it
a device computes as long as in any other step of its kind, but waits longer for the host, which torch.profiler slows:
the device is idle for what its work leaves of the typical part. On the host, and for communication, which waits for
other hosts, shares of the traced part divide the typical one. What neither shows is not guessed: such rows are n/a, and
their time stands in ``compute``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import get_args

from lightning_flops.analysis.rates import apportioned
from lightning_flops.schema.step import Budget, BudgetKey, PartTiming, TimingProfile
from lightning_flops.schema.trace import PartFilling, TracedStep

_ROWS: tuple[BudgetKey, ...] = get_args(BudgetKey)
_DATA = {"data_wait", "transfer"}
_NO_COMPUTE = {*_DATA, "bubble", "other"}
"""Phases of a step in which the model does nothing."""
_OF_TRACE: tuple[BudgetKey, ...] = ("operators", "communication", "idle")
"""The rows that a trace divides from ``compute``."""


def build_budget(
    *,
    timing: TimingProfile | None,
    traced: TracedStep | None,
    peak_sec: tuple[float | None, float | None],
    lower_bound: bool,
) -> Budget | None:
    """The account of one step; None if no step was timed.

    *peak_sec* is what the step's executed model FLOPs, and all its executed FLOPs, take at the device's peaks.
    """
    if timing is None or timing.global_step.typical_sec <= 0:
        return None
    filling = None if traced is None else traced.filling
    spent_ns = _spent_ns(timing.parts, filling or {}, on_device=traced is not None and traced.shows_device)
    times_ns: dict[BudgetKey, int | None] = {**dict.fromkeys(_ROWS), **spent_ns}
    if not _sees_data(timing.parts):
        times_ns["data"] = None
    notes = []
    if filling is None:
        times_ns |= dict.fromkeys(_OF_TRACE)
        notes.append(
            "Other operators, communication and idle are n/a without a trace that shows what filled the phases."
        )
    model_sec, executed_sec = peak_sec
    if model_sec is not None and executed_sec is not None:
        model_ns, others_ns = _ns(model_sec), _ns(executed_sec - model_sec)
        left_ns = (times_ns["compute"] or 0) - model_ns - others_ns
        if left_ns < 0 and executed_sec <= timing.global_step.typical_sec:  # else why MFU is n/a says it
            notes.append("FLOPs at the peak are n/a: matmul-like operators took less time than that.")
        elif left_ns >= 0:
            times_ns |= {"model": model_ns, "other_flops": others_ns, "compute": left_ns}
            if lower_bound:
                notes.append(
                    "The FLOPs are lower bounds, and so are the rows at the peak; the row after is at most that."
                )
    return Budget(wall_ns=sum(ns or 0 for ns in times_ns.values()), rows_ns=times_ns, notes=tuple(notes))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _sees_data(parts: Iterable[PartTiming]) -> bool:
    """Whether the wait for data is apart from what is no such wait; if not, it stands in ``other``."""
    return any("data_wait" in part.phases and _DATA.issuperset(part.phases) for part in parts)


def _spent_ns(
    parts: Sequence[PartTiming], fillings: Mapping[str, PartFilling], *, on_device: bool
) -> Counter[BudgetKey]:
    """Nanoseconds of each row before any peak; what no trace divides is computing."""
    spent, of_data = Counter[BudgetKey](dict.fromkeys(_ROWS[2:], 0)), _DATA if _sees_data(parts) else set[str]()
    for part in parts:
        if _NO_COMPUTE.issuperset(part.phases):
            spent["data" if of_data.issuperset(part.phases) else "other"] += _ns(part.typical_sec)
            continue
        inside = [fillings[phase] for phase in part.phases if phase in fillings]
        weights: dict[BudgetKey, int] = {
            "operators": sum(one.operators_ns for one in inside),
            "communication": sum(one.communication_ns for one in inside),
            "idle": sum(one.idle_ns + one.copies_ns for one in inside),
            "compute": sum(one.matmul_ns for one in inside),  # the last, which has all where nothing is known
        }
        typical_ns = _ns(part.typical_sec)
        if on_device and (traced_ns := sum(weights.values())):
            weights["communication"] = weights["communication"] * typical_ns // traced_ns
            weights["idle"] = max(0, typical_ns + weights["idle"] - sum(weights.values()))
        spent.update(dict(zip(weights, apportioned(typical_ns, list(weights.values())), strict=True)))
    return spent
