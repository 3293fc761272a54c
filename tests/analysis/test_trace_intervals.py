from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops.trace.intervals import (
    Intervals,
    covered_within,
    intersect,
    load_within,
    merge,
    order_by,
    subtract,
    union,
)
from tests.analysis.spans import Span, columns

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=12)
"""Any spans on a short line, those of no and of negative length among them."""


def intervals(spans: Sequence[Span]) -> Intervals:
    return merge(*columns(spans))


def moments(spans: Sequence[Span]) -> set[int]:
    """The whole moments that *spans* cover, one by one: the oracle."""
    return {moment for start, end in spans for moment in range(start, end)}


def as_moments(covered: Intervals) -> set[int]:
    return moments(covered.pairs())


def is_normal(covered: Intervals) -> bool:
    """Whether intervals rise, are not empty and do not touch."""
    flat = [moment for pair in covered.pairs() for moment in pair]
    return all(earlier < later for earlier, later in zip(flat, flat[1:], strict=False))


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(SPANS, SPANS)
def test_sets_of_moments_are_those_of_the_moments_one_by_one(left: list[Span], right: list[Span]) -> None:
    one, other = intervals(left), intervals(right)
    for found, expected in (
        (one, moments(left)),
        (intersect(one, other), moments(left) & moments(right)),
        (subtract(one, other), moments(left) - moments(right)),
        (union(one, other), moments(left) | moments(right)),
    ):
        assert (as_moments(found), found.total) == (expected, len(expected))
        assert is_normal(found)


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(SPANS, st.lists(st.tuples(st.integers(-3, 33), st.integers(0, 20)), max_size=6))
def test_covered_within_counts_the_covered_moments_of_each_span(spans: list[Span], lengths: list[Span]) -> None:
    asked = [(start, start + length) for start, length in lengths]
    counted = covered_within(intervals(spans), *columns(asked)).tolist()
    assert counted == [len(moments(spans) & moments([span])) for span in asked]


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10), st.integers(1, 8)), min_size=1, max_size=8), SPANS)
def test_load_is_the_sum_of_weights_held_to_the_limit(events: list[tuple[int, int, int]], spans: list[Span]) -> None:
    starts, ends = columns([(start, start + length) for start, length, _ in events])
    weights = np.array([eighths / 8 for _, _, eighths in events])
    expected = sum(
        min(1.0, sum(eighths / 8 for start, length, eighths in events if start <= moment < start + length))
        for moment in moments(spans)
    )
    assert load_within(starts, ends, weights, intervals(spans)) == expected


LARGE = st.sampled_from([0, 1, 3, 0xFFFF, 0x10000, 0x10001, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, -(1 << 62)])
NUMBERS = st.lists(st.one_of(st.integers(0, 5), LARGE), max_size=12)


@settings(deadline=None)  # a busy machine is slow, not wrong
@given(NUMBERS)
def test_rows_are_ordered_by_number_and_equal_ones_stay_as_they_were(numbers: list[int]) -> None:
    order = order_by(np.array(numbers, dtype=np.int64)).tolist()
    assert order == sorted(range(len(numbers)), key=numbers.__getitem__)
