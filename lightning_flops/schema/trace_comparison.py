"""The traces of two runs compared: what in their steps takes longer, and its JSON."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_flops.schema import codec
from lightning_flops.schema.comparison import FigureDifference, NoiseInterval

SCHEMA_VERSION = 2
"""Version of the JSON that ``TraceComparison.to_json`` writes; it goes up whenever a field changes."""

TableName = Literal["kernels", "operators", "collectives"]
"""What the rows of a table are. ``kernels`` has copies and memsets too; ``operators``: on the host, without callees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeDifference:
    """The time of something in one step of A and of B: means over the traced steps, and over the ranks."""

    name: str
    """Of what took the time."""
    a_ns: int
    """In a step of A."""
    b_ns: int
    """In a step of B."""
    difference_ns: int
    """B - A."""
    calls_a: float | None
    """How often it runs in a step of A; None for what is not called."""
    calls_b: float | None
    """In a step of B; None for what is not called."""
    noise: NoiseInterval | None
    """Of the difference. None if single steps are not known, or too few."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeTable:
    """All things of one kind that at least one of the runs has."""

    of: TableName
    """Which kind."""
    rows: tuple[TimeDifference, ...]
    """The largest difference first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTraces:
    """The traces of one of the two runs."""

    sources: tuple[str, ...]
    """Files or URLs, by rank."""
    ranks: int
    """How many of the run's ranks they are of."""
    steps: int
    """How many steps every one of them has: what is compared are the means over these."""
    marked: bool
    """False if they have no marks of steps: each is then one step as a whole."""
    device: str
    """Name of the device that ran the kernels; empty without one, or where it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceComparison(codec.Json):
    """The traces of run B held against those of run A; immutable."""

    schema_version: int
    """Of the JSON: ``SCHEMA_VERSION``."""
    kind: Literal["traces"]
    """What distinguishes its JSON from that of two profiles compared."""
    a: ComparedTraces
    """What is compared with."""
    b: ComparedTraces
    """What is compared."""
    step: TimeDifference
    """The whole step: the sum of its parts."""
    parts: tuple[TimeDifference, ...]
    """What filled the step, each moment under the first of these that ran then, as in ``StepTime``."""
    tables: tuple[TimeTable, ...]
    """By kernel, operator and collective, as far as one of the runs shows them."""
    figures: tuple[FigureDifference, ...]
    """Step time, MFU, FLOPs, waiting and memory."""
    notes: tuple[str, ...]
    """What is not known, in sentences."""
