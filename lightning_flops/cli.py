"""Front door of the command line: ``lightning-flops trace FILE…``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import lightning_flops
from lightning_flops.errors import LightningFlopsError

PROGRAM = "lightning-flops"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that *arguments* (by default the program's) ask for; returns the exit status.

    0: done. 1: a file cannot be read, or files do not belong together; standard error names it. 2: wrong usage.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a kernel's name must not fail for the terminal's encoding
    try:
        sys.stdout.write(_trace(options))
        sys.stdout.flush()
    except LightningFlopsError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1
    except BrokenPipeError:
        # The reader has seen enough (`| head`); at exit Python would flush into the closed pipe and complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="What a PyTorch training run computes and waits for.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {lightning_flops.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    trace = commands.add_parser(
        "trace",
        help="say where the time went in trace files of torch.profiler",
        description="Say where the time went in trace files of torch.profiler, of CPU or GPU, without torch.",
    )
    trace.add_argument(
        "files", nargs="+", metavar="FILE", help="trace, .json or .json.gz, path or URL; several: one of each rank"
    )
    trace.add_argument("--children", action="store_true", help="show what each operator called and launched itself")
    trace.add_argument("--json", action="store_true", help="print every table whole, as JSON")
    trace.add_argument(
        "--rows", type=_rows, default=20, metavar="N", help="rows of each long table, 0 for all (default: %(default)s)"
    )
    return parser


def _rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


def _trace(options: argparse.Namespace) -> str:
    try:
        from lightning_flops.analysis.trace import analyze_traces, load_trace
        from lightning_flops.report.trace_text import render_traces
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise LightningFlopsError("reading traces needs numpy: pip install 'lightning-flops[trace]'") from error
    report = analyze_traces([load_trace(file) for file in options.files])
    if options.json:
        return report.to_json()
    return render_traces(report, top_rows=options.rows or None, children=options.children)
