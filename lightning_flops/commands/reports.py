"""``lightning-flops show``, ``report``, ``trace`` and ``compare``: what profiles and traces say."""

from __future__ import annotations

import argparse
import importlib.util
import os
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, get_args

from lightning_flops.commands.terminal import Status, command, complain, in_forms, option, print_whole, terminal_width
from lightning_flops.errors import ComparisonError, ConfigError, LightningFlopsError
from lightning_flops.report.document import SortKey
from lightning_flops.sinks.console import say
from lightning_flops.units import printable

if TYPE_CHECKING:
    from lightning_flops.schema.comparison import Comparison
    from lightning_flops.schema.profile import Profile
    from lightning_flops.trace import Peaks
    from lightning_flops.trace.recorded import RecordedInputs, RecordedWork
    from lightning_flops.trace.report import AnalyzedTrace


def analyzed(files: Sequence[str], options: argparse.Namespace, **settings: Any) -> list[AnalyzedTrace]:
    """What trace *files* say, one after the other, with the figures that were given."""
    from lightning_flops.trace import load_trace
    from lightning_flops.trace.report import analyze_one

    formulas = recorded_work if importlib.util.find_spec("torch") else None
    return [analyze_one(load_trace(file), formulas=formulas, peaks=peaks(options), **settings) for file in files]


def recorded_work(operator: str, inputs: RecordedInputs) -> RecordedWork:
    """FLOPs of a call in a trace, by the counter's formulas: the first call imports torch."""
    from lightning_flops.measure.counting.recorded_calls import recorded_work

    return recorded_work(operator, inputs)


def add_peaks(parser: argparse.ArgumentParser) -> None:
    """Add the options that give a device's own figures."""
    parser.add_argument(
        "--peak",
        type=_peak,
        action="append",
        default=[],
        metavar="DTYPE=FLOPS",
        help="dense peak of one device in FLOP/s, for a dtype or for all: bfloat16=312e12, or 312e12; wins over the "
        "table of devices, may be given several times",
    )
    parser.add_argument(
        "--bandwidth", type=_number, metavar="BYTES", help="bandwidth of one device's memory in bytes/s: 2.0e12"
    )


def peaks(options: argparse.Namespace) -> Peaks:
    """The figures that were given."""
    from lightning_flops.trace import Peaks

    given: dict[str | None, float] = dict(options.peak)
    by_dtype = {dtype: peak for dtype, peak in given.items() if dtype is not None}
    if None in given and by_dtype:
        raise ConfigError("--peak must be one figure for all dtypes, or one for each of them, and both were given")
    return Peaks(flops_per_sec=by_dtype or given.get(None), memory_bytes_per_sec=options.bandwidth)


def held_against(options: argparse.Namespace, profile: Profile) -> Profile:
    """*profile* with the figures that were given, or, if none were, with those that this machine has measured."""
    from lightning_flops.analysis.peaks import with_given_peaks, with_measured_peaks

    given = peaks(options)
    return with_measured_peaks(profile) if given == type(given)() else with_given_peaks(profile, **asdict(given))


def _peak(text: str) -> tuple[str | None, float]:
    from lightning_flops.config import ProfilerConfig

    dtype, equals, value = text.rpartition("=")
    peak = _number(value)
    try:
        kept = ProfilerConfig(peak_flops_per_sec={dtype: peak} if equals else peak).peak_flops_per_sec
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return next(iter(kept)) if isinstance(kept, dict) else None, peak


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return value


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
    shown = [run._replace(windows=tuple(held_against(options, one) for one in run.windows)) for run in runs]
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


