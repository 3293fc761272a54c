"""Communication in the traced step of every rank: what of it was hidden, what was transfer and what was waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from lightning_flops.analysis.collectives import TracedRank, compare
from lightning_flops.analysis.rank_record import RankRecord
from lightning_flops.analysis.spreads import RankSpread, spread_over
from lightning_flops.schema.trace import RankCollectiveRow, RankRow

_US_PER_SEC = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksCollective:
    """One collective on all ranks, in one step; call by call matched with the ranks that took part."""

    name: str
    """Of the collective."""
    ranks: int
    """Ranks that called it."""
    calls: int
    """Of all ranks and traced steps, added up; likewise the next two."""
    matched_calls: int
    """Calls whose counterparts are known."""
    bytes: int | None
    """None where a trace does not say."""
    transfer_sec: RankSpread | None
    """In which data can have moved: for each matched call the shortest of the ranks. None without matched calls."""
    wait_sec: RankSpread | None
    """The rest: waiting for other ranks to come."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksCommunication:
    """Computation and communication of the ranks in a traced step."""

    ranks: int
    """Ranks whose traces show communication."""
    wall_sec: RankSpread
    """Of the traced step."""
    computation_sec: RankSpread
    """In which something computed."""
    communication_sec: RankSpread
    """In which something communicated, hidden or not."""
    exposed_sec: RankSpread
    """Of it what no computation hides."""
    overlap_ratio: RankSpread | None
    """Hidden ÷ all communication; None if no rank communicated at all."""
    transfer_sec: RankSpread | None
    """Of all matched calls; they may overlap, with each other and with computation. None without matched calls."""
    wait_sec: RankSpread | None
    """The rest of the matched calls: waiting for other ranks to come."""
    collectives: tuple[RanksCollective, ...]
    """Those that the ranks spent most time in first."""
    notes: tuple[str, ...]
    """What could not be matched, in sentences."""


def compare_communication(records: Iterable[RankRecord]) -> RanksCommunication | None:
    """Communication of the ranks that *records* are of; None if fewer than two have traces that show any."""
    traced = [
        TracedRank(
            rank=record.rank,
            source=f"rank {record.rank}",
            steps=record.summary.traced_steps,
            overlap=record.summary.overlap,
            collectives=record.collectives,
        )
        for record in records
        if record.summary.overlap is not None and record.summary.traced_steps
    ]
    if len(traced) < 2:
        return None
    comparison = compare(traced)
    rows = comparison.ranks

    def over_ranks(time_us: Callable[[RankRow], float | None]) -> RankSpread | None:
        return spread_over(
            {_rank(row): value / row.steps / _US_PER_SEC for row in rows if (value := time_us(row)) is not None}
        )

    def of_each(time_us: Callable[[RankRow], float]) -> RankSpread:
        spread = over_ranks(time_us)
        assert spread is not None, "each rank has it"
        return spread

    return RanksCommunication(
        ranks=len(rows),
        wall_sec=of_each(lambda row: row.overlap.wall_us),
        computation_sec=of_each(lambda row: row.overlap.computation_us),
        communication_sec=of_each(lambda row: row.overlap.communication_us),
        exposed_sec=of_each(lambda row: row.overlap.communication_us - row.overlap.overlap_us),
        overlap_ratio=spread_over(
            {_rank(row): row.overlap.overlap_ratio for row in rows if row.overlap.overlap_ratio is not None}
        ),
        transfer_sec=over_ranks(lambda row: row.transfer_us),
        wait_sec=over_ranks(lambda row: row.wait_us),
        collectives=_collectives(rows),
        notes=comparison.notes,
    )


def _collectives(rows: Sequence[RankRow]) -> tuple[RanksCollective, ...]:
    by_name: defaultdict[str, list[tuple[RankRow, RankCollectiveRow]]] = defaultdict(list)
    for row in rows:
        for one in row.collectives:
            by_name[one.name].append((row, one))
    latency_us = {name: sum(one.latency_us for _, one in found) for name, found in by_name.items()}
    return tuple(
        _collective(name, by_name[name]) for name in sorted(by_name, key=lambda name: (-latency_us[name], name))
    )


def _collective(name: str, found: Sequence[tuple[RankRow, RankCollectiveRow]]) -> RanksCollective:
    def over_ranks(time_us: Callable[[RankCollectiveRow], float | None]) -> RankSpread | None:
        return spread_over(
            {_rank(row): value / row.steps / _US_PER_SEC for row, one in found if (value := time_us(one)) is not None}
        )

    sizes = [one.bytes for _, one in found]
    known = [size for size in sizes if size is not None]
    return RanksCollective(
        name=name,
        ranks=len(found),
        calls=sum(one.calls for _, one in found),
        matched_calls=sum(one.matched_calls for _, one in found),
        bytes=sum(known) if len(known) == len(sizes) else None,
        transfer_sec=over_ranks(lambda one: one.transfer_us),
        wait_sec=over_ranks(lambda one: one.wait_us),
    )


def _rank(row: RankRow) -> int:
    assert row.rank is not None, "a record names its rank"
    return row.rank
