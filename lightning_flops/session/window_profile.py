"""The profile of a window that has closed: what was recorded, and what the model, its device and its trace tell now.

A question about the user's objects that raises costs its answer, and never the report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from lightning_flops.analysis.profile import build_profile
from lightning_flops.analysis.traced_step import build_traced_step
from lightning_flops.schema.trace import TracedStep
from lightning_flops.sinks.trace_file import keep_trace
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.records import MemoryRecord, RunFacts, WindowRecord
    from lightning_flops.schema.profile import Profile

logger = package_logger(__name__)

T = TypeVar("T")


def profile_of_window(
    window: WindowRecord,
    *,
    config: ProfilerConfig,
    report_step: int,
    facts: Callable[[], RunFacts],
    memory: Callable[[], MemoryRecord | None],
    warns: bool,
) -> Profile:
    """The profile of *window*; its traces are kept where the settings say.

    Args:
        window: what was measured.
        config: the settings.
        report_step: the run's own x-axis value now.
        facts: asks how the run is set up.
        memory: asks what the memory is for.
        warns: a failure shows in the log, too, and not in the report alone.
    """
    window = replace(
        window,
        facts=_answer(facts, "how the run is set up could not be read", warns=warns),
        memory=_answer(memory, "what the memory is for could not be read", warns=warns),
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
    return build_profile(window, config=config, report_step=report_step, traced=traced)


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
