"""What comes out of a run: what a user asks of it, and how a window that has closed becomes a profile."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from lightning_flops.analysis.profile import build_profile
from lightning_flops.analysis.traced_step import build_traced_step
from lightning_flops.schema.trace import TracedStep
from lightning_flops.sinks.trace_file import keep_trace
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.records import MemoryRecord, RunFacts, WindowRecord
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.throughput import ThroughputSummary

logger = package_logger(__name__)

T = TypeVar("T")

Optimizers = Iterable[Any] | None
"""Optimizers, or what wraps them; None if they are not known."""


class ProfiledRun:
    """The answers; a front door's class inherits them, calls ``_start_anew`` and fills in what comes out."""

    _config: ProfilerConfig
    _profiles: list[Profile]
    _throughput: ThroughputSummary | None

    def _start_anew(self) -> None:
        """Forget what an earlier run measured."""
        self._profiles = []
        self._throughput = None

    @property
    def config(self) -> ProfilerConfig:
        """The settings in force."""
        return self._config

    @property
    def profile(self) -> Profile | None:
        """What the latest window measured; None until one has closed."""
        return self._profiles[-1] if self._profiles else None

    @property
    def profiles(self) -> tuple[Profile, ...]:
        """What every window of the latest run measured, the first one first."""
        return tuple(self._profiles)

    @property
    def throughput(self) -> ThroughputSummary | None:
        """What the batches of the latest run came to; None until it has ended, or if nothing was monitored."""
        return self._throughput


def profile_of_window(
    window: WindowRecord,
    *,
    config: ProfilerConfig,
    optimizers: Callable[[], Optimizers],
    facts: Callable[[Optimizers], RunFacts],
    memory: Callable[[Optimizers], MemoryRecord | None],
    report_step: int,
    warns: bool,
) -> Profile:
    """The profile of *window*; its traces are kept where the settings say.

    A question about the user's objects that raises costs its answer, and never the report.

    Args:
        window: what was measured.
        config: the settings.
        optimizers: asks for those that update the model.
        facts: asks how the run is set up, given the optimizers.
        memory: asks what the memory is for, given the optimizers.
        report_step: the run's own step now.
        warns: a failure shows in the log, too, and not in the report alone.
    """
    known = _answer(optimizers, "the optimizers could not be asked for", warns=warns)
    window = replace(
        window,
        facts=_answer(lambda: facts(known), "how the run is set up could not be read", warns=warns),
        memory=_answer(lambda: memory(known), "what the memory is for could not be read", warns=warns),
    )
    files, notes = _keep_traces(window, config.trace_dir)
    traced: TracedStep | None = None
    try:
        traced = build_traced_step(window, files=files)
    except Exception as error:  # a report without the traced step is still a report
        logger.debug("the traced step could not be analysed", exc_info=True)
        notes.append(f"The traced step could not be analysed: {error}.")
    for note in notes:
        if warns:
            logger.warning(note)
    window = replace(window, notes=(*window.notes, *notes))
    return build_profile(window, config=config, traced=traced, report_step=report_step)


def _keep_traces(window: WindowRecord, folder: str | None) -> tuple[dict[int, str], list[str]]:
    """Where the trace of which step lies in *folder*, and notes on those that could not be kept."""
    files: dict[int, str] = {}
    notes: list[str] = []
    for record in window.traces:
        if folder is None or record.path is None:
            continue
        try:
            files[record.index] = keep_trace(record.path, folder, rank=window.context.rank, step=record.index)
        except OSError as error:
            notes.append(f"The trace was not kept: {error}.")
    return files, notes


def _answer(question: Callable[[], T], failure: str, *, warns: bool) -> T | None:
    try:
        return question()
    except Exception as error:  # it asks objects of the user's; the report does without
        if warns:
            logger.warning("%s: %s: %s", failure, type(error).__name__, error)
        return None
