"""``lightning-flops trace``: what trace files of torch.profiler say, of one rank or of several."""

from __future__ import annotations

import argparse
import os
from typing import get_args

from lightning_flops.commands.common import (
    DEVICE_FIGURES,
    analyzed,
    command,
    in_forms,
    option,
    print_whole,
    terminal_width,
)
from lightning_flops.report.document import SortKey


def _rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


@command(
    option("files", nargs="+", metavar="FILE", help="a trace, path or URL, or a folder; several: one of each rank"),
    *in_forms("every table whole"),
    option("--rows", type=_rows, default=20, metavar="N", help="rows of each long table, 0 for all (default: 20)"),
    option(
        "--sort",
        choices=get_args(SortKey),
        metavar="KEY",
        help=f"sort every table that has such a column by {', '.join(get_args(SortKey))}; others keep their own order",
    ),
    option("--children", action="store_true", help="also list what each operator called and launched"),
    *DEVICE_FIGURES,
)
def trace(options: argparse.Namespace) -> None:
    """Say where the time went in trace files of torch.profiler.

    FLOPs are worked out from the shapes in the file, where it has any and torch is installed; all else
    needs no torch.
    """
    from lightning_flops.analysis.trace_report import join_analyses
    from lightning_flops.report.html_page import render_traces_page
    from lightning_flops.report.trace_document import render_traces
    from lightning_flops.sinks.file import write_text_file
    from lightning_flops.sinks.profile_files import Place

    files = [
        file for path in options.files for file in (Place(path).traces(f"{path}:") if os.path.isdir(path) else (path,))
    ]
    report = join_analyses(analyzed(files, options))
    shown = {
        "top_rows": options.rows or None,
        "sort": options.sort,
        "width": terminal_width(),
        "children": options.children,
    }
    print_whole(report.to_json() if options.json else render_traces(report, **shown))
    if options.html is not None:
        write_text_file(options.html, render_traces_page(report))
