"""``lightning-flops compare``: what takes longer in one run than in another, and conditions for a CI job."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_flops.commands.common import (
    DEVICE_FIGURES,
    Status,
    analyzed,
    command,
    held_against,
    in_forms,
    option,
    print_report,
)
from lightning_flops.errors import ComparisonError
from lightning_flops.sinks.console import say

if TYPE_CHECKING:
    from lightning_flops.schema.comparison import Comparison

# Exit status of a condition that the runs leave open, by ``--inconclusive``.
_LEFT_OPEN = {None: Status.INCONCLUSIVE, "fail": Status.HOLDS, "pass": Status.DONE}
AGAINST = "\0--"  # stands for "--", which parsers of arguments drop; no path has such a character
_WHERE = (
    "profile.json of a run or its folder of logs, of a run that was only timed its throughput.json; or a trace, or a "
    "folder with one of each rank; path or URL"
)


@command(
    option("a", metavar="A", help=f"the run before: {_WHERE}"),
    option("b", metavar="B", help="the run after, of the same kind"),
    option(
        "more",
        nargs="*",
        metavar="RUN",
        help="several profiled runs a side, with -- between the sides: A1 A2 A3 -- B1 B2 B3; noise is then theirs",
    ),
    *in_forms("the whole comparison"),
    option("--quiet", action="store_true", help="print nothing but the verdicts on conditions"),
    *DEVICE_FIGURES,
    option(
        "--fail-if",
        action="append",
        default=[],
        metavar="CONDITION",
        help="end with status 1 if this holds beyond noise: one of 'Figures of both', which stands for its ratio B / A,"
        " one of > >= < <=, and a number; may be given several times",
    ),
    option(
        "--inconclusive",
        choices=("fail", "pass"),
        help="what a condition comes to that a starved run, or one run a side, leaves open: status 1 or 0, not 3",
    ),
)
def compare(options: argparse.Namespace) -> int:
    """Say why the steps of one run take longer than those of another, by profiles or traces.

    The causes are more work, worse efficiency, more waiting and noise: of profiled runs by part of
    the step and by module, of traces of torch.profiler by part, kernel, operator and collective. Of
    runs with timer_only, throughput and the wait for data are compared.

    Examples:
      lightning-flops compare lightning_logs/version_0 lightning_logs/version_1
      lightning-flops compare before.pt.trace.json.gz after.pt.trace.json.gz
      lightning-flops compare --fail-if 'global_step_sec > 1.05' --fail-if 'hardware_flops > 1' main branch
      lightning-flops compare main*/ -- branch*/

    exit status: 0: done. 1: a condition of --fail-if holds. 2: something cannot be read or compared,
    and standard error says why. 3: a condition is inconclusive: a run was starved of processors, or
    two starts of one program may differ as much and there is one run a side.
    """
    from lightning_flops.analysis.differences import judge
    from lightning_flops.sinks.file import write_text_file

    comparison = _compared(options)
    if not options.quiet:
        print_report(comparison, options)
    ends = {"holds": Status.HOLDS, "does not hold": Status.DONE, "is inconclusive": _LEFT_OPEN[options.inconclusive]}
    statuses = [Status.DONE]
    for condition in options.fail_if:
        try:
            verdict, words = judge(comparison, condition)
        except ComparisonError as error:
            say(f"--fail-if {error}", command="compare")
            statuses.append(Status.FAILED)
            continue
        say(f"--fail-if '{condition}' {verdict}: {words}", command="compare")
        statuses.append(ends[verdict])
    if options.html is not None:
        write_text_file(options.html, comparison.to_html())
    return max(statuses, key=(Status.DONE, Status.INCONCLUSIVE, Status.HOLDS, Status.FAILED).index)


def _compared(options: argparse.Namespace) -> Comparison:
    """The comparison of two profiles or throughputs, of several a side, or of the traces of two runs."""
    from lightning_flops.analysis.compare import compare_profiles, compare_throughputs, compare_traces
    from lightning_flops.schema.profile import Profile
    from lightning_flops.sinks.profile_files import KINDS, read_report, traces_at

    sides = _sides([options.a, options.b, *options.more])
    sources = [source for side in sides for source in side]
    traces = {source: files for source in sources if (files := traces_at(source)) is not None}
    reports = {source: read_report(source, *KINDS) for source in sources if source not in traces}
    if not traces:
        compare: Callable[..., Comparison] = compare_profiles
        if not all(isinstance(report, Profile) for report, _ in reports.values()):  # what all of them have is compared
            compare, reports = compare_throughputs, {source: read_report(source, KINDS[1]) for source in sources}
        (a, names_a), (b, names_b) = (zip(*map(reports.get, side), strict=True) for side in sides)
        of_a, of_b = ([held_against(options, report) for report in side] for side in (a, b))
        return compare(of_a, of_b, sources=(names_a, names_b))
    trace = next(iter(traces))
    if len(sources) > 2:
        raise ComparisonError(f"{trace} is a trace: of traces one run a side is compared")
    if reports:
        _, profile = next(iter(reports.values()))
        raise ComparisonError(
            f"{trace} is a trace and {profile} a profile: a trace's steps ran under torch.profiler, "
            "which slows them down, and those that a profile times did not; give two traces, as trace_dir keeps them"
        )
    first, second = (analyzed(traces[source], options, stepwise=True) for source in sources)
    return compare_traces(first, second, sources=(sources[0], sources[1]))


def _sides(runs: list[str]) -> tuple[list[str], list[str]]:
    """The runs of each side: what stands before ``--`` and after it, or two."""
    places = [place for place, run in enumerate(runs) if run == AGAINST]
    if not places and len(runs) == 2:
        return runs[:1], runs[1:]
    if len(places) != 1 or not 0 < places[0] < len(runs) - 1:
        raise ComparisonError("give two runs, or the runs of each side with -- between them: A1 A2 A3 -- B1 B2 B3")
    return runs[: places[0]], runs[places[0] + 1 :]
