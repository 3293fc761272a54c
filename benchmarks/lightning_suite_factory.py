"""What runs in every process of Lightning's own suite that makes a Trainer, beside the package's public entry point.

Lightning calls ``callbacks_factory`` here for each Trainer, as it calls the package's own, which puts the callback in
where ``LIGHTNING_FLOPS=1``. This one adds no callback. It makes windows short enough to open and close in fits of a few
batches, and writes to the suite's records what the profiler warned of and how many windows closed, from whatever
process: of the test, spawned, forked, launched.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import types
import zlib
from collections.abc import Iterator
from typing import Any

import lightning_flops
from benchmarks.foreign_suite_plugin import write
from lightning_flops.entry_points import SWITCH

_PACKAGE = os.path.dirname(lightning_flops.__file__)

_SHORT = {"timing_steps": 2}
"""Defaults in place of the package's own; which step is counted, 0 or 1, goes by the test's name."""


def callbacks_factory() -> list[Any]:
    """No callback; but the profiler that the package's own factory puts in has settings for tiny fits."""
    if os.environ.get(SWITCH) == "1":
        _prepare_process()
        _shorten_windows()
    return []


def running_test() -> str:
    """The test in which this process, or the one it comes from, makes a Trainer."""
    return os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]


def _shorten_windows() -> None:
    from lightning_flops.config import ProfilerConfig

    defaults = ProfilerConfig.__init__.__kwdefaults__
    assert defaults is not None and defaults.keys() >= {"profile_step", *_SHORT}
    defaults.update(_SHORT, profile_step=zlib.crc32(running_test().encode()) % 2)


@functools.cache
def _prepare_process() -> None:
    """Once in a process: hear the profiler's warnings, and of each window that closes."""
    run_reports: Any = importlib.import_module("lightning_flops.run.reports")

    class Hear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            write(kind="said", test=running_test(), words=record.getMessage())

    logging.getLogger("lightning_flops").addHandler(Hear(logging.WARNING))
    build = run_reports.profile_of_window

    @functools.wraps(build)
    def profile_of_window(*args: Any, **kwargs: Any) -> Any:
        profile = build(*args, **kwargs)
        timed, traced = len(profile.timed_steps), profile.traced is not None
        write(kind="profiled", test=running_test(), pid=os.getpid(), timed=timed, traced=traced)
        return profile

    run_reports.profile_of_window = profile_of_window


# ---- what is left on Trainers


def left_on_trainers() -> list[str]:
    """Attributes and hooks of this package's on any Trainer that is still there, its loops, strategy and modules."""
    found: set[str] = set()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind.__name__ == "Trainer" and kind.__module__ in (
            "lightning.pytorch.trainer.trainer",
            "pytorch_lightning.trainer.trainer",
        ):
            for owner in _parts_of(thing):
                found.update(f"{type(owner).__name__}.{name}" for name in _ours_on(owner))
    return sorted(found)


def _parts_of(trainer: Any) -> Iterator[Any]:
    """*trainer* and the objects around it; a test may have put anything in their places."""
    strategy, fit_loop = _of(trainer, "_accelerator_connector", "strategy"), _of(trainer, "fit_loop")
    epoch_loop = _of(fit_loop, "epoch_loop")
    module = _of(strategy, "_lightning_module")
    yield from (trainer, strategy, _of(strategy, "_precision_plugin"), fit_loop, epoch_loop, module)
    yield from (_of(epoch_loop, name) for name in ("val_loop", "automatic_optimization", "manual_optimization"))
    yield from (_of(fit_loop, "_data_fetcher"), _of(fit_loop, "_combined_loader"))
    optimizers = _of(strategy, "_optimizers")
    yield from optimizers if isinstance(optimizers, list) else ()
    children = _of(module, "_modules")
    yield from children.values() if isinstance(children, dict) else ()


def _of(owner: Any, *names: str) -> Any:
    """What *owner* holds under the first of *names*, and that under the next; None where there is no such thing."""
    for name in names:
        owner = getattr(owner, "__dict__", {}).get(name)
    return owner


def _ours_on(owner: Any) -> Iterator[str]:
    for name, value in list(getattr(owner, "__dict__", {}).items()):
        values = list(value.values()) if isinstance(value, dict) and name.endswith("hooks") else [value]
        if any(map(_is_ours, values)):
            yield name


def _is_ours(value: Any) -> bool:
    if isinstance(value, types.MethodType):
        return _is_ours(value.__self__) or _is_ours(value.__func__)
    if isinstance(value, functools.partial):
        return _is_ours(value.func)
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename.startswith(_PACKAGE)
    return type(value).__module__.partition(".")[0] == "lightning_flops"
