"""Where the reports of one run go, whatever framework drives it: files of our own, the run's loggers and its console.

Texts and files are made on the worker's thread. What that returns is called on the training thread: it gives them to
the loggers, which are the user's.
"""

from __future__ import annotations

import functools
import logging
import os
import textwrap
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass

import msgspec

from lightning_flops.config import OWN_FOLDER, ProfilerConfig
from lightning_flops.report.html_page import Window, packed, render_latest, window_figures
from lightning_flops.report.scalars import MONITOR_PREFIX, profile_scalars
from lightning_flops.report.text import fenced, figures, render_advice, render_logged, render_text
from lightning_flops.schema.profile import Profile, ThroughputSummary
from lightning_flops.sinks.console import to_log
from lightning_flops.sinks.file import (
    numbered,
    remove_file,
    shown_path,
    write_new_file,
    write_own_file,
    write_text_file,
)
from lightning_flops.sinks.services import Services, event_file_name, tab_events
from lightning_flops.units import package_logger

logger = package_logger(__name__)

_LINE = 200  # characters of the line that says what came out and where it is, unless the place is longer
WINDOWS_KEPT = 8  # the latest windows of a run, on the page and the tab: their files do not grow for ever
_JSON, _PAGE, _TEXT, _THROUGHPUT = _NAMES = ("profile.json", "profile.html", "profile.txt", "throughput.json")
_ACCOUNT = "out_of_memory.txt"


class RunFiles:
    """The files that one rank writes about its run, in a folder of ours. No file of another run is replaced.

    Each file is written anew for each window. *folder* returns the folder of the run's logs, which ours lies in; None:
    no files but a named text report. Names have a *rank* other than 0 in them, which has no pages, and a *part*, the
    word for a run that is not the first training of its program.
    """

    def __init__(
        self, config: ProfilerConfig, folder: Callable[[], str | None], *, rank: int = 0, part: str = ""
    ) -> None:
        self.folder = functools.cache(folder)
        self._output_file = config.output_file
        self._suffix = (f".{part}" if part else "") + (f".rank{rank}" if rank else "")
        self._writes_throughput = config.timer_only  # otherwise only beside a profile
        self._windows: deque[Window] | None = deque(maxlen=WINDOWS_KEPT) if config.html and not rank else None
        self._number: int | None = None
        self._has_failed = False
        self._tabs: list[str] = []
        self.profile_path: str | None = None  # of the latest profile.json

    def write_profile(self, profile: Profile, text: str, *, keep_text: bool) -> dict[str, str | None]:
        """The path of each file written by ``page``, ``text`` and ``json``; None: not asked for, or failed."""
        self._writes_throughput = True
        json_path, windows = self._write(_JSON, profile.to_json), self._windows
        html_path = None if windows is None else self._write(_PAGE, lambda: render_latest(profile, windows))
        text_path = self._write(_TEXT, lambda: text) if keep_text and self._output_file is None else None
        if self._output_file is not None:  # last: it may lie on a file system that hangs
            path = self._named(self._output_file)
            text_path = self._written(path, lambda: write_text_file(path, text))
        self.profile_path = json_path
        return {"page": html_path, "text": text_path, "json": json_path}

    def summary(self, summary: ThroughputSummary) -> None:
        """Write *summary*, unless a profile was asked for and there is none."""
        if self._writes_throughput:
            self._write(_THROUGHPUT, summary.to_json)

    def account(self, text: str) -> str | None:
        """The path of the file with the *text* on a step that ran out of memory; None: it was not written."""
        return self._write(_ACCOUNT, lambda: text)

    def write_tab(self, profile: Profile, *, prefix: str) -> None:
        """Write *profile* for TensorBoard's tab, under a tag below *prefix* that no other window of the run has."""
        if self._windows is None or (place := self._place()) is None:
            return
        try:
            events = tab_events(
                tag=f"{prefix}/window/{profile.profile_step}",
                figures=msgspec.json.encode(window_figures(profile)),
                packed=packed(profile),
                step=profile.report_step,
            )
        except ImportError:  # the run's writer is another package's
            return
        path = f"{place}/{event_file_name(len(self._tabs) + 1)}"
        self._tabs.append(path)
        self._written(path, lambda: write_own_file(path, events))
        if len(self._tabs) > WINDOWS_KEPT:
            remove_file(self._tabs[-1 - WINDOWS_KEPT])

    def _write(self, name: str, content: Callable[[], str]) -> str | None:
        if (place := self._place()) is None:
            return None
        path = self._named(f"{place}/{name}")

        def write() -> str:
            if self._number is None:
                beside = [self._named(f"{place}/{one}") for one in _NAMES]
                self._number = write_new_file(path, [content().encode()], beside=beside)
            else:
                write_own_file(numbered(path, self._number), content().encode())
            return numbered(path, self._number)

        return self._written(path, write)

    def _written(self, path: str, write: Callable[[], str | None]) -> str | None:
        """Where *write* has written, *path* if it does not say; None if that failed, which is one warning a run."""
        try:
            path = write() or path
        except OSError as error:
            level = logging.DEBUG if self._has_failed else logging.WARNING
            self._has_failed = True
            logger.log(level, "the FLOPs report was not written: %s", error)
            return None
        logger.info("wrote %s", path)
        return path

    def _place(self) -> str | None:
        """Our folder: that of the logs if it has our name, else the one of our name in it, unless that is a package."""
        folder = self.folder()
        if folder is None:
            return None
        if os.path.basename(folder.rstrip("/")) != OWN_FOLDER:
            folder = os.path.join(folder, OWN_FOLDER)
        return f"{folder}_logs" if os.path.isfile(os.path.join(folder, "__init__.py")) else folder

    def _named(self, path: str) -> str:
        """Where this rank writes what rank 0 of a training run writes to *path*: ``flops.test.rank3.txt``."""
        root, suffix = os.path.splitext(path)
        return f"{root}{self._suffix}{suffix}"


