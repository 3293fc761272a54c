"""The thread that reports are made on: the training never waits for it, and what it lost is one line in the log."""

from __future__ import annotations

import os
import threading

import pytest

from lightning_flops.run.delivery import Worker
from tests.listening import warnings_in


class Hangs:
    """A job on a file system that hangs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.goes_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.goes_on.wait(60)


def test_training_goes_on_while_a_job_hangs_and_the_end_waits_a_bounded_time(caplog: pytest.LogCaptureFixture) -> None:
    worker, hangs, delivered = Worker(), Hangs(), []
    worker.submit(hangs, "the report of step 3")
    assert hangs.begun.wait(60)
    worker.submit(lambda: delivered.append(9), "the report of step 9")
    assert not worker.finish(0.01)
    assert not worker.finish(0.01)
    words = "could not be written within 10 ms of the run's end; does a file system hang?"
    assert warnings_in(caplog) == [f"the report of step 3, the report of step 9 {words}"]
    hangs.goes_on.set()
    worker.submit(lambda: delivered.append(10), "late")
    assert delivered == []


def test_a_job_that_raises_is_one_warning_and_the_next_one_runs(caplog: pytest.LogCaptureFixture) -> None:
    worker, delivered = Worker(), []
    worker.submit(lambda: 1 // 0, "the report of step 3")
    worker.submit(lambda: delivered.append(1))
    assert worker.finish() and delivered == [1]
    assert warnings_in(caplog) == [
        "the report of step 3 was lost: ZeroDivisionError: integer division or modulo by zero"
    ]


def test_where_the_interpreter_starts_no_more_threads_a_job_still_waits_for_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, hangs, made = Worker(), Hangs(), list[str]()

    def first() -> None:
        hangs()
        made.append("the report")

    def starts_none(thread: threading.Thread) -> None:
        threads.append(thread)
        hangs.goes_on.set()  # as late as a test can say it
        raise RuntimeError("can't create new thread at interpreter shutdown")

    threads = list[threading.Thread]()
    worker.submit(first)
    assert hangs.begun.wait(60)
    monkeypatch.setattr(threading.Thread, "start", starts_none)
    worker.submit(lambda: made.append("the last word to other ranks"))
    assert len(threads) == 1 and made == ["the report", "the last word to other ranks"]
    assert worker.finish()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")  # it is
def test_a_forked_child_does_nothing() -> None:
    worker, hangs = Worker(), Hangs()
    worker.submit(hangs)
    assert hangs.begun.wait(60)
    child = os.fork()
    if child == 0:
        worker.submit(lambda: os._exit(1))
        os._exit(0 if worker.finish() else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    hangs.goes_on.set()
    assert worker.finish()
