"""What filled each part of the traced steps: matmul-like operators, others, copies, communication, or nothing."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import numpy.typing as npt

from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.event_names import Kind, computes_on_host, may_use_tensor_cores, multiplies
from lightning_flops.analysis.trace.intervals import NOTHING, Intervals, subtract, union
from lightning_flops.analysis.trace.parts import pieces_of_steps
from lightning_flops.schema.trace import PartFilling, StepFilling


def step_filling(trace: Trace, *, counted: Collection[str] = ()) -> StepFilling:
    """What filled each part of the steps of *trace*, mean over the steps.

    Args:
        trace: with marks around the parts of its steps.
        counted: operators that spent FLOPs, as ``aten.mm``: they are matmul-like, whatever their names say.
    """
    pieces, count = pieces_of_steps(trace), len(trace.steps)
    matmul, operators, copies, communication = _kinds(trace, frozenset(name.replace(".", "::", 1) for name in counted))
    walls = pieces.sums_by_name(pieces.ends - pieces.starts)
    covered = NOTHING
    reached = dict.fromkeys(walls, 0)
    found: list[dict[str, int]] = []
    for moments in (matmul, operators, copies, communication):
        covered = union(covered, moments)
        sums = pieces.sums_by_name(pieces.covered_by(covered))
        # Rounded as a running sum, so that the means add up to the part's as well.
        found.append({name: round(sums[name] / count) - round(reached[name] / count) for name in walls})
        reached = sums
    return StepFilling(
        clock="device" if trace.has_device else "host",
        parts=tuple(
            PartFilling(
                name=name,
                matmul_ns=found[0][name],
                operators_ns=found[1][name],
                copies_ns=found[2][name],
                communication_ns=found[3][name],
                idle_ns=round(wall / count) - round(reached[name] / count),
            )
            for name, wall in walls.items()
        ),
    )


def _kinds(trace: Trace, counted: Collection[str]) -> tuple[Intervals, Intervals, Intervals, Intervals]:
    """The moments of matmul-like operators, of all others, of copies and of communication; they may overlap."""
    communication = trace.merged(trace.is_collective)
    matmul_names = trace.names_where(lambda name: may_use_tensor_cores(name) or name in counted)
    if not trace.has_device:
        computes = (trace.kind == Kind.OPERATOR) & trace.names_where(computes_on_host) & ~trace.is_collective
        # What a collective on the host consists of is not computation.
        operators = subtract(trace.merged(computes), communication)
        return trace.merged(computes & matmul_names), operators, NOTHING, communication
    kernels = (trace.kind == Kind.KERNEL) & ~trace.is_collective
    multiply = np.zeros(len(trace), dtype=bool)
    rows = np.flatnonzero(kernels)
    multiply[rows] = _are_matmul_like(trace, rows, matmul_names)
    copies = trace.merged((trace.kind == Kind.MEMCPY) | (trace.kind == Kind.MEMSET))
    return trace.merged(kernels & multiply), trace.merged(kernels), copies, communication


def _are_matmul_like(
    trace: Trace, rows: npt.NDArray[np.int64], matmul_names: npt.NDArray[np.bool_]
) -> npt.NDArray[np.bool_]:
    """Which kernels are: by the operator that launched each, by its own name where no operator of torch did."""
    owners = trace.links.operator_of_launch[rows]
    is_operator = trace.names_where(lambda name: name.startswith("aten::"))
    named = trace.names_where(multiplies)[rows]
    known = (owners >= 0) & (is_operator | matmul_names)[np.maximum(owners, 0)]
    return np.where(known, matmul_names[np.maximum(owners, 0)], named)
