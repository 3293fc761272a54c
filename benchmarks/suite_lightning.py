"""Lightning's own tests with the callback in every Trainer: what is run, and what runs in every process of theirs.

Lightning calls ``callbacks_factory`` here for each Trainer, as it calls the package's own, which puts the callback in
where ``LIGHTNING_FLOPS=1``. This one adds no callback. It makes windows short enough to open and close in fits of a few
batches, and records what the profiler does in whatever process: of the test, spawned, forked, launched.
"""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from lightning_flops.entry_points import SWITCH

from .machine import ROOT
from .suite import Piece, Project
from .suite_plugin import record_the_profiler, running_test

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
    # Checkpoints of old versions are no part of the source.
    options=("--ignore=tests_pytorch/checkpointing/test_legacy_checkpoints.py",),
    prepare=make_entry_point,
)


def callbacks_factory() -> list[Any]:
    """No callback; but the profiler that the package's own factory puts in has settings for tiny fits."""
    if os.environ.get(SWITCH) == "1":
        from lightning_flops.config import ProfilerConfig

        record_the_profiler()
        defaults = ProfilerConfig.__init__.__kwdefaults__
        assert defaults is not None and defaults.keys() >= {"profile_step", *_SHORT}
        defaults.update(_SHORT, profile_step=zlib.crc32(running_test().encode()) % 2)
    return []
