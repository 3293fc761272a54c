"""``lightning-flops trace FILE…``: where the time went in trace files of torch.profiler."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_flops.commands.terminal import Commands, complain, print_whole, terminal_width
from lightning_flops.commands.traces import add_peaks, formulas, peaks, processors
from lightning_flops.errors import ConfigError, LightningFlopsError
from lightning_flops.text.json_text import MOST_DIGITS, shown

if TYPE_CHECKING:
    from lightning_flops.schema.trace import TracesReport

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
    trace.add_argument("--json", action="store_true", help="print every table whole, as JSON")
    trace.add_argument("--html", metavar="FILE", help="write them also as a page, to a path or URL")
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
    if not text.isdecimal() or len(text) > MOST_DIGITS:
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {shown(text)}")
    return int(text)


def _print_trace(options: argparse.Namespace) -> int:
    try:
        report = _analyzed(options)
        print_whole(report.to_json() if options.json else _trace_text(report, options))
        if options.html is not None:
            _write_traces_page(report, options.html)
    except (LightningFlopsError, OSError) as error:
        complain(str(error))
        return 2
    return 0


def _analyzed(options: argparse.Namespace) -> TracesReport:
    files = _trace_files(options.files)
    _refuse_repeated(files)
    from lightning_flops.config import AdviceThresholds
    from lightning_flops.sinks.progress import ProgressLine
    from lightning_flops.trace.many import analyze_files

    progress = ProgressLine(sys.stderr)
    try:
        return analyze_files(
            files,
            thresholds=AdviceThresholds(**dict(options.threshold)),
            formulas=formulas(),
            peaks=peaks(options),
            processes=processors(),
            progress=progress,
        )
    finally:
        progress.end()


def _trace_files(paths: Sequence[str]) -> list[str]:
    """*paths* with the trace files of each folder in its place."""
    from lightning_flops.sinks.trace_files import traces_in

    return [file for path in paths for file in (traces_in(path) if os.path.isdir(path) else (path,))]


def _refuse_repeated(files: Sequence[str]) -> None:
    """Refuse a file that is given twice: it would stand for two ranks."""
    seen: set[str] = set()
    for file in files:
        whole = file if "://" in file or "::" in file else os.path.realpath(file)
        if whole in seen:
            raise LightningFlopsError(f"{file}: given twice; give one trace for each rank")
        seen.add(whole)


def _trace_text(report: TracesReport, options: argparse.Namespace) -> str:
    from lightning_flops.report.trace_text import render_traces

    return render_traces(
        report,
        top_rows=options.rows or None,
        sort=options.sort,
        width=terminal_width(),
    )


def _write_traces_page(report: TracesReport, path: str) -> None:
    from lightning_flops.report.html_page import render_traces_page
    from lightning_flops.sinks.file import write_text_file

    write_text_file(path, render_traces_page(report))
