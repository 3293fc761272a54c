"""A run of tests: the files that take long come first, and what all share."""

from __future__ import annotations

import faulthandler
import gc
import importlib
import importlib.metadata
import os
import sys
import tempfile
from collections.abc import Iterator
from functools import cache, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from lightning_flops.analysis import step_flops
from tests.fake_clock import FakeNow

# Files that take long, the longest first. A file runs in one process: one of these that began last would keep the
# others waiting for its end.
_LONG = (
    "tests/corpus/test_corpus.py",
    "tests/deepspeed/test_engine.py",
    "tests/page/test_page.py",
    "tests/deepspeed/test_run_command.py",
    "tests/test_same_training.py",
    "tests/ranks/test_strategies.py",
    "tests/loops/test_compiled_steps.py",
    "tests/benchmarks/test_gpu.py",
    "tests/lightning/test_seen_from_outside.py",
    "tests/loops/test_run_program.py",
    "tests/ranks/test_faults.py",
    "tests/deepspeed/test_parallel.py",
)

# While tests are collected, nearly all that comes into being stays: it is no garbage to look for. And pytest keeps each
# file as it has rewritten it, also where the environment has Python write none: half of a collection is that.
gc.disable()
_WRITES_NOTHING, sys.dont_write_bytecode = sys.dont_write_bytecode, False


# Torch tries whether its C++ compiler builds for each kind of vectors of this CPU: a program and a Python with torch
# for each, in each process that compiles. That takes longer than a kernel of a test, which would fail as well.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# Which steps are counted to check the others differs from run to run; not from one run of tests to the next.
step_flops.seed_of_run = wraps(step_flops.seed_of_run)(lambda world_size: 0)


# Peaks that were measured on this machine (`lightning-flops peak`) would stand in reports of tests.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()


# GNU readline, which some process above has loaded, exports the width of its terminal; commands keep to it.
os.environ.pop("COLUMNS", None)


# Lightning asks for the entry points of all that is installed each time that a Trainer is made: more than a hundred
# files, and no test installs anything for the process that it runs in.
importlib.metadata.entry_points = cache(importlib.metadata.entry_points)  # type: ignore[assignment]


# Where there is no such device, torch keeps each seed for the day that it comes, with the stack of who has set it: that
# is a hundred lines of text under pytest, three times for each ``torch.manual_seed``.
_KEEP_SEEDS = ("torch.cuda", "torch.xpu", "torch.mtia")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """A process that only hands tests out draws nothing: for its seeds it would import DeepSpeed, and torch with it."""
    randomly: Any = sys.modules.get("pytest_randomly")
    if randomly is not None and config.pluginmanager.hasplugin("dsession"):
        randomly.entrypoint_reseeds = []


def pytest_collection_finish() -> None:
    """All else is as it was found, and seeds are kept without the stack of who has set them.

    But for this one, no collection of garbage goes through what was collected and imported. It has to: what would be
    garbage is deleted at the end of the process otherwise, late enough for Python to warn of files that are open.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    sys.dont_write_bytecode = _WRITES_NOTHING
    for name in _KEEP_SEEDS:
        keeper: Any = sys.modules.get(name)
        if keeper is not None and not keeper.is_available():
            keeper.traceback = SimpleNamespace(format_stack=list)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take long first; all others stay in their order."""
    place = {name: number for number, name in enumerate(_LONG)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(_LONG)))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """A test that may take longer than others is not ended earlier than it says, not even where it hangs for good.

    Faulthandler, which ends the process then, knows of one limit for all tests.
    """
    own, output = item.get_closest_marker("timeout"), item.config.stash.get(fault_handler_stderr_fd_key, None)
    if own is None or output is None:
        return
    usual, of_all = (float(item.config.getini(name) or 0.0) for name in ("timeout", "faulthandler_timeout"))
    if own.args[0] > usual > 0.0 and of_all > 0.0:
        ends = bool(item.config.getini("faulthandler_exit_on_timeout"))
        faulthandler.dump_traceback_later(own.args[0] + max(of_all - usual, 0.0), exit=ends, file=output)


@pytest.fixture(scope="module", autouse=True)
def what_was_there_before_is_no_garbage() -> Iterator[None]:
    """Before each file, and before all of its other fixtures: no collection of garbage looks at it again.

    All files of tests and what they import are a million objects. Lightning and transformers collect garbage in each
    training, some of our own code looks through all objects, and Python collects by itself.
    """
    gc.collect()
    gc.freeze()
    yield


@pytest.fixture(scope="module", autouse=True)
def nothing_is_compiled() -> None:
    """What another file has compiled is no more: clipping is heard only where a program compiles nothing."""
    if "torch._dynamo" in sys.modules:
        importlib.import_module("torch._dynamo").reset()


@pytest.fixture(autouse=True)
def no_lines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """No lines are sampled, so that no window's length depends on how fast this machine is.

    A test with the mark ``lines`` samples them as every run does.
    """
    if "torch" in sys.modules and request.node.get_closest_marker("lines") is None:
        lines = importlib.import_module("lightning_flops.measure.lines")
        monkeypatch.setattr(lines, "why_not", lambda *handler: "a test counts its steps")


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A temporary folder for a program that starts processes.

    multiprocessing puts sockets there, and the path of a socket has 107 characters at most: pytest's own is too long.
    """
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeNow:
    """The host's clock, in the test's hands: that of windows, of the monitor and of standalone profilers."""
    from lightning_flops import host_clock

    fake = FakeNow()
    monkeypatch.setattr(host_clock, "now", fake)
    monkeypatch.setattr(host_clock, "sleep", fake.sleep)
    return fake


@pytest.fixture
def no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step is counted outside of windows, so every other one is in the figures."""
    from lightning_flops.analysis.step_flops import CountSchedule

    for name in ("draws_check", "learns"):
        monkeypatch.setattr(CountSchedule, name, lambda schedule: False)


@pytest.fixture
def monitor_now(now: FakeNow, no_checks: None) -> FakeNow:
    """The host's clock, where no step is counted outside of windows."""
    return now


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every window that is turned into a profile from here on."""
    from lightning_flops.analysis.profile import build_profile

    kept: list[Any] = []

    def keep(window: Any, **kwargs: Any) -> Any:
        kept.append(window)
        return build_profile(window, **kwargs)

    monkeypatch.setattr("lightning_flops.run.delivery.build_profile", keep)
    return kept


@pytest.fixture
def prompt_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports are there when the window has closed."""
    from tests.prompt_worker import PromptWorker

    monkeypatch.setattr("lightning_flops.run.delivery.Worker", PromptWorker)
