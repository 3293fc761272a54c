"""``lightning-flops trace FILE…``: where the time went in trace files of torch.profiler."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from lightning_flops.commands.terminal import Commands, add_forms, print_whole, terminal_width
from lightning_flops.commands.traces import add_peaks, analyzed
from lightning_flops.errors import ConfigError, LightningFlopsError
from lightning_flops.text.printable import shown

SORT_KEYS = ("total", "self", "mean", "max", "min", "calls", "name", "flops", "rate", "bytes")
"""Columns by which tables can be sorted."""


def add(commands: Commands) -> None:
    """Add the command to *commands*."""
    trace = commands.add_parser(
        "trace",
        help="say where the time went in trace files of torch.profiler",
        description=(
            "Say where the time went in trace files of torch.profiler, of CPU or GPU. FLOPs are worked out from the "
            "shapes in the file, where it has any and torch is installed; all else needs no torch."
        ),
    )
    trace.set_defaults(act=_print_trace)
    trace.add_argument(
        "files",
        nargs="+",
        metavar="FILE",
        help="trace, .json or .json.gz, path or URL, or a folder; several: one of each rank",
    )
    add_forms(trace, "every table whole")
    trace.add_argument(
        "--rows", type=_rows, default=20, metavar="N", help="rows of each long table, 0 for all (default: %(default)s)"
    )
    trace.add_argument(
        "--sort",
        choices=SORT_KEYS,
        metavar="KEY",
        help=f"sort every table that has such a column by {', '.join(SORT_KEYS)}; others keep their own order",
    )
    add_peaks(trace)
    trace.add_argument(
        "--threshold",
        type=_threshold,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a limit from which on advice is given, named as in advice_thresholds: straggler=1.05",
    )


def _threshold(text: str) -> tuple[str, float]:
    from lightning_flops.config import ProfilerConfig

    name, equals, value = text.partition("=")
    try:
        if not equals:
            raise ValueError
        limit = float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a name, = and a number, got {text!r}") from None
    try:
        ProfilerConfig(advice_thresholds={name: limit})
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name, limit


def _rows(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {shown(text)}")
    return int(text)


def _print_trace(options: argparse.Namespace) -> int:
    from lightning_flops.config import AdviceThresholds
    from lightning_flops.report.html_page import render_traces_page
    from lightning_flops.report.trace_text import render_traces
    from lightning_flops.sinks.file import write_text_file
    from lightning_flops.trace.many import analyze_files

    files, thresholds = _trace_files(options.files), AdviceThresholds(**dict(options.threshold))
    report = analyzed(analyze_files, files, options, thresholds=thresholds)
    shown = {"top_rows": options.rows or None, "sort": options.sort, "width": terminal_width()}
    print_whole(report.to_json() if options.json else render_traces(report, **shown))
    if options.html is not None:
        write_text_file(options.html, render_traces_page(report))
    return 0


def _trace_files(paths: Sequence[str]) -> list[str]:
    """*paths* with the trace files of each folder in its place; a file given twice would stand for two ranks."""
    from lightning_flops.sinks.profile_files import traces_in

    files = [file for path in paths for file in (traces_in(path) if os.path.isdir(path) else (path,))]
    seen: set[str] = set()
    for file in files:
        whole = file if "://" in file or "::" in file else os.path.realpath(file)
        if whole in seen:
            raise LightningFlopsError(f"{file}: given twice; give one trace for each rank")
        seen.add(whole)
    return files
