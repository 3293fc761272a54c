"""``lightning-flops report PATH``: profiles as one HTML page."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from lightning_flops.commands.terminal import Commands, complain, say
from lightning_flops.commands.traces import add_peaks, held_against
from lightning_flops.errors import LightningFlopsError
from lightning_flops.text.printable import printable


def add(commands: Commands) -> None:
    """Add the command to *commands*."""
    report = commands.add_parser(
        "report",
        help="write profiles as one HTML page",
        description="Write profiles as one HTML page, which needs no network and opens from disk.",
    )
    report.set_defaults(act=_write_page)
    report.add_argument(
        "path", metavar="PATH", help="a profile.json, or a folder of logs with such files below it; path or URL"
    )
    report.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="path or URL of the page; by default beside the profile, or profile.html in the folder; of a URL, "
        "profile.html in the working directory",
    )
    add_peaks(report)


def _write_page(options: argparse.Namespace) -> int:
    from lightning_flops.report.html_page import ShownRun, render_page
    from lightning_flops.sinks.file import write_text_file
    from lightning_flops.sinks.profile_files import read_runs

    output = options.output or _page_of(options.path)
    try:
        runs = read_runs(options.path)
        problems = [problem for run in runs for problem in run.problems]
        if not any(run.windows for run in runs):
            raise LightningFlopsError("; ".join(problems))
        shown = [
            ShownRun(
                name=one.name, windows=tuple(held_against(options, it) for it in one.windows), problems=one.problems
            )
            for one in runs
        ]
        page = render_page(shown)
        write_text_file(output, page)
    except (LightningFlopsError, OSError) as error:
        complain(str(error))
        return 2
    for problem in problems:
        say(problem)
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.write(f"{printable(output)}\n")
    return 0


def _page_of(path: str) -> str:
    """Where the page of what lies at *path* goes if nobody says: never to another machine, nor beside a pipe."""
    if "://" in path or "::" in path or not (os.path.isfile(path) or os.path.isdir(path)) or path.startswith("/dev/"):
        return "profile.html"
    return os.path.join(path, "profile.html") if os.path.isdir(path) else f"{os.path.splitext(path)[0]}.html"
