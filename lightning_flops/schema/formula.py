"""The FLOPs of a model as a formula of its batch's sizes, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_flops.records import PhaseFlops
from lightning_flops.schema import codec


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaSize:
    """A size that the FLOPs depend on."""

    name: str  #: Such as ``batch`` or ``sequence``.
    least: int  #: The least that was counted.
    greatest: int  #: The greatest that was counted.
    apart: int  #: Greatest common distance of the counted values; sizes between them are not covered by the formula.


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaTerm:
    """One product of a bucket's sum: numerator / denominator x each size to its power."""

    bucket: str  #: The phase whose sum it is part of.
    dtype: str  #: Dtype of the arithmetic.
    numerator: int  #: Numerator of the exact coefficient.
    denominator: int  #: Denominator of the coefficient, mostly 1.
    powers: Mapping[str, int]  #: Power of each size in the product.


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedFlops(PhaseFlops):
    """FLOPs of one forward and backward on a batch of these sizes, exact; a multiply-add is two."""

    sizes: Mapping[str, int]  #: Sizes of the batch by name.
    source: Literal["formula", "counted"]  #: Whether the formula gave them, or a count of these very sizes.

    @property
    def model_flops(self) -> int:
        """Forward and backward."""
        return self.forward + self.backward

    @property
    def hardware_flops(self) -> int:
        """Forward, backward and recompute."""
        return self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class FormulaReport(codec.Json):
    """The formula, what it rests on, and the FLOPs of the sizes that were asked for."""

    VERSION = 4
    schema_version: int = VERSION  #: Version of the JSON; another one has other fields.
    reason: str | None  #: Why there is no formula, and every size is counted by itself; None if there is one.
    sizes: tuple[FormulaSize, ...]  #: Empty without a formula.
    #: By bucket and dtype, whose FLOPs are the sum of their terms. Empty without a formula.
    terms: tuple[FormulaTerm, ...]
    counted: int  #: Batches of different sizes that were counted.
    checks: int  #: Of these, how many more than the formula needs to be determined.
    lower_bound: bool  #: An operator that may have FLOPs could not be counted.
    asked: tuple[SizedFlops, ...]  #: The latest sizes that were asked for, each once.
