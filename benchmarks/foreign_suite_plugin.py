"""A pytest plugin that writes one line of JSON for every test of somebody else's suite: how it ended, what it left.

Pytest's own report of a run is written at its end, and lost with a process that hangs or dies; these lines are there as
soon as a test is over, and a run that begins again goes on where the last one ended. Load it with
``-p benchmarks.foreign_suite_plugin``; ``benchmarks.foreign_suite`` runs it and reads what it wrote.

Environment:
    FOREIGN_SUITE_RECORDS: the file, to which lines are added.
    FOREIGN_SUITE_LEFT: optional, ``module:function``: called after each test, says in words what is left behind beyond
        what ``tests.left_on_torch`` knows of torch.
    FOREIGN_SUITE_RUNNABLE: if set, tests that would be skipped by a mark are left out.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

from tests.left_on_torch import torch_state

RECORDS = "FOREIGN_SUITE_RECORDS"
LEFT = "FOREIGN_SUITE_LEFT"
RUNNABLE = "FOREIGN_SUITE_RUNNABLE"
WORDS = 2_000
"""So many characters of what a failing test says are kept, its last ones."""

_PATH = os.environ.get(RECORDS)  # now: a test may empty the environment
_LAUNCHED = "LOCAL_RANK" in os.environ
"""Whether this process is a rank that a test started by running the same command again."""
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup has ignored; tests look at it
torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)  # torch wraps its step when it makes the first one
_ended: dict[str, list[pytest.TestReport]] = {}
_left: dict[str, list[str]] = {}


def write(**record: Any) -> None:
    """Add a line to the records; of several processes at once, each line stays whole."""
    if not _PATH:
        return
    line = json.dumps(record) + "\n"
    descriptor = os.open(_PATH, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


def read(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The lines of the records at *path*; none if there is no file."""
    try:
        with open(path, encoding="utf-8") as lines:
            return [json.loads(line) for line in lines]
    except FileNotFoundError:
        return []


def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Leave out what an earlier run with the same records has ended."""
    over = {record["test"] for record in read(_PATH or "") if record["kind"] in ("ended", "died")}
    out = {item for item in items if item.nodeid in over}
    if os.environ.get(RUNNABLE):
        out |= {item for item in items if any(_skips(mark) for mark in item.iter_markers())}
    config.hook.pytest_deselected(items=list(out))
    items[:] = [item for item in items if item not in out]


def _skips(mark: pytest.Mark) -> bool:
    conditions = (*mark.args, mark.kwargs.get("condition"))
    return mark.name == "skip" or (mark.name == "skipif" and any(condition is True for condition in conditions))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Look at torch before the test and after it, its fixtures undone."""
    write(kind="started", test=item.nodeid, launched=_LAUNCHED)
    _ended[item.nodeid] = []
    before = torch_state()
    result = yield
    left = [f"torch: {name}" for name, value in torch_state().items() if value != before[name]]
    if function := os.environ.get(LEFT):
        module, _, name = function.partition(":")
        look: Callable[[], list[str]] = getattr(importlib.import_module(module), name)
        left += look()
    reports = _ended.pop(item.nodeid)
    how, words = _how_it_ended(reports)
    seconds = round(sum(report.duration for report in reports), 2)
    write(
        kind="ended", test=item.nodeid, launched=_LAUNCHED, how=how, words=words, left=left, seconds=round(seconds, 2)
    )
    return result


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a test's setup, call and teardown came to."""
    if report.nodeid in _ended:
        _ended[report.nodeid].append(report)


def _how_it_ended(reports: list[pytest.TestReport]) -> tuple[str, str]:
    """One word for the whole test, and the end of what the first report that is no success says."""
    for report in reports:
        words = str(report.longrepr or "")[-WORDS:]
        if report.failed:
            return ("failed" if report.when == "call" else "error"), words
        if report.skipped:
            return ("xfailed" if hasattr(report, "wasxfail") else "skipped"), words
    return "passed", ""
