"""Two runs compared: every nanosecond of the difference of their steps with its cause, and its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_flops.schema import shown

SCHEMA_VERSION = 3
"""Version of the JSON that ``Comparison.to_json`` writes; it goes up whenever a field changes."""

CONFIDENCE = 0.99
"""Of noise intervals. A step has some thirty parts and kernels: at 95% one or two would seem to differ in any runs."""

Detail = Literal["flops", "bytes", "modules", "data", "communication", "idle", "loop"]
"""What work and waiting consist of. Work: FLOPs changed, bytes changed, modules are new or gone. Waiting: for the next
batch; for communication that no computation hides, and a pipeline's bubble; of the device, for the host that prepares;
for the loop, which moves batches, logs, and calls callbacks and schedulers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Causes:
    """The time of something in run A and in run B, and what the difference B - A comes from.

    ``work_ns + efficiency_ns + waiting_ns = difference_ns = b_ns - a_ns``, to the nanosecond. Below zero: less work,
    the same work faster, less waiting.
    """

    a_ns: int
    """Of one step of A."""
    b_ns: int
    """Of one step of B."""
    difference_ns: int
    """B - A."""
    work_ns: int
    """More work."""
    efficiency_ns: int
    """The same work, slower."""
    waiting_ns: int
    """More waiting."""
    details: Mapping[Detail, int]
    """What work and waiting consist of, without what is zero."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseInterval:
    """Between which values a difference of mean steps would lie if both runs went on as they did."""

    low_ns: int
    """The lower end."""
    high_ns: int
    """The upper end."""
    beyond: bool
    """Zero is outside of it: the difference is more than the spread of the timed steps explains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartDifference:
    """The whole step, or one part of it, in both runs."""

    name: str
    """Name as in ``PartTiming``; parts that one of the runs cannot separate stand together."""
    causes: Causes
    """Means over the timed steps, and the difference by cause."""
    difference: NoiseInterval | None
    """Of the whole difference. None if single steps are not known or are too few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleSide:
    """One module in one of the runs; counts are of one step, without the modules below it."""

    name: str
    """Qualified name; the root is ``""``, what no module owns ``(outside)``."""
    flops: int
    """Forward, backward and recomputation."""
    bytes: int
    """Bytes read and written by its operators."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleDifference:
    """One module in both runs, or in one of them."""

    a: ModuleSide | None
    """In run A; None if it is new in B."""
    b: ModuleSide | None
    """In run B, under the same name, or another with the same tree of classes, settings, parameters and FLOPs; None if
    it is gone."""
    own: Causes
    """Its time, forward and backward, without the modules below it; all zero where times of modules are not known."""
    noise_ns: int | None
    """How far its own difference may be chance: four standard errors of its own times over the traced steps of both
    runs, and what traced forwards and backwards took beyond the timed ones if that is over twice or under half. None if
    fewer than four steps were traced."""
    beyond_noise: bool | None
    """Whether the own difference is more than that."""

    @property
    def other_counts(self) -> bool:
        """Whether its FLOPs or bytes differ, or only one of the runs has it: evidence that needs no times."""
        return self.a is None or self.b is None or (self.a.flops, self.a.bytes) != (self.b.flops, self.b.bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingDifference:
    """What is set up differently in the two runs, as text."""

    name: str
    """Where it stands in a profile: ``context.world_size``."""
    a: str
    """In run A."""
    b: str
    """In run B."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FigureDifference:
    """One figure of ``Profile.summary()`` in both runs."""

    name: str
    """As there."""
    a: float | None
    """In run A; None if it is not known there."""
    b: float | None
    """In run B."""
    ratio: float | None
    """B / A; 1 if both are 0. None if it is not known, or only A is 0."""
    ratio_low: float | None
    """Lower end of the ratio's noise; the ratio itself for a count, which has none. None if it is not known."""
    ratio_high: float | None
    """Upper end."""
    reason: str
    """Why the ratio or its noise is None; empty if neither is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """One of the two runs."""

    source: str
    """File, folder or URL it was read from, or ``A`` and ``B``."""
    about: str
    """Its model, device, counted and timed steps, in words."""
    starved: str
    """What was measured if it had too little processor time, so that its times say little; empty if it had enough."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison(shown.Shown):
    """Run B held against run A; immutable."""

    VERSION = SCHEMA_VERSION
    schema_version: int
    """Of the JSON: ``SCHEMA_VERSION``."""
    a: ComparedRun
    """What is compared with."""
    b: ComparedRun
    """What is compared."""
    settings: tuple[SettingDifference, ...]
    """Versions, device, ranks, batch and settings that differ."""
    figures: tuple[FigureDifference, ...]
    """Each number of ``Profile.summary()``."""
    step: PartDifference
    """The whole step, ``global step``, or ``batch`` in runs that do not train: the sum of its parts."""
    parts: tuple[PartDifference, ...]
    """Every part of a step."""
    modules: tuple[ModuleDifference, ...]
    """In B's tree order, the root first, each module that is gone behind those of B; last what no module owns."""
    notes: tuple[str, ...]
    """What is not known, or was joined to something else, in sentences."""

    def to_html(self) -> str:
        """The comparison as a page: one HTML file with everything in it, which needs no network and opens from disk."""
        return str(shown.above("report.html_page").render_comparison_page(self))
