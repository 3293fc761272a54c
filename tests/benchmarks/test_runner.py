"""What runs apart from the others: it may raise, hang or die, and nothing of it stays."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from benchmarks.runner import Answer, answer_of, in_rounds, run_apart

# A fork of a process with threads may lock up where a thread held a lock; the measured functions here take none.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


def raises() -> Any:
    raise ValueError("first line\nsecond line")


@pytest.mark.parametrize(
    ("function", "answer"),
    [
        (lambda: [42, "a"], Answer(value=[42, "a"])),
        (lambda: answer_of(lambda: 7, timeout_sec=30), Answer(value=Answer(value=7))),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), Answer(kind="crashed", words="exit code -9")),
    ],
    ids=["a-value-comes-back", "one-in-another", "dies"],
)
def test_how_a_process_ends_is_its_answer(function: Callable[[], Any], answer: Answer) -> None:
    assert answer_of(function, timeout_sec=30) == answer


def test_an_exception_comes_back_as_its_type_and_first_line() -> None:
    answer = answer_of(raises, timeout_sec=30)
    assert (answer.kind, answer.words) == ("raised", "ValueError: first line")
    assert "second line" in answer.traceback


def test_what_hangs_is_ended_and_what_it_sent_is_kept() -> None:
    begin, received = time.monotonic(), list[str]()

    def hangs(send: Callable[[str], None]) -> None:
        send("before")
        time.sleep(60)

    # 0.1 s of the 60 are left when it hangs.
    answer = run_apart(hangs, timeout_sec=60, receive=received.append, clock=lambda: 59.9 * len(received))
    assert (answer.kind, answer.words, received) == ("timed out", "no answer in 60 s", ["before"])
    assert time.monotonic() - begin < 60


def test_every_round_has_every_arm_and_the_first_is_in_no_figure() -> None:
    calls: list[str] = []

    def call(name: str) -> int:
        calls.append(name)
        return len(calls)

    found = in_rounds({name: partial(call, name) for name in "ab"}, 2)
    assert sorted(found["a"] + found["b"]) == [3, 4, 5, 6]
    assert [sorted(calls[first : first + 2]) for first in (0, 2, 4)] == [["a", "b"]] * 3
