"""Where the reports of one run go, whatever framework drives it: its loggers, its console, its files."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lightning_flops.analysis.rates import padding_ratio
from lightning_flops.report.advice_text import render_advice_markdown
from lightning_flops.report.headline import headline
from lightning_flops.report.html_page import RunPages, packed, window_figures
from lightning_flops.report.markdown import fenced
from lightning_flops.report.scalars import MONITOR_PREFIX, monitor_scalars, profile_scalars, scalar_charts
from lightning_flops.report.text import render_text
from lightning_flops.report.throughput_text import render_throughput
from lightning_flops.sinks.console import ConsoleSink
from lightning_flops.sinks.file import FreePaths, write_text_file
from lightning_flops.sinks.tensorboard_pages import OwnPages
from lightning_flops.sinks.tensorboard_tab import TabWindow
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.report.pictures import Picture
    from lightning_flops.run.monitor import MonitorReading
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.throughput import ThroughputSummary
    from lightning_flops.sinks.sink import Sink, TextSink

logger = package_logger(__name__)


class RunOutput(Protocol):
    """The places where the reports of one run go, from one rank."""

    def prepare(self, profile: Profile) -> Any: ...
    def publish(self, prepared: Any, *, step: int) -> None: ...
    def prepare_throughput(self, summary: ThroughputSummary) -> Any: ...
    def publish_throughput(self, prepared: Any, *, step: int) -> None: ...

    @property
    def shows_readings(self) -> bool:
        """Whether there is a logger that gets the monitor's readings."""

    def write_profile(self, profile: Profile, *, step: int) -> None:
        """Give the report to everything that shows it."""

    def write_reading(
        self,
        reading: MonitorReading,
        *,
        dp_size: int,
        tokens: int | None,
        flops: Any,
        model_flops_peak_sec: float | None,
        useful_flops_peak_sec: float | None,
        step: int,
    ) -> None:
        """Give the monitor's *reading* to the loggers, with what its steps spent; None where that is not known."""

    def write_throughput(self, summary: ThroughputSummary, *, step: int) -> None:
        """Give the summary of the whole run's batches, when the run ends."""


class WrittenProfile(NamedTuple):
    """The files that hold one profile; None for a file that was not asked for or could not be written."""

    text_path: str | None
    json_path: str | None
    html_path: str | None = None


class RunFiles:
    """The files that one rank writes about its run. Ranks other than 0 have their number in the file names.

    Args:
        output_file: path or URL of the text report; None: no file was named for the text.
        folder: returns the folder of the other files; None: they are not written.
        rank: the rank that writes.
        part: a word that file names have if the run is not the first training of its program.
        timer_only: only throughput was asked for; otherwise throughput has a file only beside a profile.
        html: a page is written beside each profile.
    """

    def __init__(
        self,
        *,
        output_file: str | None,
        folder: Callable[[], str | None],
        rank: int = 0,
        part: str = "",
        timer_only: bool = False,
        html: bool = False,
    ) -> None:
        self._output_file = output_file
        self.folder = folder
        """Returns the folder of the files."""
        self._suffix = (f".{part}" if part else "") + (f".rank{rank}" if rank else "")
        self._timer_only = timer_only
        self._html = html
        self._profiles_written = 0
        self._throughput_path: str | None = None
        self._free_paths = FreePaths()
        self._pages = RunPages()

    def write_profile(self, profile: Profile, text: str, *, keep_text: bool) -> WrittenProfile:
        """Write *profile*; write *text* if a file was named for it, or if *keep_text*."""
        self._profiles_written += 1
        text_path: str | None = None
        if self._output_file is not None:
            path = self._named(self._output_file)
            # The first report of a run replaces an earlier run's; the ones after it get names of their own.
            text_path = _write_file(path if self._profiles_written == 1 else self._free_paths.free(path), text)
        folder = self.folder()
        if folder is None:
            return WrittenProfile(text_path, None)
        path = self._named(f"{folder}/profile.json")
        json_path = _written(lambda: self._free_paths.write_text(path, profile.to_json()))
        path = json_path or self._free_paths.free(path)
        if keep_text and self._output_file is None:
            text_path = _write_file(path.removesuffix(".json") + ".txt", text)
        return WrittenProfile(text_path, json_path, self._write_page(profile, path) if self._html else None)

    def _write_page(self, profile: Profile, json_path: str) -> str | None:
        path = json_path.removesuffix(".json") + ".html"
        return _write_file(path, self._pages.add(profile, page=path.rpartition("/")[2]))

    def write_throughput(self, summary: ThroughputSummary) -> None:
        """Write *summary*, in place of an earlier one of the run, unless a profile was asked for and there is none."""
        folder = self.folder() if self._profiles_written or self._timer_only else None
        if folder is None:
            return
        path, text = self._named(f"{folder}/throughput.json"), summary.to_json()
        if self._throughput_path is None:
            self._throughput_path = _written(lambda: self._free_paths.write_text(path, text))
        else:
            _write_file(self._throughput_path, text)

    def _named(self, path: str) -> str:
        """Where this rank writes what rank 0 of a training run writes to *path*: ``flops.test.rank3.txt``."""
        root, suffix = os.path.splitext(path)
        return f"{root}{self._suffix}{suffix}"


