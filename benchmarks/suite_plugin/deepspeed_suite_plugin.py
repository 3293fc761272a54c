"""Plugin of pytest under which DeepSpeed's own tests run, without and with this project; nothing of theirs changes.

DeepSpeed's distributed tests run in processes that a server forks. The server loads this module first, so that what is
set up here is in every one of them. A process knows how to set up from its environment: see the names in capitals.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from deepspeed.accelerator import get_accelerator

MODE = "DEEPSPEED_SUITE_MODE"
"""``without``; ``with``: ``install()``, and an enabled block in every config; ``replaced``: our standalone profiler."""

RECORD = "DEEPSPEED_SUITE_RECORD"
"""File to which lines of JSON are added: how tests ended, and which engines were profiled."""

BLOCK = {"enabled": True, "profile_step": 0, "timing_steps": 1}
"""From the first step on, and soon done: most of these tests train for a few steps."""


def record(**facts: Any) -> None:
    """Add a line; short ones of several processes do not mix."""
    with open(os.environ[RECORD], "a", encoding="utf-8") as file:
        file.write(f"{json.dumps(facts)}\n")


def _set_up() -> None:
    # Operators for shared memory would be compiled first; gloo does without.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # torch computes in half precision on every CPU; DeepSpeed asks for instructions that make it fast.
    type(get_accelerator()).is_fp16_supported = lambda self: True
    if os.environ[MODE] == "with":
        _profile_every_engine()
    elif os.environ[MODE] == "replaced":
        _replace_the_standalone_profiler()


def _profile_every_engine() -> None:
    from lightning_flops import deepspeed
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.counting.flop_counter import FlopCounter

    ours: Any = deepspeed
    ours.install()
    enters, finds, starts = FlopCounter.__enter__, ours._block_of, ours.engine_run

    def find(engine: Any) -> Any:
        block = finds(engine)
        return ProfilerConfig.taken_over(BLOCK) if block is None else block

    def start(engine: Any, config: Any, publish: Callable[[Any], None], **options: Any) -> Any:
        def recorded(profile: Any) -> None:
            record(window=True)
            publish(profile)

        adapter = starts(engine, config, recorded, **options)
        record(engine=True)
        return adapter

    def enter(counter: FlopCounter) -> FlopCounter:
        record(counting=True)
        return enters(counter)

    ours._block_of, ours.engine_run = find, start
    FlopCounter.__enter__ = enter  # type: ignore[method-assign]


def _replace_the_standalone_profiler() -> None:
    from deepspeed.profiling import flops_profiler
    from deepspeed.profiling.flops_profiler import profiler
    from deepspeed.runtime import engine

    import lightning_flops

    for owner in (flops_profiler, profiler, engine):
        for name in ("FlopsProfiler", "get_model_profile"):
            if hasattr(owner, name):
                setattr(owner, name, getattr(lightning_flops, name))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what an earlier run has recorded: this one goes on where that one ended."""
    path = Path(os.environ[RECORD])
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    known = {facts["test"] for facts in map(json.loads, lines) if "test" in facts}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in known])
    items[:] = [item for item in items if item.nodeid not in known]
    for item in items:
        record(chosen=item.nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """How one of the three parts of a test ended."""
    if report.when == "call" or report.outcome != "passed":
        record(test=report.nodeid, outcome=report.outcome, seconds=report.duration, words=_last_words(report))


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """A file that cannot be read is a test that fails; one that is skipped as a whole, a test that is skipped."""
    if report.outcome != "passed":
        record(test=report.nodeid, outcome=report.outcome, seconds=0.0, words=_last_words(report))


def _last_words(report: Any) -> str:
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    lines = [line for line in str(report.longrepr).splitlines() if line.startswith("E ")]
    return (lines[-1] if lines else str(report.longrepr))[:300]


multiprocessing.set_forkserver_preload([__name__])
_set_up()
