"""The results of a run: the properties that a user reads, and how a closed window becomes a profile."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from typing import Any

from lightning_flops.analysis.profile import build_profile
from lightning_flops.analysis.traced_step import build_traced_step, with_files
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import WindowRecord
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.schema.trace import TracedStep
from lightning_flops.sinks.trace_file import keep_trace
from lightning_flops.units import package_logger

logger = package_logger(__name__)

PROFILES_KEPT = 100  # the latest: with ``every`` they would take ever more memory


class ProfiledRun:
    """Properties with a run's results. A public class inherits them, calls ``_start_anew`` and stores the results."""

    _config: ProfilerConfig
    _profiles: deque[Profile]
    _throughput: ThroughputSummary | None

    def _start_anew(self) -> None:
        """Forget what an earlier run measured."""
        self._profiles = deque(maxlen=PROFILES_KEPT)
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
        """What the windows of the latest run measured, in their order; of more than a hundred the last hundred."""
        return tuple(self._profiles)

    @property
    def throughput(self) -> ThroughputSummary | None:
        """Throughput of the latest run; None until the run has ended, or if nothing was monitored."""
        return self._throughput


def profile_of_window(window: WindowRecord, *, config: ProfilerConfig, warns: bool) -> Profile:
    """The profile of *window*, whose traces are kept where the settings say. A failure is noted; *warns*: logged."""
    traced: TracedStep | None = None
    notes: list[str] = []
    try:
        traced = build_traced_step(window)
    except Exception as error:  # a report without the traced step is still a report
        notes.append(f"The traced step could not be analysed: {error}.")
    profile = build_profile(window, config=config, traced=traced)
    files: dict[int, str] = {}
    keeps = window.context.rank == 0 or config.all_ranks
    if window.traces:
        from lightning_flops.trace import load_trace
        from lightning_flops.trace.counters import counter_tracks
    for record in window.traces:
        if config.trace_dir is None or not keeps:
            continue
        counters: tuple[Any, ...] = ()
        try:
            counters = counter_tracks(load_trace(record.path))
        except Exception as error:  # a trace without them is still a trace
            notes.append(f"The kept trace has no counter tracks: {error}.")
        kept_as = {"rank": window.context.rank, "step": record.index, "process": record.process}
        try:
            kept = keep_trace(record.path, config.trace_dir, counters=counters, **kept_as)
            files[record.index] = kept
        except OSError as error:
            notes.append(f"The trace was not kept: {error}.")
    traced = with_files(traced, files) if traced is not None and files else traced
    for note in notes if warns else ():
        logger.warning(note)
    return replace(profile, traced=traced, notes=(*profile.notes, *notes))