@dataclass(eq=False)
class LoggedOutput:
    """Where a rank shows the reports of one run: in files, and rank 0 in its loggers and on the console."""

    config: ProfilerConfig
    _: KW_ONLY
    loggers: Services  # those of the run
    folder: Callable[[], str | None]  # as of ``RunFiles``
    console: Callable[[str], None] = to_log  # shows a report if no file was named for it
    text_file: bool = True  # a report that no logger shows, and that no file was named for, gets a file of its own
    announce: Callable[[str], None] = lambda sentence: None  # says what came out and where it is, once, on a line
    nowhere: str = ""  # what to say in the place of where it is, if no file keeps the report and no logger shows it
    rank: int = 0  # whose files they are
    part: str = ""  # a word that tags have below their prefix if the run is not the first training of its program

    def __post_init__(self) -> None:
        self.files = RunFiles(self.config, self.folder, rank=self.rank, part=self.part)
        # The tags of a training run and of another loop never meet.
        self.prefix, self.monitor_prefix = (
            f"{prefix}/{self.part}" if self.part else prefix for prefix in (self.config.tag_prefix, MONITOR_PREFIX)
        )

    def report(self, profile: Profile) -> Callable[[int], None]:
        """Write the files of *profile*; what is returned shows it everywhere else, given the run's step."""
        text, context = render_text(profile), profile.context
        scalars = profile_scalars(profile, prefix=self.prefix, monitor_prefix=self.monitor_prefix)
        if self.loggers.has_board:
            self.files.write_tab(profile, prefix=self.prefix)
        paths = self.files.write_profile(profile, text, keep_text=self.text_file and not self.loggers.has_board)
        advice, logged = fenced(render_advice(profile)), fenced(render_logged(profile))
        whose = "" if context.trains else f" of the {context.run_word}"
        sentence = f"FLOPs of {context.step_word} {profile.profile_step}{whose}: {figures(profile)}"

        def show(step: int) -> None:
            tag = f"{self.prefix}/profile"
            self.loggers.write_scalars(scalars, step=step)
            shown = self.loggers.write_text(tag, logged, step=step)
            self.loggers.write_text(f"{self.prefix}/advice", advice, step=step)
            if self.config.output_file is None:
                self.console(text)
            self._say(sentence, {**paths, "tag": tag if shown else None})

        return show

    def _say(self, sentence: str, places: Mapping[str, str | None]) -> None:
        """Announce the first report and the place that has most of it: later ones are in the same files."""
        words = {"page": "Page: ", "text": "Report: ", "tag": "In the loggers, the text ", "json": "Profile: "}
        where = next((f"{words[name]}{shown_path(place)}" for name in words if (place := places[name])), self.nowhere)
        announce, self.announce = self.announce, lambda sentence: None
        announce(f"{textwrap.shorten(sentence, max(20, _LINE - len(where) - 2), placeholder=' …')}. {where}".rstrip())

    def summary(self, summary: ThroughputSummary) -> Callable[[int], None]:
        """Write the file of the run's *summary*; what is returned shows it everywhere else, given the run's step."""
        self.files.summary(summary)
        text, tag = render_text(summary), f"{self.monitor_prefix}/summary"

        def show(step: int) -> None:
            self.loggers.write_text(tag, fenced(text), step=step)
            to_log(text)

        return show
