"""The table of several trace files read side by side."""

from __future__ import annotations

from benchmarks.traces import ranks_rows


def test_processes_are_held_against_half_of_one_and_stand_beside_what_the_machine_can_do() -> None:
    one = [[8.0, 9.0], [9.0, 8.0]]  # seconds of the processor, and elapsed: the least of each
    apart = [[8.4, 4.2]]
    assert ranks_rows(one, apart, [[9.2, 4.8]]) == [
        ["one process", "8.0", None, "8.0", None],
        ["two that share nothing", "8.4", "1.05", "4.2", "1.05"],
        ["two of one command", "9.2", "1.15", "4.8", "1.20: met"],
    ]
    assert ranks_rows(one, apart, [[9.2, 4.9]])[2][3:] == ["4.9", "1.23: **missed**"]
