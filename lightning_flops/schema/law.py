"""The FLOPs of a model as a function of its batch's sizes, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_flops.schema import dataclass_json

SCHEMA_VERSION = 1
"""Version of the JSON that ``LawReport.to_json`` writes; it goes up whenever a field changes."""


NO_STEP_TIMED = "no step was timed"
NO_OTHER_SIZE = "no counted step had another size"
"""Why a run has no law, if its sizes gave none to look for."""

WHOLE = "F"
"""The variable of a run's law that is 1 for a batch without padding, and 0 for one with padding."""


REAL_TOKENS, SUM_OF_SQUARES, LONGEST_LENGTH, TRAINED_TOKENS = "R", "Q", "L", "N"
"""The variables of a run's law that tell of the sequences in a batch: how many tokens they have, the squares of their
lengths added up, the longest length, and how many tokens are trained on. Those that FLOPs do not depend on are left
out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LawVariable:
    """A size that the law is a function of."""

    name: str
    """Such as ``batch`` or ``sequence``."""
    least: int
    """The least that was counted."""
    greatest: int
    """The greatest that was counted."""
    apart: int
    """What all differences between the counted sizes are multiples of."""
    between: bool
    """Whether the law is used between the counted sizes, and not only for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LawTerm:
    """One product of a sum: numerator / denominator x each variable to its power."""

    numerator: int
    """Of the exact coefficient."""
    denominator: int
    """Mostly 1."""
    powers: Mapping[str, int]
    """By variable; one that is not in the term is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LawSum:
    """FLOPs of one bucket in one dtype."""

    bucket: str
    """``forward``, ``backward``, ``recompute``, ``optimizer``, or ``causal_skipped``: what fused causal attention does
    not execute of the others."""
    dtype: str
    """Of the arithmetic."""
    terms: tuple[LawTerm, ...]
    """Their sum is the bucket's FLOPs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedFlops:
    """FLOPs of one forward and backward on a batch of these sizes, exact; a multiply-add is two."""

    sizes: Mapping[str, int]
    """By variable."""
    forward: int
    """Of the forward pass."""
    backward: int
    """Of what autograd runs."""
    recompute: int
    """Spent a second time: activation checkpointing, and what fused attention's backward repeats."""
    optimizer: int
    """Always 0: no optimizer runs."""
    causal_skipped: int
    """Of the others, what fused causal attention does not execute."""
    source: Literal["law", "counted"]
    """Whether the law gave them, or they were counted for these very sizes."""

    @property
    def model_flops(self) -> int:
        """Forward plus backward: the numerator of MFU."""
        return self.forward + self.backward

    @property
    def hardware_flops(self) -> int:
        """What the kernels execute: the numerator of HFU."""
        return self.forward + self.backward + self.recompute + self.optimizer - self.causal_skipped


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRow:
    """Steps of lengths that lie together."""

    shortest: int
    """The least length in this row."""
    longest: int
    """The greatest."""
    steps: int
    """How many there are."""
    model_flops: float
    """Mean of a step, forward and backward."""
    step_sec: float
    """Mean of a step."""
    mfu: float | None
    """Model FLOPs / peak / seconds of these steps; None if a peak is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLaw:
    """The law of the FLOPs of a run's steps."""

    variables: tuple[LawVariable, ...]
    """B counts samples; S, T, U ... are the other sizes that varied, in their order in the batch. F is 1 in a batch
    without padding and 0 in one with padding; it is there if FLOPs depend on that. If they depend on the lengths of the
    sequences in a batch, R is how many tokens these have, Q the squares of their lengths added up, and L the longest
    length: the law is used for any R and Q once enough of them were counted, and for L up to the greatest that was
    counted. If they depend on how many tokens are trained on, N is that number, up to the greatest that was counted."""
    sums: tuple[LawSum, ...]
    """FLOPs of a step of one batch; those of several batches add up."""
    counted: int
    """Steps that it rests on."""
    checks: int
    """How many of them the others foretold, to the last FLOP."""
    lengths: tuple[LengthRow, ...]
    """The steps by length, in groups of about as many steps each; without those that were counted or traced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LawReport:
    """A law, and what it was asked."""

    schema_version: int
    """Of the JSON: ``SCHEMA_VERSION``."""
    holds: bool
    """Whether there is a law."""
    reason: str | None
    """Why there is none."""
    variables: tuple[LawVariable, ...]
    """What the sums are functions of; empty without a law."""
    sums: tuple[LawSum, ...]
    """The law; empty without one."""
    counted: int
    """Batches of different sizes that were counted."""
    checks: int
    """How many of them the others foretold, to the last FLOP."""
    lower_bound: bool
    """An operator that may spend FLOPs could not be counted."""
    asked: tuple[SizedFlops, ...]
    """FLOPs for sizes that somebody wanted to know."""

    def to_json(self) -> str:
        """The report as indented JSON."""
        return dataclass_json.dump(self)

    @staticmethod
    def from_json(text: str) -> LawReport:
        """The report that ``to_json`` wrote as *text*.

        Raises:
            ProfileFormatError: *text* is no JSON, has another schema version, or a field is missing, unknown or wrong.
        """
        return dataclass_json.load(LawReport, text, version_field="schema_version", version=SCHEMA_VERSION)
