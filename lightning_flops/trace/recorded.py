"""One call of an operator, as a trace with ``record_shapes`` tells of it, and what it spent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedInputs:
    """What a trace with ``record_shapes`` says of one call's arguments; anything may stand in it."""

    dims: Sequence[Any]
    """For each argument the sizes of a tensor, or a list of such for a list of tensors; empty for all else."""
    types: Sequence[Any]
    """For each argument the dtype of a tensor as C++ names it, or what else it is; empty for None."""
    concrete: Sequence[Any] | None = None
    """Values of the arguments that are no tensors, as texts; None in files before torch 2.0."""
    strides: Sequence[Any] | None = None
    """As *dims*; None where the file has none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedCall:
    """One call of an operator in a trace."""

    operator: str
    """As the trace names it: ``aten::mm``."""
    inputs: RecordedInputs
    result: Sequence[int] | None = None
    """Sizes of what it returned, where other events of the trace tell them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWork:
    """What one recorded call spent."""

    role: Literal["counts", "free", "composite", "unread", "unknown"]
    """``counts``: its FLOPs stand here. ``free``: it has none, nor has what it called. ``composite``: it is made of the
    operators that it called. ``unread``: it has a formula, for which the file does not say enough. ``unknown``: it has
    no formula, and nothing shows that it is free."""
    operator: str = ""
    """Name as in ``OperatorCell``: ``aten.mm``."""
    dtype: str = ""
    """Of the arithmetic, as far as the tensors tell: ``float32`` where the device may have used TF32."""
    flops: int = 0
    """Model FLOPs, attention over the full score matrix; with what a composite call would spend by itself."""
    recompute: int = 0
    """FLOPs with which a fused attention's backward repeats a part of its forward."""
    skipped: int = 0
    """FLOPs of these that a kernel leaves out, because a mask rules them out."""
    bytes: int | None = None
    """Of all tensors that it reads and writes; None where the result's shape is not known."""
    heavy: bool = False
    """It may have spent FLOPs that are not counted: it takes floating-point tensors, or is named after a product."""
    reason: str = ""
    """Why it is not counted, without a full stop."""
