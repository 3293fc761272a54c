"""Front door of the command line: ``lightning-flops run PROGRAM…``, ``lightning-flops trace FILE…``."""

from __future__ import annotations

import argparse
import io
import itertools
import os
import re
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

import lightning_flops
from lightning_flops.errors import ConfigError, LightningFlopsError
from lightning_flops.text.json_text import MOST_DIGITS, shown
from lightning_flops.text.printable import printable

PROGRAM = "lightning-flops"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that *arguments* (by default the program's) ask for; returns the exit status.

    0: done. 1: a file cannot be read, files do not belong together, or there is no such module to run; standard error
    says which. 2: wrong usage, or no such script to run. What a program under ``run`` raises is raised here.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # DeepSpeed's launcher, and torch's old one, put this argument first. It is meant for the program.
    launcher = list(itertools.takewhile(re.compile(r"--local[-_]rank=\d+").fullmatch, arguments))
    if arguments[len(launcher) : len(launcher) + 1] == ["run"]:
        options = _parser().parse_args(arguments[len(launcher) :])
        return _run(options.module, [*options.program[:1], *launcher, *options.program[1:]])
    return _print_trace(_parser().parse_args(arguments))


class _Parser(argparse.ArgumentParser):
    """Says in printable text what is wrong with arguments."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog=PROGRAM, description="What a PyTorch training run computes and waits for.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {lightning_flops.__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a training program unchanged, profiled",
        usage="%(prog)s [-h] [-m] PROGRAM [ARGUMENT ...]",
        description=(
            'Run a Python program unchanged. If it trains with DeepSpeed, the "flops_profiler" block of the config is '
            "taken over. If it trains with Lightning, every Trainer that has no FlopsProfilerCallback gets one; the "
            "environment variable LIGHTNING_FLOPS=0 prevents this."
        ),
        allow_abbrev=False,
    )
    run.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module's name, as after python -m")
    run.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="PROGRAM",
        help="a script, or a directory or zip file with a __main__.py; what follows it is its own",
    )
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
    trace.add_argument(
        "--threshold",
        type=_threshold,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a limit from which on advice is given, named as in advice_thresholds: straggler=1.05",
    )
    return parser


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


def _run(as_module: bool, program: Sequence[str]) -> int:
    from lightning_flops.doors.run_program import ProgramNotFoundError, run

    _open_doors()
    try:
        run(program[0], program[1:], as_module=as_module)
    except ProgramNotFoundError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return error.exit_status
    return 0


def _open_doors() -> None:
    """Have the program's training profiled. No framework is loaded before the program loads it."""
    from lightning_flops.doors.when_imported import when_imported
    from lightning_flops.entry_points import SWITCH

    os.environ.setdefault(SWITCH, "1")  # a value that is there is the user's
    when_imported("deepspeed", _install)


def _install(deepspeed: ModuleType) -> None:
    from lightning_flops.deepspeed import install

    install()


def _print_trace(options: argparse.Namespace) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a kernel's name must not fail for the terminal's encoding
    try:
        sys.stdout.write(_trace(options))
        sys.stdout.flush()
    except LightningFlopsError as error:
        sys.stderr.write(f"{PROGRAM}: {error}\n")
        return 1
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). At exit Python would flush into it and report the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _trace(options: argparse.Namespace) -> str:
    _refuse_repeated(options.files)
    try:
        from lightning_flops.analysis.trace import analyze_traces, load_trace
        from lightning_flops.config import AdviceThresholds
        from lightning_flops.report.trace_text import render_traces
    except ModuleNotFoundError as error:
        if error.name != "numpy":
            raise
        raise LightningFlopsError("reading traces needs numpy: pip install 'lightning-flops[trace]'") from error
    report = analyze_traces(
        [load_trace(file) for file in options.files], thresholds=AdviceThresholds(**dict(options.threshold))
    )
    if options.json:
        return report.to_json()
    return render_traces(report, top_rows=options.rows or None, children=options.children)


def _refuse_repeated(files: Sequence[str]) -> None:
    """Refuse a file that is given twice: it would stand for two ranks."""
    seen: set[str] = set()
    for file in files:
        whole = file if "://" in file or "::" in file else os.path.realpath(file)
        if whole in seen:
            raise LightningFlopsError(f"{file}: given twice; give one trace for each rank")
        seen.add(whole)
