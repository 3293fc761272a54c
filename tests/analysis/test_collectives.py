"""Calls of collectives, matched over ranks; microseconds are a thousand of the nanoseconds given."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_flops.analysis.collectives import RanksError, TracedRank, compare
from lightning_flops.schema.communication import CollectiveCalls, Overlap, RankRow

EVERYONE = "[0, 1, 2]"


def calls(
    *latency_us: int,
    name: str = "all_reduce",
    group: str | None = EVERYONE,
    step: int = 7,
    made: int | None = None,
    left_out_us: int = 0,
) -> CollectiveCalls:
    """Calls of 4 bytes each, of which the latencies are known; those of the rest come to *left_out_us*."""
    number = len(latency_us) if made is None else made
    return CollectiveCalls(
        name=name,
        group=group,
        group_size=None,
        step=step,
        calls=number,
        bytes=4 * number,
        total_ns=1000 * (sum(latency_us) + left_out_us),
        latency_ns=array("q", [1000 * one for one in latency_us]),
    )


def rank(number: int, *collectives: CollectiveCalls, computation_us: float = 100.0) -> TracedRank:
    return TracedRank(
        rank=number,
        source=f"rank {number}",
        steps=1,
        overlap=Overlap(
            wall_us=1000.0,
            computation_us=computation_us,
            communication_us=0.0,
            overlap_us=0.0,
            other_us=1000.0 - computation_us,
            overlap_ratio=None,
        ),
        collectives=collectives,
    )


def waits(rows: Sequence[RankRow]) -> list[tuple[float | None, float | None]]:
    return [(row.transfer_us, row.wait_us) for row in rows]


def test_of_each_call_the_shortest_is_the_transfer_and_the_rest_is_waiting() -> None:
    found = compare([rank(0, calls(9, 2)), rank(1, calls(4, 5)), rank(2, calls(6, 3))])
    assert waits(found.ranks) == [(4 + 2, 5 + 0), (4 + 2, 0 + 3), (4 + 2, 2 + 1)]
    assert found.notes == ()


def test_calls_beyond_those_whose_latencies_are_known_are_counted_and_not_matched() -> None:
    # Both made five calls; one tells of three and took 20 us for the others, the other tells of two.
    found = compare([rank(0, calls(9, 2, 8, made=5, left_out_us=20)), rank(1, calls(4, 5, made=5, left_out_us=30))])
    assert waits(found.ranks) == [(4 + 2, 5 + 0), (4 + 2, 0 + 3)]
    (row,) = found.ranks[0].collectives
    assert (row.calls, row.matched_calls, row.bytes, row.latency_us) == (5, 2, 20, 9 + 2 + 8 + 20)


def test_hundreds_of_ranks_are_compared_as_few_are() -> None:
    # Each takes 500 us for one of two calls, and one us more for the other than the rank before it.
    found = compare([rank(number, calls(number + 1, 500)) for number in range(300)])
    assert waits(found.ranks) == [(1 + 500, number) for number in range(300)]


def test_unequally_many_calls_are_left_alone_and_named_even_if_as_many_latencies_are_known() -> None:
    found = compare([rank(0, calls(9, 2, made=5)), rank(1, calls(4, 5, made=6))])
    assert waits(found.ranks) == [(None, None), (None, None)]
    assert found.notes == (
        "Calls of all_reduce without a counterpart in the other traces, so their waiting is not known: 11.",
    )


def test_calls_of_different_steps_are_not_matched() -> None:
    assert waits(compare([rank(0, calls(9, step=7)), rank(1, calls(4, step=8))]).ranks) == [(None, None)] * 2


def test_one_unknown_group_does_not_keep_others_from_being_matched() -> None:
    found = compare([rank(one, calls(9 - one), calls(20, name="barrier", group=None)) for one in (0, 1)])
    assert waits(found.ranks) == [(8, 1), (8, 0)]
    assert found.notes == ("Calls of barrier that do not say which ranks take part, so their waiting is not known: 2.",)


def test_two_records_of_one_rank_are_refused() -> None:
    with pytest.raises(RanksError, match="are both of rank 1"):
        compare([rank(1), rank(1)])
    with pytest.raises(RanksError, match="no trace to compare"):
        compare([])


@given(
    latencies=st.integers(1, 6).flatmap(
        lambda number: st.lists(
            st.lists(st.integers(0, 10**6), min_size=number, max_size=number), min_size=2, max_size=5
        )
    ),
    data=st.data(),
)
def test_every_rank_transfers_as_long_and_the_order_of_the_ranks_does_not_matter(
    latencies: list[list[int]], data: st.DataObject
) -> None:
    ranks = [rank(number, calls(*one)) for number, one in enumerate(latencies)]
    found = compare(ranks)
    assert len({row.transfer_us for row in found.ranks}) == 1
    for row, latency in zip(found.ranks, latencies, strict=True):
        assert row.transfer_us is not None
        assert row.wait_us is not None
        assert row.wait_us >= 0
        assert round(row.transfer_us + row.wait_us) == sum(latency)
    assert compare(data.draw(st.permutations(ranks))) == found