class LoggedOutput:
    """Where rank 0 shows the reports of one run: in its loggers, on the console and in files.

    If one of them refuses a report, the others still get it.

    Args:
        config: the settings.
        loggers: those of the run.
        console: shows a report if no file was named for it.
        files: the run's files.
        text_file: a report that no logger shows, and that no file was named for, gets a file of its own.
        x_axis: the loggers' x-axis value, given the step of a report.
        announce: says on a line what came out and where the report is, for a user who may see nothing else of it.
        nowhere: what to say, once, of a report that no file keeps and no logger shows; empty: nothing.
        part: a word that tags have below their prefix if the run is not the first training of its program.
    """

    def __init__(
        self,
        config: ProfilerConfig,
        *,
        loggers: Sink,
        console: TextSink,
        files: RunFiles,
        text_file: bool,
        x_axis: Callable[[int], int],
        announce: Callable[[str], None] | None = None,
        nowhere: str = "",
        part: str = "",
    ) -> None:
        self._config = config
        self._loggers = loggers
        self._console = console
        self.files = files
        """The run's files."""
        self._text_file = text_file
        self._x_axis = x_axis
        self._announce = announce
        self._nowhere = nowhere
        self.part = part
        """A word that tags have below their prefix; mostly empty in a training run."""

    @property
    def shows_readings(self) -> bool:
        """Whether there is a logger that gets the monitor's readings."""
        return self._loggers.takes_scalars

    def prepare(self, profile: Profile) -> Profile:
        return profile

    def prepare_throughput(self, summary: ThroughputSummary) -> ThroughputSummary:
        return summary

    def publish_throughput(self, summary: ThroughputSummary, *, step: int) -> None:
        self.write_throughput(summary, step=step)

    def publish(self, profile: Profile, *, step: int) -> None:
        """Give the report to everything that shows it."""
        prefix, at = self._tags(self._config.tag_prefix), self._x_axis(step)
        text = render_text(profile)
        self._loggers.write_scalars(profile_scalars(profile, prefix=prefix), step=at)
        shown = self._loggers.write_text(f"{prefix}/profile", fenced(text), step=at)
        self._loggers.write_text(f"{prefix}/advice", render_advice_markdown(profile.advice), step=at)
        if self._config.output_file is None:
            self._console.write_text(f"{prefix}/profile", text, step=step)
        written = self.files.write_profile(profile, text, keep_text=self._text_file and not shown)
        self._loggers.write_record(own_pages(profile, prefix=prefix, charts_of=self._config.tag_prefix), step=at)
        if self._config.html:
            self._loggers.write_record(tab_window(profile, prefix=prefix), step=at)
        if written.html_path is not None:
            self._loggers.keep_file(written.html_path)
        places = {
            "the page is in": written.html_path,
            "the report is in": written.text_path,
            "the loggers show the report as the text": f"{prefix}/profile" if shown else None,
            "every number is in": written.json_path,
        }
        said = [f"{words} {place}" for words, place in places.items() if place is not None]
        if not said and self._nowhere:
            said, self._nowhere = [self._nowhere], ""
        if said and self._announce is not None:
            context = profile.context
            whose = "" if context.trains else f" of the {context.run_word}"
            what = f"FLOPs of {context.step_word} {profile.profile_step}{whose}"
            where = ", ".join(said)
            sentence = f"{what}: {headline(profile)} {where[0].upper()}{where[1:]}"
            self._announce(sentence)

    def _tags(self, prefix: str) -> str:
        """What the tags of this run begin with, so that those of a training run and of another loop never meet."""
        return f"{prefix}/{self.part}" if self.part else prefix

    def write_reading(
        self,
        reading: MonitorReading,
        *,
        dp_size: int,
        tokens: int | None,
        flops: Any,
        model_flops_peak_sec: float | None,
        useful_flops_peak_sec: float | None,
        step: int,
    ) -> None:
        """Give the monitor's *reading* to the loggers, with what its steps spent; None where that is not known."""
        scalars = monitor_scalars(
            seconds=reading.seconds,
            data_wait_sec=reading.data_wait_sec,
            batches=reading.batches,
            samples=reading.samples,
            dp_size=dp_size,
            tokens=tokens,
            padding_ratio=padding_ratio(reading.tokens),
            model_flops=None if flops is None else sum(flops.model_by_dtype.values()),
            model_flops_peak_sec=model_flops_peak_sec,
            useful_flops_peak_sec=useful_flops_peak_sec,
            prefix=self._tags(MONITOR_PREFIX),
        )
        self._loggers.write_scalars(scalars, step=self._x_axis(step))

    def write_throughput(self, summary: ThroughputSummary, *, step: int) -> None:
        """Give the summary of the whole run's batches to the log, to loggers that show text, and to a file."""
        tag, text = f"{self._tags(MONITOR_PREFIX)}/summary", render_throughput(summary)
        self._loggers.write_text(tag, fenced(text), step=self._x_axis(step))
        ConsoleSink().write_text(tag, text, step=step)
        self.files.write_throughput(summary)


