"""Traces of several ranks: each rank's collectives, and the ranks side by side."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import replace

from lightning_flops.analysis.collectives import RanksError, TracedRank, compare
from lightning_flops.schema.communication import CollectiveCalls, RankComparison
from lightning_flops.schema.trace import TraceReport
from lightning_flops.trace.columns import CollectiveArguments, Trace
from lightning_flops.trace.names import is_point_to_point
from lightning_flops.trace.steps import launched_at
from lightning_flops.trace.tables import collective_bytes, collective_name, overlap

_LONGEST_GROUP_CHARS = 40
_NOTHING = CollectiveArguments()
_APART = "The traces do not say their ranks: they are taken for separate runs, side by side."
_UNMARKED = (
    "Nobody is named a straggler: not every trace has the profiler's marks of steps, so what its rank did in a step is "
    "not known."
)


def traced_rank(trace: Trace) -> TracedRank:
    """What a comparison with other ranks needs of *trace*: small, whatever the size of the trace."""
    return TracedRank(
        rank=trace.rank,
        source=trace.source,
        steps=len(trace.steps),
        overlap=overlap(trace),
        collectives=collective_calls(trace),
    )


def compare_ranks(traced: Sequence[TracedRank], *, marked: bool) -> RankComparison:
    """Computation, communication and waiting of several ranks of one run, a trace each.

    Traces that do not say their ranks are separate runs, and none is held against another. Of ranks whose steps are not
    all *marked* nobody is said to compute longest.

    Raises:
        RanksError: two traces are of the same rank, some say their rank and some do not, or none is given.
    """
    refuse_mixed_ranks(traced)
    if len(traced) > 1 and all(one.rank is None for one in traced):
        alone = tuple(compare([one]).ranks[0] for one in traced)
        return RankComparison(ranks=alone, computes_longest=None, notes=(_APART,))
    comparison = compare(traced)
    if len(traced) == 1 or marked:
        return comparison
    rows = tuple(replace(row, compute_over_median=None) for row in comparison.ranks)
    return replace(comparison, ranks=rows, computes_longest=None, notes=(_UNMARKED, *comparison.notes))


def refuse_mixed_ranks(traces: Sequence[TracedRank] | Sequence[TraceReport]) -> None:
    """Refuse traces that cannot be one of each rank.

    Raises:
        RanksError: two traces are of the same rank, some say their rank and some do not, or none is given.
    """
    if not traces:
        raise RanksError("no trace to compare")
    if all(trace.rank is None for trace in traces):
        return
    seen: dict[int, str] = {}
    for trace in traces:
        if trace.rank is None:
            raise RanksError(f"{trace.source} does not say which rank it is of, though other traces do")
        if (other := seen.setdefault(trace.rank, trace.source)) is not trace.source:
            raise RanksError(f"{other} and {trace.source} are both of rank {trace.rank}: give one trace for each rank")


def collective_calls(trace: Trace) -> tuple[CollectiveCalls, ...]:
    """The collectives of *trace*, grouped by name, process group and the step in which they were started."""
    found: dict[tuple[str, str | None, str | None, int | None], list[int]] = {}
    every, steps = trace.by_start(trace.is_collective), trace.steps
    for row, index in zip(every.tolist(), steps.of(launched_at(trace, every)).tolist(), strict=True):
        if steps.marked and index < 0:
            continue
        arguments, name = trace.collectives.get(row, _NOTHING), collective_name(trace, row)
        group, channel = arguments.group or _default_group(trace), None
        if is_point_to_point(name, trace.name_of(row)):
            channel = _channel(trace, arguments)
            group = group if channel is not None else None
        number = steps.numbers[index] if steps.marked else None
        found.setdefault((name, group, channel, number), []).append(row)
    return tuple(
        CollectiveCalls(
            name=name,
            group=None if group is None else _short(group),
            group_size=trace.collectives.get(rows[0], _NOTHING).group_size,
            channel=channel,
            step=number,
            calls=len(rows),
            bytes=collective_bytes(trace, rows),
            total_ns=int(trace.duration_ns[rows].sum()),
            latency_ns=array("q", trace.duration_ns[rows].tolist()),
        )
        for (name, group, channel, number), rows in found.items()
    )


def _channel(trace: Trace, arguments: CollectiveArguments) -> str | None:
    """Sender and receiver; None if the trace does not say one of them."""
    source = trace.rank if arguments.source is None else arguments.source
    destination = trace.rank if arguments.destination is None else arguments.destination
    if source is None or destination is None or arguments.source is arguments.destination:
        return None
    return f"{source} to {destination}"


def _default_group(trace: Trace) -> str | None:
    """The group of calls that name none; None if this rank is in several."""
    if trace.only_group is not None:
        return str(list(trace.only_group))
    return "" if trace.groups is None else None


def _short(group: str) -> str:
    """A group's name and members in few characters: a report of thousands of ranks has thousands of these."""
    if len(group) <= _LONGEST_GROUP_CHARS:
        return group
    return hashlib.blake2b(group.encode(errors="surrogatepass"), digest_size=8).hexdigest()
