from __future__ import annotations

import os
import signal
import time

import pytest

from benchmarks.isolation import Outcome, isolated

# A fork of a process with threads may lock up where a thread held a lock; the measured functions here take none.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def raises() -> int:
    raise ValueError("first line\nsecond line")


def hangs() -> int:
    time.sleep(60)
    return 1


def crashes() -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 1


def prints() -> int:
    print("a table")  # noqa: T201
    return 7


def test_a_count_comes_back() -> None:
    assert isolated(lambda: 42, timeout_sec=30) == Outcome(kind="counted", flops=42)


def test_an_exception_comes_back_as_its_type_and_first_line() -> None:
    assert isolated(raises, timeout_sec=30) == Outcome(kind="raised", message="ValueError: first line")


def test_a_measurement_that_hangs_is_ended() -> None:
    begin = time.monotonic()
    assert isolated(hangs, timeout_sec=0.2).kind == "timed out"
    assert time.monotonic() - begin < 30


def test_a_process_that_dies_is_a_crash() -> None:
    assert isolated(crashes, timeout_sec=30) == Outcome(kind="crashed", message="exit code -9")


def test_what_a_tool_prints_is_not_seen(capfd: pytest.CaptureFixture[str]) -> None:
    assert isolated(prints, timeout_sec=30).flops == 7
    assert capfd.readouterr().out == ""


def test_what_a_measurement_changes_stays_in_its_process() -> None:
    changed: list[int] = []

    def change() -> int:
        changed.append(1)
        return len(changed)

    assert isolated(change, timeout_sec=30).flops == 1
    assert changed == []
