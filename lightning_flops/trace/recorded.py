"""One call of an operator, as a trace with ``record_shapes`` has it, and its FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedInputs:
    """What a trace with ``record_shapes`` says of one call's arguments; anything may stand in it."""

    dims: Sequence[Any] = ()  #: For each argument the sizes of a tensor, or of each of a list; empty for all else.
    #: For each argument the dtype of a tensor as C++ names it, or what else it is; empty for None.
    types: Sequence[Any] = ()
    #: Values of the arguments that are no tensors, as texts; None in files before torch 2.0.
    concrete: Sequence[Any] | None = None
    strides: Sequence[Any] | None = None  #: As *dims*; None where the file has none.


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWork:
    """FLOPs of one recorded call."""

    #: ``counts``: its FLOPs stand here. ``free``: it has none, nor has what it called. ``composite``: it is made of the
    #: operators that it called. ``unread``: the file does not say enough for its formula. ``unknown``: it has none.
    role: Literal["counts", "free", "composite", "unread", "unknown"]
    operator: str = ""  #: Name as in ``OperatorCell``: ``aten.mm``.
    dtype: str = ""  #: Of the arithmetic, by the tensors: ``float32`` where the device may have used TF32.
    #: Model FLOPs, attention over the full score matrix; of a composite call those that count if no callee does.
    flops: int = 0
    recompute: int = 0  #: FLOPs with which a fused attention's backward repeats a part of its forward.
    skipped: int = 0  #: FLOPs of these that a kernel leaves out, because a mask rules them out.
    bytes: int | None = None  #: Of all tensors that it reads and writes; None where the result's shape is not known.
    #: May have FLOPs that are not counted: it takes floating-point tensors, or is named after a product.
    may_have_flops: bool = False
    reason: str = ""  #: Why it is not counted, without a full stop.
