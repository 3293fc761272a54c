"""Computation and communication of one rank, and of several ranks side by side, as their traces show them."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Wall time of the steps, split by computation and communication; overlapping events are merged.

    ``computation_us - overlap_us``, ``overlap_us``, ``communication_us - overlap_us`` and ``other_us`` add up to it.
    """

    wall_us: float
    """Wall time of all steps together."""
    computation_us: float
    """Kernels that do not communicate; without a device, operators on the host that neither start nor await any."""
    communication_us: float
    """Collectives and what goes from one rank to another."""
    overlap_us: float
    """Both at once."""
    other_us: float
    """Neither."""
    overlap_ratio: float | None
    """Overlap ÷ communication; None without communication."""

    @property
    def exposed_us(self) -> float:
        """Communication that no computation hides."""
        return self.communication_us - self.overlap_us


if TYPE_CHECKING:
    Integers: TypeAlias = array[int]
else:
    Integers = array  # before Python 3.12 it takes no type of its items, and JSON is read by the types of fields


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCalls:
    """The calls that one rank made of one collective in one process group and step, in the order of their starts."""

    name: str
    """Name of the collective."""
    group: str | None
    """A text that all ranks of the group share and no other group has; None if it is not known, and for what goes from
    one rank to another."""
    group_size: int | None
    """Ranks that take part; None where the trace does not say."""
    step: int | None
    """The profiler's number of the step in which they were started; None in a trace without steps."""
    calls: int
    """How often it was called."""
    bytes: int | None
    """Bytes of the larger side of each call, all calls together; None where the trace does not say."""
    total_ns: int
    """Latency of all calls together. Each rank adds up its own, so that no rank adds up those of thousands."""
    latency_ns: Integers
    """From start to end of each call, typecode ``q``; if there are fewer than *calls*, of the first calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCollectiveRow:
    """All calls of one collective on one rank, matched call by call with the ranks that took part."""

    name: str
    """Name of the collective."""
    calls: int
    """How often this rank called it."""
    matched_calls: int
    """Calls whose counterparts are in the other ranks' traces."""
    bytes: int | None
    """Bytes of the larger side of each call, summed; None where the trace does not say."""
    latency_us: float
    """From start to end, all calls together."""
    transfer_us: float | None
    """For each matched call the shortest of the ranks, summed: time in which data can have moved. None unmatched."""
    wait_us: float | None
    """The rest of the matched calls: waiting for the other ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRow:
    """One rank over its steps."""

    rank: int | None
    """Number of the rank; None where its trace does not say."""
    steps: int
    """How many steps its trace has."""
    overlap: Overlap
    """Computation and communication of the rank."""
    transfer_us: float | None
    """Time of the matched calls in which data can have moved; None without matched calls."""
    wait_us: float | None
    """Time of the matched calls in which they wait for other ranks; None without matched calls."""
    collectives: tuple[RankCollectiveRow, ...]
    """Each collective that it called."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankComparison:
    """All ranks whose traces are at hand, by rank."""

    ranks: tuple[RankRow, ...]
    """By number."""
    notes: tuple[str, ...]
    """What could not be compared, in sentences."""
