"""``lightning-flops report``: profiles as one page."""

from __future__ import annotations

import argparse
import os

from lightning_flops.commands.common import DEVICE_FIGURES, PATH, command, held_against, option, print_whole
from lightning_flops.errors import LightningFlopsError
from lightning_flops.sinks.console import say
from lightning_flops.units import printable


@command(
    option("path", metavar="PATH", help=PATH),
    option(
        "-o",
        "--output",
        metavar="FILE",
        help="path or URL of the page; by default beside the profile, or profile.html in the folder; of a URL, "
        "profile.html in the working directory",
    ),
    *DEVICE_FIGURES,
)
def report(options: argparse.Namespace) -> None:
    """Write profiles as one HTML page, which opens from disk, without a network."""
    from lightning_flops.report.html_page import render_page
    from lightning_flops.sinks.file import write_text_file
    from lightning_flops.sinks.profile_files import read_runs

    runs, output = read_runs(options.path), options.output or _page_of(options.path)
    problems = [problem for run in runs for problem in run.problems]
    if not any(run.windows for run in runs):
        raise LightningFlopsError("; ".join(problems))
    shown = [run._replace(windows=tuple(held_against(options, one) for one in run.windows)) for run in runs]
    write_text_file(output, render_page(shown))
    for problem in problems:
        say(problem)
    print_whole(f"{printable(output)}\n")


def _page_of(path: str) -> str:
    """Where the page of what lies at *path* goes by default: never to another machine, nor beside a pipe."""
    if os.path.isdir(path):
        return os.path.join(path, "profile.html")
    beside = os.path.isfile(path) and not path.startswith("/dev/")
    return f"{os.path.splitext(path)[0]}.html" if beside else "profile.html"
