"""``lightning-flops show PATH`` prints a profile, ``lightning-flops report PATH`` writes profiles as one HTML page."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from lightning_flops.commands.terminal import Status, command, option, print_whole, say
from lightning_flops.commands.traces import add_peaks, held_against
from lightning_flops.errors import LightningFlopsError
from lightning_flops.text.printable import printable

_PATH = "a profile.json, or a folder of logs with such files below it; path or URL"


@command(
    option("path", metavar="PATH", help=f"{_PATH}: the latest"),
    option("--detailed", action="store_true", help="append everything else that was measured"),
    add_peaks,
)
def show(options: argparse.Namespace) -> int:
    """Print a profile."""
    from lightning_flops.report.text import render_text
    from lightning_flops.sinks.profile_files import read_profile

    profile, _ = read_profile(options.path)
    print_whole(render_text(held_against(options, profile), detailed=options.detailed))
    return Status.DONE


@command(
    option("path", metavar="PATH", help=_PATH),
    option(
        "-o",
        "--output",
        metavar="FILE",
        help="path or URL of the page; by default beside the profile, or profile.html in the folder; of a URL, "
        "profile.html in the working directory",
    ),
    add_peaks,
)
def report(options: argparse.Namespace) -> int:
    """Write profiles as one HTML page, which opens from disk, without a network."""
    from lightning_flops.report.html_page import render_page
    from lightning_flops.sinks.file import write_text_file
    from lightning_flops.sinks.profile_files import read_runs

    runs, output = read_runs(options.path), options.output or _page_of(options.path)
    problems = [problem for run in runs for problem in run.problems]
    if not any(run.windows for run in runs):
        raise LightningFlopsError("; ".join(problems))
    shown = [replace(run, windows=tuple(held_against(options, one) for one in run.windows)) for run in runs]
    write_text_file(output, render_page(shown))
    for problem in problems:
        say(problem)
    print_whole(f"{printable(output)}\n")
    return Status.DONE


def _page_of(path: str) -> str:
    """Where the page of what lies at *path* goes by default: never to another machine, nor beside a pipe."""
    if os.path.isdir(path):
        return os.path.join(path, "profile.html")
    beside = os.path.isfile(path) and not path.startswith("/dev/")
    return f"{os.path.splitext(path)[0]}.html" if beside else "profile.html"