class RankOutput:
    """Where a rank other than 0 writes its own reports, if ``all_ranks`` is set: only to files."""

    shows_readings = False

    def __init__(self, files: RunFiles) -> None:
        self._files = files

    def write_profile(self, profile: Profile, *, step: int) -> None:
        """Write the rank's own report."""
        self._files.write_profile(profile, render_text(profile), keep_text=False)

    def write_reading(
        self,
        reading: MonitorReading,
        *,
        dp_size: int,
        tokens: int | None,
        flops: Any,
        model_flops_peak_sec: float | None,
        useful_flops_peak_sec: float | None,
        step: int,
    ) -> None:
        """Nothing: the run's loggers are rank 0's."""

    def write_throughput(self, summary: ThroughputSummary, *, step: int) -> None:
        """Write the summary of this rank's batches."""
        self._files.write_throughput(summary)


class _NoOutput:
    """The output of a rank other than 0 without ``all_ranks``: it writes nothing."""

    shows_readings = False

    def write_profile(self, profile: Profile, *, step: int) -> None:
        """Nothing: rank 0's report has what this rank measured."""

    def write_reading(
        self,
        reading: MonitorReading,
        *,
        dp_size: int,
        tokens: int | None,
        flops: Any,
        model_flops_peak_sec: float | None,
        useful_flops_peak_sec: float | None,
        step: int,
    ) -> None:
        """Nothing: the run's loggers are rank 0's."""

    def write_throughput(self, summary: ThroughputSummary, *, step: int) -> None:
        """Nothing."""


def tab_window(profile: Profile, *, prefix: str) -> TabWindow:
    """*profile* as TensorBoard's tab reads it, under a tag that no other window of the run has."""
    figures = json.dumps(window_figures(profile), allow_nan=False).encode()
    return TabWindow(tag=f"{prefix}/window/{profile.profile_step}", figures=figures, packed=packed(profile))


def own_pages(profile: Profile, *, prefix: str, charts_of: str) -> OwnPages:
    """*profile* on TensorBoard's own pages; its tags begin with *prefix*, and those of all loops with *charts_of*."""
    return OwnPages(
        pictures=functools.cache(lambda: _pictures(profile, prefix=prefix)),
        charts=scalar_charts(prefix=charts_of),
    )


def _pictures(profile: Profile, *, prefix: str) -> Mapping[str, Picture]:
    try:
        from lightning_flops.report.pictures import draw_profile

        return draw_profile(profile, prefix=prefix)
    except ImportError as error:  # Pillow is missing, or was built without fonts
        _say_there_are_no_pictures(str(error))
        return {}


@functools.cache
def _say_there_are_no_pictures(why: str) -> None:
    logger.warning("TensorBoard's page Images shows no FLOPs: they are drawn by Pillow (pip install pillow): %s", why)


class KnowsFolder(Protocol):
    """How the ranks of a run tell each other which folder files go to."""

    def tell_folder(self, folder: str) -> None:
        """Let all ranks know where rank 0's files go; empty if it leaves none."""

    def folder(self) -> str | None:
        """Where rank 0's files go; None if it leaves none."""


def output_of_rank(rank: int, output: LoggedOutput, *, ranks: KnowsFolder | None, config: ProfilerConfig) -> RunOutput:
    """Where *rank* writes: rank 0 to *output*; the others nowhere, or to files of their own with ``all_ranks``."""
    if rank == 0:
        if config.all_ranks and ranks is not None:
            ranks.tell_folder(output.files.folder() or "")
        return output
    if not config.all_ranks:
        return _NoOutput()
    folder = output.files.folder if ranks is None else functools.cache(ranks.folder)
    files = RunFiles(
        output_file=config.output_file, folder=folder, rank=rank, part=output.part, timer_only=config.timer_only
    )
    return RankOutput(files)


def _write_file(path: str, text: str) -> str | None:
    """Write *text* to *path* and return *path*; if it cannot be written, warn and return None."""

    def write() -> str:
        write_text_file(path, text)
        return path

    return _written(write)


def _written(write: Callable[[], str]) -> str | None:
    """What *write* returns, the path that it has written to; if that failed, warn and return None."""
    try:
        path = write()
    except OSError as error:
        logger.warning("the FLOPs report was not written: %s", error)
        return None
    logger.info("wrote %s", path)
    return path