def _rows(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be an integer >= 0, got {text!r}")
    return int(text)


@command(
    option("files", nargs="+", metavar="FILE", help="a trace, path or URL, or a folder; several: one of each rank"),
    in_forms("every table whole"),
    option("--rows", type=_rows, default=20, metavar="N", help="rows of each long table, 0 for all (default: 20)"),
    option(
        "--sort",
        choices=get_args(SortKey),
        metavar="KEY",
        help=f"sort every table that has such a column by {', '.join(get_args(SortKey))}; others keep their own order",
    ),
    add_peaks,
)
def trace(options: argparse.Namespace) -> int:
    """Say where the time went in trace files of torch.profiler.

    FLOPs are worked out from the shapes in the file, where it has any and torch is installed; all else
    needs no torch.
    """
    from lightning_flops.report.html_page import render_traces_page
    from lightning_flops.report.trace_document import render_traces
    from lightning_flops.sinks.file import write_text_file
    from lightning_flops.sinks.profile_files import traces_in
    from lightning_flops.trace.report import join_analyses

    files = [file for path in options.files for file in (traces_in(path) if os.path.isdir(path) else (path,))]
    report = join_analyses(analyzed(files, options))
    shown = {"top_rows": options.rows or None, "sort": options.sort, "width": terminal_width()}
    print_whole(report.to_json() if options.json else render_traces(report, **shown))
    if options.html is not None:
        write_text_file(options.html, render_traces_page(report))
    return Status.DONE


_LEFT_OPEN = {None: Status.INCONCLUSIVE, "fail": Status.HOLDS, "pass": Status.DONE}
"""Exit status of a condition that a starved run leaves open, by ``--starved``."""
_WHERE = "profile.json of a run or its folder of logs; or a trace, or a folder with one of each rank; path or URL"


@command(
    option("a", metavar="A", help=f"the run before: {_WHERE}"),
    option("b", metavar="B", help="the run after, of the same kind"),
    in_forms("the whole comparison"),
    option("--quiet", action="store_true", help="print nothing but the verdicts on conditions"),
    add_peaks,
    option(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="end with status 1 if this holds beyond noise: one of 'Figures of both', which stands for its ratio B / A,"
        " one of > >= < <=, and a number; may be given several times",
    ),
    option(
        "--starved",
        choices=("fail", "pass"),
        help="what a condition on the wall clock comes to if a run was starved of processors: status 1 or 0, not 3",
    ),
)
def compare(options: argparse.Namespace) -> int:
    """Say why the steps of one run take longer than those of another, by profiles or traces.

    The causes are more work, worse efficiency, more waiting and noise: of profiled runs by part of
    the step and by module, of traces of torch.profiler by part, kernel, operator and collective.

    Examples:
      lightning-flops compare lightning_logs/version_0 lightning_logs/version_1
      lightning-flops compare before.pt.trace.json.gz after.pt.trace.json.gz
      lightning-flops compare --fail-if 'global_step_sec > 1.05' --fail-if 'hardware_flops > 1' main branch

    exit status: 0: done. 1: a condition of --fail-if holds. 2: something cannot be read or compared,
    and standard error says why. 3: a condition is inconclusive: a run was starved of processors.
    """
    from lightning_flops.analysis.compare_figures import judge
    from lightning_flops.report.compare_text import render_comparison
    from lightning_flops.sinks.file import write_text_file

    comparison = _compared(options)
    if not options.quiet:
        print_whole(comparison.to_json() if options.json else render_comparison(comparison, width=terminal_width()))
    ends = {"holds": Status.HOLDS, "does not hold": Status.DONE, "is inconclusive": _LEFT_OPEN[options.starved]}
    statuses = [Status.DONE]
    for condition in options.fail_if:
        try:
            verdict, words = judge(comparison, condition)
        except ComparisonError as error:
            complain(f"--fail-if {error}", command="compare")
            statuses.append(Status.FAILED)
            continue
        complain(f"--fail-if '{condition}' {verdict}: {words}", command="compare")
        statuses.append(ends[verdict])
    if options.html is not None:
        write_text_file(options.html, comparison.to_html())
    return max(statuses, key=(Status.DONE, Status.INCONCLUSIVE, Status.HOLDS, Status.FAILED).index)


def _compared(options: argparse.Namespace) -> Comparison:
    """The comparison of two profiles, or of the traces of two runs."""
    from lightning_flops.sinks.profile_files import read_profile, traces_at

    sources = (options.a, options.b)
    a, b = map(traces_at, sources)
    if a is not None and b is not None:
        from lightning_flops.analysis.compare_traces import compare_traces

        each = analyzed([*a, *b], options, stepwise=True)
        return compare_traces(each[: len(a)], each[len(a) :], sources=sources)
    from lightning_flops.analysis.compare import compare_profiles

    if a is not None or b is not None:
        trace, profile = sources if b is None else sources[::-1]
        raise ComparisonError(
            f"{trace} is a trace and {read_profile(profile)[1]} a profile: a trace's steps ran under torch.profiler, "
            "which slows them down, and those that a profile times did not; give two traces, as trace_dir keeps them"
        )
    (first, source_a), (second, source_b) = map(read_profile, sources)
    first, second = held_against(options, first), held_against(options, second)
    return compare_profiles(first, second, sources=(source_a, source_b))
