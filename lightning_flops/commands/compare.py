"""``lightning-flops compare A B``: why the steps of one run take longer than those of another."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_flops.commands.terminal import AS_WRITTEN, PROGRAM, Commands, complain, print_whole, terminal_width
from lightning_flops.commands.traces import add_peaks, formulas, held_against, peaks, processors
from lightning_flops.errors import ComparisonError, ConfigError, LightningFlopsError

if TYPE_CHECKING:
    from lightning_flops.schema.comparison import Comparison
    from lightning_flops.schema.profile import Profile
    from lightning_flops.schema.trace_comparison import TraceComparison

_complain = functools.partial(complain, command="compare")

_INCONCLUSIVE = {None: 3, "fail": 1, "pass": 0}
"""Exit status of a condition that a starved run leaves open, by ``--starved``."""


def add(commands: Commands) -> None:
    """Add the command to *commands*."""
    compare = commands.add_parser(
        "compare",
        help="say why the steps of one run take longer than those of another, by profiles or traces",
        description=(
            "Give every millisecond between the steps of two profiled runs a cause: more work, worse efficiency or\n"
            "more waiting, by part of the step and by module, and say what is noise. Of two traces of torch.profiler,\n"
            "say which part, phase, module, kernel and operator takes longer, and what is noise."
        ),
        epilog=(
            "examples:\n"
            f"  {PROGRAM} compare before/profile.json after/profile.json\n"
            f"  {PROGRAM} compare lightning_logs/version_0 lightning_logs/version_1\n"
            f"  {PROGRAM} compare before.pt.trace.json.gz after.pt.trace.json.gz\n"
            f"  {PROGRAM} compare --json s3://runs/main/profile.json logs > difference.json\n"
            f"  {PROGRAM} compare --fail-if 'global_step_sec > 1.05' --fail-if 'hardware_flops > 1' main branch\n"
            "\n"
            "exit status: 0: done. 1: a condition of --fail-if holds. 2: something cannot be read or compared, and\n"
            "standard error says why. 3: a condition is inconclusive: a run was starved of processors."
        ),
        formatter_class=AS_WRITTEN,
        allow_abbrev=False,
    )
    compare.set_defaults(act=_compare)
    where = "profile.json of a run or its folder of logs; or a trace, or a folder with one of each rank; path or URL"
    compare.add_argument("a", metavar="A", help=f"what is compared with: {where}")
    compare.add_argument("b", metavar="B", help="what is compared, likewise")
    compare.add_argument("--json", action="store_true", help="print the whole comparison as JSON")
    compare.add_argument("--html", metavar="FILE", help="write it also as a page, to a path or URL")
    compare.add_argument("--quiet", action="store_true", help="print nothing but the verdicts on conditions")
    add_peaks(compare)
    compare.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help=(
            "end with status 1 if this holds beyond noise: one of 'Figures of both', which stands for its ratio "
            "B / A, one of > >= < <=, and a number; may be given several times"
        ),
    )
    compare.add_argument(
        "--starved",
        choices=("fail", "pass"),
        help="what a condition on the wall clock comes to if a run was starved of processors: status 1 or 0, not 3",
    )


def _compare(options: argparse.Namespace) -> int:
    from lightning_flops.analysis.compare_rules import SETTING, judge, parse_condition
    from lightning_flops.sinks.file import write_text_file

    try:
        conditions = [parse_condition(text) for text in options.fail_if]
        comparison, text, page = _compared(options)
    except ConfigError as wrong:
        _complain(str(wrong).replace(SETTING, "--fail-if", 1))
        return 2
    except LightningFlopsError as error:
        _complain(str(error))
        return 2
    if not options.quiet:
        print_whole(comparison.to_json() if options.json else text)
    status = 0
    if options.html is not None:
        try:
            write_text_file(options.html, page)
        except OSError as error:
            _complain(str(error))
            status = 2
    statuses = {status}
    for condition in conditions:
        try:
            verdict = judge(comparison, condition)
        except ComparisonError as error:
            _complain(f"--fail-if {error}")
            statuses.add(2)
            continue
        holds = "is inconclusive" if verdict.inconclusive else "holds" if verdict.holds else "does not hold"
        _complain(f"--fail-if '{condition.text}' {holds}: {verdict.words}")
        statuses.add(_INCONCLUSIVE[options.starved] if verdict.inconclusive else int(verdict.holds))
    return next(status for status in (2, 1, 3, 0) if status in statuses)


def _compared(options: argparse.Namespace) -> tuple[Comparison | TraceComparison, str, str]:
    """The comparison, its text, and its page if one is wanted.

    Raises:
        LightningFlopsError: the two cannot be read or compared.
    """
    from lightning_flops.sinks.trace_files import traces_at

    traces = [traces_at(path) for path in (options.a, options.b)]
    if traces[0] is not None and traces[1] is not None:
        return _compared_traces(options, traces[0], traces[1])
    from lightning_flops.analysis.compare import compare_profiles
    from lightning_flops.report.compare_text import render_comparison
    from lightning_flops.sinks.profile_files import read_profile

    if any(files is not None for files in traces):
        trace, profile = (options.b, options.a) if traces[0] is None else (options.a, options.b)
        raise ComparisonError(_why_not_both_kinds(trace, *read_profile(profile)))
    (a, source_a), (b, source_b) = read_profile(options.a), read_profile(options.b)
    a, b = held_against(options, a), held_against(options, b)
    comparison = compare_profiles(a, b, sources=(source_a, source_b))
    page = "" if options.html is None else comparison.to_html()
    return comparison, render_comparison(comparison, width=terminal_width()), page


def _compared_traces(
    options: argparse.Namespace, a: Sequence[str], b: Sequence[str]
) -> tuple[TraceComparison, str, str]:
    from lightning_flops.analysis.compare_traces import compare_traces
    from lightning_flops.report.compare_traces_text import render_trace_comparison
    from lightning_flops.report.html_page import render_trace_comparison_page
    from lightning_flops.sinks.progress import ProgressLine
    from lightning_flops.trace.many import analyze_each

    progress = ProgressLine(sys.stderr)
    try:
        analyzed = analyze_each(
            [*a, *b],
            stepwise=True,
            formulas=formulas(),
            peaks=peaks(options),
            processes=processors(),
            progress=progress,
        )
    finally:
        progress.end()
    sources = (options.a, options.b)
    comparison = compare_traces(analyzed[: len(a)], analyzed[len(a) :], sources=sources)
    page = "" if options.html is None else render_trace_comparison_page(comparison, sources=sources)
    return comparison, render_trace_comparison(comparison, width=terminal_width()), page


def _why_not_both_kinds(trace: str, profile: Profile, source: str) -> str:
    kept = profile.traced.files if profile.traced is not None else ()
    return (
        f"{trace} is a trace and {source} a profile: a trace's steps ran under torch.profiler, which slows them down, "
        "and those that a profile times did not. Give two traces"
        + (f"; that of {source} is {kept[0]}" if kept else f"; {source} kept none, as trace_dir does")
    )
