"""The breakdown of a step: where peak x time went."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

BudgetKey = Literal["model", "other_flops", "compute", "operators", "communication", "idle", "data", "other"]
"""The eight rows of the breakdown, in their order."""

RunKey = Literal["training", "stalls", "validation", "checkpoint", "between_epochs", "profiler", "report", "elsewhere"]
"""What the run did while the profiler's window was open."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRow:
    """One row of the breakdown: so much of a step's wall time."""

    key: BudgetKey
    """``model``: model FLOPs at the peak; its share of a typical step is that step's MFU. ``other_flops``: recomputed
    FLOPs and the optimizer's at the peak, less what fused masked attention skips of all of them. ``compute``: what
    matmul-like operators take beyond these two rows, all of their time if the peak is not known; without a trace all of
    forward, backward and optimizer beyond them. ``operators``: all other operators. ``communication``: what no
    computation hides. ``idle``: nothing computes, while the host prepares, or copies that nothing hides run.
    ``data``: wait for data, and transfer of the batch. ``other``: callbacks, logging, schedulers, a pipeline's bubble,
    and phases that cannot be separated from these."""
    time_ns: int | None
    """Nanoseconds of one step; those that are known add up to the step. None: the peak, or what filled the phases, is
    not known. Below zero in ``other_flops`` alone."""
    memory_ns: int | None
    """At most so much of ``operators`` is explained by moving their bytes at the memory's bandwidth. None in other
    rows, and where the bandwidth is not known."""
    advice: tuple[str, ...]
    """Rules of the advice in this profile that lower this row, in its order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunShare:
    """What the run did in a part of its wall time, while the profiler's window was open."""

    key: RunKey
    """``training``: the timed steps, without ``stalls``: what some took beyond a typical one.
    ``validation``, ``checkpoint``, ``between_epochs``, ``elsewhere`` (what the user named): between these.
    ``profiler``: by how much the counted and the traced steps took longer than as many others. ``report``: reading the
    trace and making the report; writing it is not in it."""
    label: str
    """Name for people."""
    time_ns: int
    """All of it together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One account of a typical step of this rank: its rows add up to ``wall_ns`` exactly."""

    wall_ns: int
    """Wall time of a typical step: that of its parts, each to the nearest nanosecond."""
    rows: tuple[BudgetRow, ...]
    """One of each key, in their order."""
    traced_step: int | None
    """Index of the step whose trace divides the phases; their times are those of the timed steps. None without one."""
    run: tuple[RunShare, ...]
    """The run while the window was open, the steps first."""
    notes: tuple[str, ...]
    """Why rows are not known, in sentences."""
