"""The breakdown of a step: where peak x time went."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

BudgetKey = Literal["model", "other_flops", "compute", "operators", "communication", "idle", "data", "other"]
"""The eight rows of the breakdown, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """One account of a typical step of this rank: its rows add up to ``wall_ns`` exactly."""

    wall_ns: int
    """Wall time of a typical step: that of its parts, each to the nearest nanosecond."""
    rows_ns: Mapping[BudgetKey, int | None]
    """Nanoseconds of a step by row; None: the peak, or what filled the phases, is not known. ``model``: model FLOPs at
    the peak; its share of a typical step is that step's MFU. ``other_flops``: recomputed FLOPs and the optimizer's at
    the peak, less what fused masked attention skips of all of them, which can be more. ``compute``: what matmul-like
    operators take beyond these two rows, all of their time if the peak is not known; without a trace all of forward,
    backward and optimizer beyond them. ``operators``: all other operators. ``communication``: what no computation
    hides. ``idle``: nothing computes, while the host prepares, or copies that nothing hides run. ``data``: wait for
    data, and transfer of the batch. ``other``: callbacks, logging, schedulers, a pipeline's bubble, and phases that
    cannot be separated from these."""
    memory_ns: int | None
    """At most so much of ``operators`` is explained by moving their bytes at the memory's bandwidth; None where the
    bandwidth is not known."""
    run_ns: Mapping[str, int]
    """What the run did while the window was open, by words for it: timed steps, what some took beyond a typical one
    (stalls), what came between them, and what the profiler took for itself."""
    notes: tuple[str, ...]
    """Why rows are not known, in sentences."""
