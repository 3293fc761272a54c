"""The budget of a step: where peak x time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BudgetKey = Literal[
    "model",
    "padding",
    "recompute",
    "optimizer_flops",
    "skipped",
    "matmul",
    "other_operators",
    "operators",
    "communication",
    "copies",
    "idle",
    "compute",
    "bubble",
    "data_wait",
    "transfer",
    "other",
]
"""What a row of the budget is of."""

RunKey = Literal["training", "stalls", "validation", "checkpoint", "between_epochs", "profiler", "report", "elsewhere"]
"""What the run did while the profiler's window was open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """One row of the budget: so much of a step's wall time."""

    key: BudgetKey
    """``model``: useful model FLOPs at the peak; its share of a typical step is that step's MFU. ``padding``:
    what of the model FLOPs was spent on padding, where that is known: then ``model`` is without it.
    ``recompute``, ``optimizer_flops``: these FLOPs at the peak. ``skipped``: below zero, for FLOPs in
    ``model`` that fused masked attention does not execute; above zero where ``causal_attention="half"`` counts
    fewer than are executed. ``matmul``: what matmul-like operators take beyond the rows above it, all of their time
    if the peak is not known. ``other_operators``: all others. ``operators``: both, where they cannot be told apart.
    ``communication``, ``copies``: what nothing hides. ``idle``: nothing runs, while the host prepares. ``compute``:
    all of forward, backward and optimizer that cannot be told apart. ``bubble``, ``data_wait``, ``transfer``,
    ``other``: these parts of a step."""
    label: str
    """Name of the row for people, for this device."""
    time_ns: int
    """Nanoseconds of one step. Below zero in ``skipped`` alone; the rows add up to the step."""
    joined: tuple[BudgetKey, ...]
    """The rows that are in this one because nothing tells them apart; empty for a row that stands for itself."""
    memory_ns: int | None
    """At most so much of ``other_operators`` is explained by moving their bytes at the memory's bandwidth. None
    in other rows, and where the bandwidth is not known."""
    advice: tuple[str, ...]
    """Rules of the advice in this profile that lower this row, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShare:
    """What the run did in a part of its wall time, while the profiler's window was open."""

    key: RunKey
    """``training``: the timed steps, without ``stalls``: what some took beyond a typical one.
    ``validation``, ``checkpoint``, ``between_epochs``, ``elsewhere`` (what the user
    named): between these. ``profiler``: by how much the counted and the traced steps took longer than as many others.
    ``report``: reading the trace and making the report; writing it is not in it."""
    label: str
    """Name for people."""
    time_ns: int
    """All of it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One account of a typical step of this rank: its rows add up to ``wall_ns`` exactly."""

    wall_ns: int
    """Wall time of a typical step: ``timing.global_step.typical_sec``, to the nearest nanosecond."""
    rows: tuple[BudgetRow, ...]
    """The FLOPs at the peak first. Rows that took no time are left out."""
    traced_step: int | None
    """Index of the step whose trace divides the phases; their times are those of the timed steps. None without one."""
    knows_peak: bool
    """Whether the peak is known; if not, the rows are times only."""
    run: tuple[RunShare, ...]
    """Beside the step: the run while the window was open."""
    notes: tuple[str, ...]
    """What was joined, and why, in sentences."""
