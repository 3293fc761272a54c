"""``lightning-flops compare A B``: why the steps of one run take longer than those of another."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from typing import Any

from lightning_flops.commands import terminal
from lightning_flops.commands.terminal import PROGRAM, Commands, complain, print_whole
from lightning_flops.commands.traces import add_peaks, analyzed, held_against
from lightning_flops.errors import ComparisonError

_INCONCLUSIVE = {None: 3, "fail": 1, "pass": 0}
"""Exit status of a condition that a starved run leaves open, by ``--starved``."""


def add(commands: Commands) -> None:
    """Add the command to *commands*."""
    compare = terminal.add_command(
        commands,
        "compare",
        "say why the steps of one run take longer than those of another, by profiles or traces",
        "The causes are more work, worse efficiency, more waiting and noise: of profiled runs by part of the step and "
        "by module, of traces of torch.profiler by part, kernel, operator and collective.",
        epilog=(
            "examples:\n"
            f"  {PROGRAM} compare lightning_logs/version_0 lightning_logs/version_1\n"
            f"  {PROGRAM} compare before.pt.trace.json.gz after.pt.trace.json.gz\n"
            f"  {PROGRAM} compare --fail-if 'global_step_sec > 1.05' --fail-if 'hardware_flops > 1' main branch\n"
            "\n"
            "exit status: 0: done. 1: a condition of --fail-if holds. 2: something cannot be read or compared, and\n"
            "standard error says why. 3: a condition is inconclusive: a run was starved of processors."
        ),
    )
    compare.set_defaults(act=_compare)
    where = "profile.json of a run or its folder of logs; or a trace, or a folder with one of each rank; path or URL"
    compare.add_argument("a", metavar="A", help=f"the run before: {where}")
    compare.add_argument("b", metavar="B", help="the run after, of the same kind")
    terminal.add_forms(compare, "the whole comparison")
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
    from lightning_flops.analysis.compare_rules import judge
    from lightning_flops.sinks.file import write_text_file

    comparison, render, render_page = _compared(options)
    if not options.quiet:
        print_whole(comparison.to_json() if options.json else render(comparison, width=terminal.terminal_width()))
    statuses = {0}
    for condition in options.fail_if:
        try:
            verdict, words = judge(comparison, condition)
        except ComparisonError as error:
            complain(f"--fail-if {error}", command="compare")
            statuses.add(2)
            continue
        complain(f"--fail-if '{condition}' {verdict}: {words}", command="compare")
        statuses.add(_INCONCLUSIVE[options.starved] if verdict == "is inconclusive" else int(verdict == "holds"))
    if options.html is not None:
        write_text_file(options.html, render_page(comparison))
    return next(status for status in (2, 1, 3, 0) if status in statuses)


def _compared(options: argparse.Namespace) -> tuple[Any, Callable[..., str], Callable[..., str]]:
    """The comparison of two profiles, or of the traces of two runs, and what makes its text and its page."""
    from lightning_flops.sinks.profile_files import traces_at

    sources = (options.a, options.b)
    a, b = (traces_at(path) for path in sources)
    if a is not None and b is not None:
        from lightning_flops.analysis.compare_traces import compare_traces
        from lightning_flops.report.compare_traces_text import render_trace_comparison
        from lightning_flops.report.html_page import render_trace_comparison_page
        from lightning_flops.trace.many import analyze_each

        each = analyzed(analyze_each, [*a, *b], options, stepwise=True)
        comparison = compare_traces(each[: len(a)], each[len(a) :], sources=sources)
        return comparison, render_trace_comparison, functools.partial(render_trace_comparison_page, sources=sources)
    from lightning_flops.analysis.compare import compare_profiles
    from lightning_flops.report.compare_text import render_comparison
    from lightning_flops.report.html_page import render_comparison_page
    from lightning_flops.sinks.profile_files import read_profile

    if a is not None or b is not None:
        trace, profile = sources if b is None else (options.b, options.a)
        raise ComparisonError(
            f"{trace} is a trace and {read_profile(profile)[1]} a profile: a trace's steps ran under torch.profiler, "
            "which slows them down, and those that a profile times did not; give two traces, as trace_dir keeps them"
        )
    (first, source_a), (second, source_b) = map(read_profile, sources)
    first, second = held_against(options, first), held_against(options, second)
    return compare_profiles(first, second, sources=(source_a, source_b)), render_comparison, render_comparison_page
