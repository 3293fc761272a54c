"""Lightning's own tests with the callback in every Trainer: what is run, and what runs in every process of theirs.

Lightning calls ``callbacks_factory`` here for each Trainer, as it calls the package's own, which puts the callback in
where ``LIGHTNING_FLOPS=1``. This one adds no callback. It makes windows short enough to open and close in fits of a few
batches, and records what the profiler does in whatever process: of the test, spawned, forked, launched.
"""

from __future__ import annotations

import functools
import gc
import os
import types
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning_flops
from lightning_flops.entry_points import SWITCH

from .machine import ROOT
from .suite import Piece, Project
from .suite_plugin import record_the_profiler, running_test

_PACKAGE = os.path.dirname(lightning_flops.__file__)
_PARTS = """trainer callbacks loops models strategies core checkpointing utilities loggers tuner plugins profilers
    accelerators overrides test_cli.py"""
_SHORT = {"timing_steps": 2}
"""Defaults in place of the package's own; which step is counted, 0 or 1, goes by the test's name."""


def make_entry_point(work: Path) -> None:
    """Have ``importlib.metadata`` find our factory in every process that has *work*/entry_point on its path."""
    described = work / "entry_point" / "lightning_flops_suite-0.dist-info"
    described.mkdir(parents=True, exist_ok=True)
    (described / "METADATA").write_text("Metadata-Version: 2.1\nName: lightning-flops-suite\nVersion: 0\n")
    groups = ("lightning.pytorch", "pytorch_lightning")
    factory = "suite = benchmarks.suite_lightning:callbacks_factory\n"
    (described / "entry_points.txt").write_text("".join(f"[{g}.callbacks_factory]\n{factory}" for g in groups))


PROJECT = Project(
    package="lightning",
    repository="Lightning-AI/pytorch-lightning",
    holds="tests/tests_pytorch/conftest.py",
    version_files=("src/version.info", "src/lightning/version.info"),
    title="Lightning's own tests with the profiler in every Trainer",
    about="Lightning's own tests without and with the callback in every Trainer: `make test-lightning "
    "LIGHTNING_SOURCE=folder`.",
    pieces={name: Piece(targets=(f"tests_pytorch/{name}",), profiled={SWITCH: "1"}) for name in _PARTS.split()},
    known=ROOT / "benchmarks" / "lightning_suite_known.txt",
    settings=str(ROOT / "benchmarks" / "lightning_suite.ini"),
    left="benchmarks.suite_lightning:left_on_trainers",
    # Checkpoints of old versions are no part of the source.
    options=("--ignore=tests_pytorch/checkpointing/test_legacy_checkpoints.py",),
    prepare=make_entry_point,
)


def callbacks_factory() -> list[Any]:
    """No callback; but the profiler that the package's own factory puts in has settings for tiny fits."""
    if os.environ.get(SWITCH) == "1":
        record_the_profiler()
        _shorten_windows()
    return []


def _shorten_windows() -> None:
    from lightning_flops.config import ProfilerConfig

    defaults = ProfilerConfig.__init__.__kwdefaults__
    assert defaults is not None and defaults.keys() >= {"profile_step", *_SHORT}
    defaults.update(_SHORT, profile_step=zlib.crc32(running_test().encode()) % 2)


# ---- what is left on Trainers


def left_on_trainers() -> list[str]:
    """Attributes and hooks of this package's on any Trainer that is still there, its loops, strategy and modules."""
    found: set[str] = set()
    trainers = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
    for thing in gc.get_objects():
        if type(thing).__name__ == "Trainer" and type(thing).__module__ in trainers:
            for owner in _parts_of(thing):
                found.update(f"{type(owner).__name__}.{name}" for name in _ours_on(owner))
    return sorted(found)


def _parts_of(trainer: Any) -> Iterator[Any]:
    """*trainer* and the objects around it; a test may have put anything in their places."""
    strategy, fit_loop = _of(trainer, "_accelerator_connector", "strategy"), _of(trainer, "fit_loop")
    epoch_loop, module = _of(fit_loop, "epoch_loop"), _of(strategy, "_lightning_module")
    yield from (trainer, strategy, _of(strategy, "_precision_plugin"), fit_loop, epoch_loop, module)
    yield from (_of(epoch_loop, name) for name in ("val_loop", "automatic_optimization", "manual_optimization"))
    yield from (_of(fit_loop, "_data_fetcher"), _of(fit_loop, "_combined_loader"))
    optimizers, children = _of(strategy, "_optimizers"), _of(module, "_modules")
    yield from optimizers if isinstance(optimizers, list) else ()
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
