"""Several ranks side by side: who waits for whom, and who holds the others up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from lightning_flops.analysis.trace.columns import CollectiveArguments, Trace
from lightning_flops.analysis.trace.communication import collective_name, collective_rows_by_start, overlap
from lightning_flops.analysis.trace.durations import NS_PER_US
from lightning_flops.analysis.trace_tables import RankCollectiveRow, RankComparison, RankRow
from lightning_flops.errors import LightningFlopsError


class RanksError(LightningFlopsError, ValueError):
    """Traces that cannot be of one run; the message names the files and what contradicts."""


@dataclass(slots=True)
class _Call:
    name: str
    bytes: int | None
    latency_ns: int
    group_size: int | None
    transfer_ns: int | None = None


def compare_ranks(traces: Sequence[Trace]) -> RankComparison:
    """Computation, communication and waiting of several ranks of one run, a trace each.

    The i-th call of a collective in a process group and step on one rank belongs to the i-th on the others; ranks'
    clocks are never compared. Where a group's ranks made unequally many calls in a step, those are left unmatched.

    Raises:
        RanksError: two traces are of the same rank, or none is given.
    """
    ranks = rank_numbers(traces)
    calls = [_calls(trace) for trace in traces]
    notes = _match(traces, calls)
    shares = [overlap(trace) for trace in traces]
    per_step = [share.computation_us / len(trace.steps) for share, trace in zip(shares, traces, strict=True)]
    middle = median(per_step)
    steps = [len(trace.steps) for trace in traces]
    if len(set(steps)) > 1:
        counts = ", ".join(f"{count} of rank {rank}" for rank, count in sorted(zip(ranks, steps, strict=True)))
        notes = (f"The traces hold different numbers of steps ({counts}): only what is per step compares.", *notes)
    rows = []
    for index, trace in enumerate(traces):
        mine = [call for keyed in calls[index].values() for call in keyed]
        matched = [call for call in mine if call.transfer_ns is not None]
        rows.append(
            RankRow(
                rank=ranks[index],
                source=trace.source,
                steps=len(trace.steps),
                overlap=shares[index],
                transfer_us=_transfer_us(matched),
                wait_us=_wait_us(matched),
                compute_over_median=per_step[index] / middle if middle and len(traces) > 1 else None,
                collectives=_rows(mine),
            )
        )
    longest = max(per_step)
    alone = len(traces) > 1 and per_step.count(longest) == 1
    return RankComparison(
        ranks=tuple(sorted(rows, key=lambda row: row.rank)),
        straggler=ranks[per_step.index(longest)] if alone else None,
        notes=notes,
    )


def rank_numbers(traces: Sequence[Trace]) -> list[int]:
    """The rank of each trace: what it says itself, or its place among them where none says.

    Raises:
        RanksError: two traces are of the same rank, some say their rank and some do not, or none is given.
    """
    if not traces:
        raise RanksError("no trace to compare")
    known = [trace.rank for trace in traces]
    if all(rank is None for rank in known):
        return list(range(len(traces)))
    seen: dict[int, str] = {}
    for rank, trace in zip(known, traces, strict=True):
        if rank is None:
            raise RanksError(f"{trace.source} does not say which rank it is of, though other traces do")
        if rank in seen:
            raise RanksError(f"{seen[rank]} and {trace.source} are both of rank {rank}: give one trace for each rank")
        seen[rank] = trace.source
    return list(seen)


_Key = tuple[str, str, int | None]


def _calls(trace: Trace) -> dict[_Key, list[_Call]]:
    """A rank's collectives by group, name and number of the step in which they were started."""
    found: dict[_Key, list[_Call]] = {}
    rows = collective_rows_by_start(trace)
    launch = trace.links.launch[rows]
    started = np.where(launch >= 0, trace.start_ns[np.maximum(launch, 0)], trace.start_ns[rows])
    steps = trace.steps
    step = np.searchsorted(steps.host_start_ns, started, side="right") - 1
    inside = (step >= 0) & (started < steps.host_end_ns[np.maximum(step, 0)])
    for row, index, within in zip(rows.tolist(), step.tolist(), inside.tolist(), strict=True):
        if steps.marked and not within:
            continue
        arguments = trace.collectives.get(row, CollectiveArguments())
        name = collective_name(trace, row)
        key = (arguments.group or "", name, steps.numbers[index] if steps.marked else None)
        found.setdefault(key, []).append(
            _Call(name, arguments.bytes, int(trace.duration_ns[row]), arguments.group_size)
        )
    return found


def _match(traces: Sequence[Trace], calls: Sequence[dict[_Key, list[_Call]]]) -> tuple[str, ...]:
    """Set the transfer time of every call whose counterparts are known; say what could not be matched."""
    unmatched: dict[str, int] = {}
    partial: dict[str, int] = {}
    sizes = {key: listed[0].group_size for of_rank in calls for key, listed in of_rank.items()}
    for key in dict.fromkeys(key for of_rank in calls for key in of_rank):
        taking_part = [of_rank[key] for of_rank in calls if key in of_rank]
        if len(taking_part) < 2 or len({len(listed) for listed in taking_part}) > 1:
            unmatched[key[1]] = unmatched.get(key[1], 0) + sum(map(len, taking_part))
            continue
        if len(taking_part) < (sizes.get(key) or 0):
            partial[key[1]] = partial.get(key[1], 0) + len(taking_part[0])
        for together in zip(*taking_part, strict=True):
            shortest = min(call.latency_ns for call in together)
            for call in together:
                call.transfer_ns = shortest
    if len(traces) < 2:
        return ()
    return tuple(
        f"Calls of {name} without a counterpart in the other traces, whose waiting is not known: {count}."
        for name, count in sorted(unmatched.items())
    ) + tuple(
        f"Calls of {name} in groups whose traces are not all here, where waiting may count as transfer: {count}."
        for name, count in sorted(partial.items())
    )


def _rows(calls: list[_Call]) -> tuple[RankCollectiveRow, ...]:
    by_name: dict[str, list[_Call]] = {}
    for call in calls:
        by_name.setdefault(call.name, []).append(call)
    table = []
    for name, listed in by_name.items():
        matched = [call for call in listed if call.transfer_ns is not None]
        sizes = [call.bytes for call in listed if call.bytes is not None]
        table.append(
            RankCollectiveRow(
                name=name,
                calls=len(listed),
                matched_calls=len(matched),
                bytes=sum(sizes) if len(sizes) == len(listed) else None,
                latency_us=sum(call.latency_ns for call in listed) / NS_PER_US,
                transfer_us=_transfer_us(matched),
                wait_us=_wait_us(matched),
            )
        )
    return tuple(sorted(table, key=lambda row: (-row.latency_us, row.name)))


def _transfer_us(matched: list[_Call]) -> float | None:
    return sum(call.transfer_ns or 0 for call in matched) / NS_PER_US if matched else None


def _wait_us(matched: list[_Call]) -> float | None:
    return sum(call.latency_ns - (call.transfer_ns or 0) for call in matched) / NS_PER_US if matched else None
