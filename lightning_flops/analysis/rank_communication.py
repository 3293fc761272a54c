"""Communication in the traced step of every rank: what was hidden, what was transfer and what was waiting."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from lightning_flops.analysis.collectives import TracedRank, compare
from lightning_flops.analysis.rates import sum_if_all_known
from lightning_flops.analysis.spreads import spread_over
from lightning_flops.schema.communication import RankCollectiveRow, RankRow
from lightning_flops.schema.rank_record import RankRecord
from lightning_flops.schema.ranks import RanksCollective, RanksCommunication, RankSpread

_US_PER_SEC = 1e6


def compare_communication(records: Iterable[RankRecord]) -> RanksCommunication | None:
    """Communication of the ranks of *records*; None if fewer than two have traces that show any."""
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

    return RanksCollective(
        name=name,
        ranks=len(found),
        calls=sum(one.calls for _, one in found),
        matched_calls=sum(one.matched_calls for _, one in found),
        bytes=sum_if_all_known(one.bytes for _, one in found),
        transfer_sec=over_ranks(lambda one: one.transfer_us),
        wait_sec=over_ranks(lambda one: one.wait_us),
    )


def _rank(row: RankRow) -> int:
    assert row.rank is not None, "a record names its rank"
    return row.rank
