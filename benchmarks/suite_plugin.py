"""A pytest plugin that writes one line of JSON for every test of another project's suite: how it ended, what it left.

Pytest's own report of a run is written at its end, and lost with a process that hangs or dies; these lines are there as
soon as a test is over, and a run that begins again goes on where the last one ended. ``benchmarks.suite`` loads it with
``-p`` and reads what it wrote.

Environment:
    SUITE_RECORDS: the file, to which lines are added.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
from collections.abc import Generator
from importlib import import_module
from typing import Any

import pytest
import torch

from tests.left_on_torch import torch_state

RECORDS = "SUITE_RECORDS"
WORDS = 2_000  # So many characters of what a failing test says are kept, its last ones

_PATH = os.environ.get(RECORDS)  # now: a test may empty the environment
_LAUNCHED = "LOCAL_RANK" in os.environ
"""Whether this process is a rank that a test started by running the same command again."""
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored; tests look at it
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # torch wraps its step when it makes the first one
_ended: dict[str, list[pytest.TestReport | pytest.CollectReport]] = {}


def write(**record: Any) -> None:
    """Add a line to the records; of several processes at once, each line stays whole."""
    if not _PATH:
        return
    with open(_PATH, "ab", buffering=0) as records:
        records.write((json.dumps(record) + "\n").encode())


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of the records at *path*; none if there is no file."""
    try:
        with open(path, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    except FileNotFoundError:
        return []


def running_test() -> str:
    """The test in which this process, or the one it comes from, runs."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


@functools.cache
def record_the_profiler() -> None:
    """Once in a process: write the profiler's warnings, and a line for each window that closes."""
    run_delivery: Any = import_module("lightning_flops.run.delivery")

    class Record(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            write(kind="said", test=running_test(), words=record.getMessage())

    logging.getLogger("lightning_flops").addHandler(Record(logging.WARNING))
    build = run_delivery.profile_of_window

    @functools.wraps(build)
    def profile_of_window(*args: Any, **kwargs: Any) -> Any:
        profile = build(*args, **kwargs)
        write(kind="profiled", test=running_test(), traced=profile.traced is not None)
        return profile

    run_delivery.profile_of_window = profile_of_window


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave out what an earlier run with the same records has ended."""
    over = {record["test"] for record in read(_PATH or "") if record["kind"] in ("ended", "died")}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in over])
    items[:] = [item for item in items if item.nodeid not in over]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Look at torch before the test and after it, its fixtures undone."""
    write(kind="started", test=item.nodeid, launched=_LAUNCHED)
    _ended[item.nodeid] = []
    before = torch_state()
    result = yield
    left = [f"torch: {name}" for name, value in torch_state().items() if value != before[name]]
    how, words = _how_it_ended(_ended.pop(item.nodeid))
    write(kind="ended", test=item.nodeid, launched=_LAUNCHED, how=how, words=words, left=left)
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a test's setup, call and teardown came to."""
    if report.nodeid in _ended:
        _ended[report.nodeid].append(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be read is an error, and one that is skipped as a whole a test that is skipped."""
    if report.outcome != "passed":
        how, words = _how_it_ended([report])
        write(kind="ended", test=report.nodeid, launched=_LAUNCHED, how=how, words=words, left=[])


def _how_it_ended(reports: list[pytest.TestReport | pytest.CollectReport]) -> tuple[str, str]:
    """One word for the whole test, and the end of what the first report that is no success says."""
    for report in reports:
        words = str(report.longrepr or "")[-WORDS:]
        if report.failed:
            return ("failed" if report.when == "call" else "error"), words
        if report.skipped:
            return ("xfailed" if hasattr(report, "wasxfail") else "skipped"), words
    return "passed", ""
