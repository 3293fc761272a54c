"""The budget of a step: one account of where peak x time went, whose rows add up to the step's wall time.

The times of a step's parts are those of a typical step. What filled each part is known of the traced step alone, so
its shares divide them. What neither tells is not guessed: such rows are joined, and the budget says so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import get_args

from lightning_flops.analysis.advice import ROWS_OF_RULE
from lightning_flops.analysis.rates import mean, peak_seconds
from lightning_flops.records import OperatorCell, TimePhase, WindowRecord
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.budget import Budget, BudgetKey, BudgetRow, RunKey, RunShare
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import PartTiming, TimingProfile
from lightning_flops.schema.trace import PartFilling, TracedStep

_NS_PER_SEC = 10**9

_ORDER: tuple[BudgetKey, ...] = get_args(BudgetKey)

_OWN_ROW: Mapping[str, BudgetKey] = {
    "data_wait": "data_wait",
    "transfer": "transfer",
    "bubble": "bubble",
    "other": "other",
}
"""Parts of a step that are rows of their own, or whose idle time is."""

_OF_COMPUTE: tuple[BudgetKey, ...] = ("matmul", "other_operators", "communication", "copies", "idle")
"""The rows that a trace divides a part into."""

_WHOLE = frozenset(("data_wait", "transfer", "bubble"))
"""Parts that are one row, whatever filled them."""

_LABELS: Mapping[BudgetKey, str] = {
    "model": "useful model FLOPs at the peak (this step's MFU)",
    "padding": "model FLOPs of padding at the peak (of no use)",
    "recompute": "recomputed FLOPs at the peak",
    "optimizer_flops": "the optimizer's FLOPs at the peak",
    "skipped": "less masked attention's FLOPs that are counted and not executed",
    "matmul": "matmul-like operators",
    "other_operators": "other operators",
    "operators": "operators, matmul-like and others",
    "communication": "communication that nothing hides",
    "copies": "copies that nothing hides",
    "idle": "device idle while the host prepares",
    "compute": "forward, backward and optimizer",
    "bubble": "pipeline bubble",
    "data_wait": "data wait",
    "transfer": "transfer of the batch",
    "other": "other: callbacks, logging, schedulers",
}

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
    recompute: float | None
    optimizer: float | None
    skipped: float | None
    padding: float | None = None
    """Of ``model``; None if it is not known what went into padding."""


def seconds_at_peak(
    cells: Iterable[OperatorCell],
    *,
    peak_of: Callable[[str], float | None],
    counted_steps: int,
    without_padding: Mapping[str, int] | None = None,
) -> SecondsAtPeak:
    """The FLOPs of *cells*, of *counted_steps* together, at the peaks that *peak_of* knows by dtype.

    *without_padding* are the model FLOPs by dtype that these steps would have spent without padding; None if that is
    not known.
    """
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

    found = SecondsAtPeak(**{name: seconds(flops) for name, flops in sums.items()})
    useful = None if without_padding is None else seconds(without_padding)
    if found.model is None or useful is None or not 0 <= useful <= found.model:
        return found
    return replace(found, padding=found.model - useful)


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
    fillings = {} if filling is None else {one.name: one for one in filling.parts}
    spent, joined = _spent(timing.parts, fillings)
    unfilled = [part.name for part in timing.parts if part.typical_sec > 0 and _is_unfilled(part, fillings)]
    if filling is None:
        why = "no trace shows what filled forward, backward and optimizer"
        notes.append(f"Joined, as {why}: operators slower than the peak, other operators, communication, copies, idle.")
    elif traced is not None and not traced.like_counted:
        notes.append(
            f"What filled each part is that of {step_word} {traced.index}, whose shapes are not those of all timed "
            f"{step_word}s."
        )
    knows_peak = at_peak.model is not None
    beyond_peak: BudgetKey | None = None
    if knows_peak:
        account = _below_peak(spent, joined, at_peak, notes)
        knows_peak = account is not None
        if account is not None:
            spent, beyond_peak = account
    if lower_bound and knows_peak:
        notes.append("The FLOPs are lower bounds, and so are the rows at the peak; the row after them is at most that.")
    on_host = filling is not None and filling.clock == "host"
    wall_ns, times_ns = _whole_nanoseconds(spent)
    rows = tuple(
        BudgetRow(
            key=key,
            label=_label(
                key,
                joined.get(key, ()),
                unfilled=unfilled,
                beyond_peak=key == beyond_peak,
                on_host=on_host,
                at_peak=at_peak,
            ),
            time_ns=times_ns[key],
            joined=joined.get(key, ()),
            memory_ns=None
            if key != "other_operators" or memory_sec is None
            else min(times_ns[key], round(memory_sec * _NS_PER_SEC)),
            advice=(),
        )
        for key in _ORDER
        if times_ns.get(key) or (key == "model" and knows_peak)
    )
    budget = Budget(
        wall_ns=wall_ns,
        rows=rows,
        traced_step=None if filling is None or traced is None else traced.index,
        knows_peak=knows_peak,
        run=_run(timing, own_sec=own_sec),
        notes=tuple(notes),
    )
    return link_advice(budget, advice)


def link_advice(budget: Budget, advice: Sequence[Advice]) -> Budget:
    """*budget* whose rows name the rules of *advice* that lower them."""

    def rules(row: BudgetRow) -> tuple[str, ...]:
        keys = {row.key, *row.joined}
        found = (one.rule for one in advice if keys & ROWS_OF_RULE[one.rule])
        return tuple(rule for rule in found if row.key != "model" or rule != "padding" or not has_padding)

    has_padding = any(row.key == "padding" for row in budget.rows)

    return replace(budget, rows=tuple(replace(row, advice=rules(row)) for row in budget.rows))


_Spent = dict[BudgetKey, Fraction]
_Joined = dict[BudgetKey, tuple[BudgetKey, ...]]


def _spent(parts: Iterable[PartTiming], fillings: Mapping[str, PartFilling]) -> tuple[_Spent, _Joined]:
    """Seconds of each row before any peak, and which rows stand for several."""
    spent: _Spent = defaultdict(Fraction)
    joined: _Joined = {}
    for part in parts:
        phases, seconds = part.phases, Fraction(part.typical_sec)
        weights = _weights_of_part(phases, fillings)
        whole = sum(weights.values())
        if len(phases) == 1 and phases[0] in _WHOLE:
            spent[_OWN_ROW[phases[0]]] += seconds
        elif whole:
            for key, weight in weights.items():
                spent[key] += seconds * weight / whole
        elif all(phase in _OWN_ROW for phase in phases):
            spent["other"] += seconds
            if len(phases) > 1 and seconds:
                joined["other"] = tuple(_OWN_ROW[phase] for phase in phases)
        elif seconds:
            spent["compute"] += seconds
            inside = tuple(_OWN_ROW[phase] for phase in phases if phase in _OWN_ROW)
            joined["compute"] = tuple(dict.fromkeys((*joined.get("compute", ()), *_OF_COMPUTE, *inside)))
    return spent, joined


def _is_unfilled(part: PartTiming, fillings: Mapping[str, PartFilling]) -> bool:
    """Whether nothing tells what filled *part*."""
    phases = part.phases
    if all(phase in _OWN_ROW for phase in phases):
        return False
    return not sum(_weights_of_part(phases, fillings).values())


def _weights_of_part(phases: Iterable[str], fillings: Mapping[str, PartFilling]) -> dict[BudgetKey, int]:
    """Nanoseconds of the traced *phases* together, by row."""
    weights: defaultdict[BudgetKey, int] = defaultdict(int)
    for phase in phases:
        if phase in fillings:
            for key, weight in _weights(phase, fillings[phase]).items():
                weights[key] += weight
    return weights


def _weights(phase: str, filling: PartFilling) -> dict[BudgetKey, int]:
    """Nanoseconds of the traced part by row."""
    if phase in _WHOLE:
        whole = filling.matmul_ns + filling.operators_ns + filling.copies_ns + filling.communication_ns
        return {_OWN_ROW[phase]: whole + filling.idle_ns}
    return {
        "matmul": filling.matmul_ns,
        "other_operators": filling.operators_ns,
        "communication": filling.communication_ns,
        "copies": filling.copies_ns,
        "other" if phase == "other" else "idle": filling.idle_ns,
    }


def _below_peak(
    spent: _Spent, joined: _Joined, at_peak: SecondsAtPeak, notes: list[str]
) -> tuple[_Spent, BudgetKey] | None:
    """*spent* with the rows at the peak, and the row out of whose time they are taken.

    Where the traced step gives matmul-like operators less time than their FLOPs take at the peak, their row is joined
    with the next. None if even all of forward, backward and optimizer is too short: then the peak is wrong.
    """
    amounts: dict[BudgetKey, float | None] = {
        "model": at_peak.model,
        "padding": 0.0 if at_peak.padding is None else at_peak.padding,
        "recompute": at_peak.recompute,
        "optimizer_flops": at_peak.optimizer,
        "skipped": None if at_peak.skipped is None else -at_peak.skipped,
    }
    rows: _Spent = {key: Fraction(seconds) for key, seconds in amounts.items() if seconds is not None}
    rows["model"] -= rows["padding"]
    unknown = [key for key, seconds in amounts.items() if seconds is None]
    whole = sum(rows.values(), Fraction())
    for key, from_rows in _JOINS:
        available = sum((spent.get(one, Fraction()) for one in from_rows), Fraction())
        if available >= whole:
            found = {**{one: seconds for one, seconds in spent.items() if one not in from_rows}, **rows}
            found[key] = available - whole
            if key != "matmul":
                if "compute" not in spent:
                    notes.append(
                        "Joined, as the traced step gives matmul-like operators less time than their FLOPs take at the "
                        f"peak: {', '.join(_LABELS[one] for one in from_rows if spent.get(one))}."
                    )
                joined[key] = tuple(
                    dict.fromkeys(one for row in from_rows if spent.get(row) for one in joined.get(row, (row,)))
                )
            if unknown:
                joined[key] = (*(joined.get(key) or (key,)), *unknown)
            return found, key
    notes.append(
        "The rows are times only: the FLOPs would take longer at the peak than they did, so the peak is wrong."
    )
    return None


_JOINS: Sequence[tuple[BudgetKey, tuple[BudgetKey, ...]]] = (
    ("matmul", ("matmul",)),
    ("operators", ("matmul", "other_operators")),
    ("compute", (*_OF_COMPUTE, "compute")),
)
"""From which rows those at the peak are taken, and which row the rest stands in; the first that has enough time."""

assert set(_OWN_ROW) < set(get_args(TimePhase)), "parts of a step"


def _whole_nanoseconds(spent: _Spent) -> tuple[int, dict[BudgetKey, int]]:
    """The sum, and each row: rounded as a running sum, so that the rows add up to it."""
    total, before = Fraction(), 0
    times_ns: dict[BudgetKey, int] = {}
    for key in _ORDER:
        total += spent.get(key, Fraction())
        reached = round(total * _NS_PER_SEC)
        times_ns[key] = reached - before
        before = reached
    return before, times_ns


def _label(
    key: BudgetKey,
    joined: Sequence[BudgetKey],
    *,
    unfilled: Sequence[str],
    beyond_peak: bool,
    on_host: bool,
    at_peak: SecondsAtPeak,
) -> str:
    if key == "skipped" and (at_peak.skipped or 0.0) < 0:
        return "causal attention's FLOPs that are executed and not counted"
    if key == "idle" and on_host:
        return "host between operators (Python, dispatch)"
    if key == "other" and joined:
        return ", ".join(_LABELS[one] for one in joined)
    label = _LABELS[key]
    if key == "model" and at_peak.padding:
        label = "useful model FLOPs at the peak, without padding"
    if key == "compute" and unfilled and not beyond_peak:
        label = " and ".join(filter(None, (", ".join(unfilled[:-1]), unfilled[-1])))
    if beyond_peak:
        label += " slower than the peak" if key == "matmul" else ", beyond their FLOPs at the peak"
    unknown = [_LABELS[one] for one in joined if one in ("recompute", "optimizer_flops", "skipped")]
    return f"{label}, with {', '.join(unknown)}" if unknown else label


def own_seconds(window: WindowRecord, timing: TimingProfile | None) -> float:
    """Wall seconds by which batches took longer for being counted or traced; 0 where nothing was timed to compare."""
    batches = sum(step.micro_steps for step in window.timed_steps)
    if timing is None or not batches:
        return 0.0
    usual_sec = timing.global_step_sec * timing.timed_steps / batches
    return max(0.0, window.slowed_sec - window.slowed_batches * usual_sec)


def with_report_sec(profile: Profile, seconds: float) -> Profile:
    """*profile* whose budget has, beside the run, the wall seconds that making the report took."""
    if profile.budget is None:
        return profile
    share = RunShare(
        key="report",
        label="the profiler: reading the trace and making this report",
        time_ns=round(seconds * _NS_PER_SEC),
    )
    return replace(profile, budget=replace(profile.budget, run=(*profile.budget.run, share)))


def _run(timing: TimingProfile, *, own_sec: float) -> tuple[RunShare, ...]:
    """The timed steps, what came between them, and what the profiler took beside them."""
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
