"""``lightning-flops trace FILE…``: where the time went in trace files of torch.profiler."""

from __future__ import annotations

import argparse
import os

from lightning_flops.commands.terminal import Commands, add_command, add_forms, print_whole, terminal_width
from lightning_flops.commands.traces import add_peaks, analyzed

SORT_KEYS = ("total", "self", "mean", "max", "min", "calls", "name", "flops", "rate", "bytes")
"""Columns by which tables can be sorted."""


def add(commands: Commands) -> None:
    """Add the command to *commands*."""
    command = add_command(commands, trace)
    command.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="trace, .json or .json.gz, path or URL, or a folder; several: one of each rank",
    )
    add_forms(command, "every table whole")
    command.add_argument(
        "--rows", type=_rows, default=20, metavar="N", help="rows of each long table, 0 for all (default: %(default)s)"
    )
    command.add_argument(
        "--sort",
        choices=SORT_KEYS,
        metavar="KEY",
        help=f"sort every table that has such a column by {', '.join(SORT_KEYS)}; others keep their own order",
    )
    add_peaks(command)


def _rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


def trace(options: argparse.Namespace) -> int:
    """Say where the time went in trace files of torch.profiler.

    FLOPs are worked out from the shapes in the file, where it has any and torch is installed; all else
    needs no torch.
    """
    from lightning_flops.report.html_page import render_traces_page
    from lightning_flops.report.trace_text import render_traces
    from lightning_flops.sinks.file import write_text_file
    from lightning_flops.sinks.profile_files import traces_in
    from lightning_flops.trace.many import analyze_each, join_analyses

    files = [file for path in options.files for file in (traces_in(path) if os.path.isdir(path) else (path,))]
    report = join_analyses(analyzed(analyze_each, files, options))
    shown = {"top_rows": options.rows or None, "sort": options.sort, "width": terminal_width()}
    print_whole(report.to_json() if options.json else render_traces(report, **shown))
    if options.html is not None:
        write_text_file(options.html, render_traces_page(report))
    return 0
