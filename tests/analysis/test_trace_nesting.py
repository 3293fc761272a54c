"""Who encloses whom, held against a search through everything that began before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.analysis.trace_events import operator, trace

SPANS = st.lists(st.tuples(st.integers(1, 2), st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=40)


@given(SPANS)
def test_an_operators_caller_is_the_last_that_began_before_it_on_its_thread_and_holds_it(
    spans: list[tuple[int, int, int]],
) -> None:
    found = trace(*(operator("aten::mm", start, length, thread=thread) for thread, start, length in spans))
    rows = found.links.operators.tolist()
    starts, ends, lanes = found.start_ns, found.end_ns, found.lane
    depth_of = {-1: -1}
    for place, row in enumerate(rows):
        # It may end a microsecond before what it called, by rounding; what ends later is not called by it.
        before = [
            one
            for one in rows[:place]
            if lanes[one] == lanes[row] and ends[one] > starts[row] and ends[one] >= ends[row] - 1000
        ]
        expected = before[-1] if before else -1
        assert found.links.parent[row] == expected
        depth_of[row] = depth_of[expected] + 1
        assert row in found.links.levels[depth_of[row]]
