"""The results of a run: the properties that a user reads, and how a closed window becomes a profile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from lightning_flops.analysis.profile import build_profile
from lightning_flops.analysis.traced_step import build_traced_step, counter_tracks_of, with_files
from lightning_flops.report.trace_args import module_args
from lightning_flops.schema.trace import TracedStep
from lightning_flops.sinks.trace_file import keep_trace
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.records import CounterTrack, WindowRecord
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.throughput import ThroughputSummary

logger = package_logger(__name__)

T = TypeVar("T")


class ProfiledRun:
    """Properties with a run's results. A public class inherits them, calls ``_start_anew`` and stores the results."""

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
        """What every window of the latest run measured, in their order."""
        return tuple(self._profiles)

    @property
    def throughput(self) -> ThroughputSummary | None:
        """Throughput of the latest run; None until the run has ended, or if nothing was monitored."""
        return self._throughput


def answer(question: Callable[[], T], failure: str, *, warns: bool) -> T | None:
    """What *question* returns, asked of the user's objects; None, and the *failure* logged, if it raises."""
    try:
        return question()
    except Exception as error:  # the report lacks this answer
        if warns:
            logger.warning("%s: %s: %s", failure, type(error).__name__, error)
        return None


def profile_of_window(window: WindowRecord, *, config: ProfilerConfig, warns: bool) -> Profile:
    """The profile of *window*, whose traces are kept where the settings say. A failure is noted; *warns*: logged."""
    traced: TracedStep | None = None
    try:
        traced = build_traced_step(window)
    except Exception as error:  # a report without the traced step is still a report
        logger.debug("the traced step could not be analysed", exc_info=True)
        window = replace(window, notes=(*window.notes, f"The traced step could not be analysed: {error}."))
        if warns:
            logger.warning(window.notes[-1])
    profile = build_profile(window, config=config, traced=traced)
    return profile if config.trace_dir is None else _with_kept_traces(profile, window, config.trace_dir, warns=warns)


def _with_kept_traces(profile: Profile, window: WindowRecord, folder: str, *, warns: bool) -> Profile:
    """*profile*, with the trace files of *window* in *folder*, and in them what the profile says of their modules."""
    traced = profile.traced
    files: dict[int, str] = {}
    notes: list[str] = []
    for record in window.traces:
        if record.path is None:
            continue
        # The rates are those of the one trace that was analysed.
        args = module_args(profile) if traced is not None and record.index == traced.index else {}
        counters: tuple[CounterTrack, ...] = ()
        try:
            counters = counter_tracks_of(record)
        except Exception as error:  # a trace without them is still a trace
            logger.debug("the counter tracks of a trace could not be made", exc_info=True)
            notes.append(f"The kept trace has no counter tracks: {error}.")
        try:
            files[record.index] = keep_trace(
                record.path,
                folder,
                rank=window.context.rank,
                step=record.index,
                module_args=args,
                counters=counters,
                process=record.process,
            )
        except OSError as error:
            notes.append(f"The trace was not kept: {error}.")
            if warns:
                logger.warning(notes[-1])
    kept = traced if traced is None or not files else with_files(traced, files)
    return replace(profile, traced=kept, notes=(*profile.notes, *notes))
