"""Collectives of several ranks, matched call by call: who waited for whom.

The i-th call of a collective in a process group and step on one rank belongs to the i-th on the others; ranks' clocks
are never compared. Of the calls that belong together the shortest is the transfer: the rank that came last waited for
no other. What the others took longer was waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from lightning_flops.errors import LightningFlopsError
from lightning_flops.schema.ranks import (
    CollectiveCalls,
    Overlap,
    RankCollectiveRow,
    RankComparison,
    RankRow,
)

_US = 1e-3


class RanksError(LightningFlopsError, ValueError):
    """Traces that cannot be of one run; the message names them and the contradiction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRank:
    """What the trace of one rank says for a comparison with the others."""

    rank: int | None
    """None where no trace says its rank."""
    source: str
    """Where the trace came from."""
    steps: int
    overlap: Overlap
    collectives: Sequence[CollectiveCalls]


def compare(traced: Sequence[TracedRank]) -> RankComparison:
    """Computation, communication and waiting of several ranks of one run.

    Where the ranks of a group made different numbers of calls in a step, these stay unmatched; the notes say so.

    Raises:
        RanksError: as of ``refuse_mixed_ranks``.
    """
    refuse_mixed_ranks(traced)
    listed = sorted(traced, key=lambda one: -1 if one.rank is None else one.rank)
    tables, notes = _match([one.collectives for one in listed])
    per_step = [one.overlap.computation_us / one.steps for one in listed]
    middle = median(per_step)
    if len({one.steps for one in listed}) > 1:
        notes = ("The traces hold different numbers of steps: only figures per step can be compared.", *notes)
    rows = tuple(
        RankRow(
            rank=one.rank,
            source=one.source,
            steps=one.steps,
            overlap=one.overlap,
            transfer_us=_sum_of_those_known(row.transfer_us for row in table),
            wait_us=_sum_of_those_known(row.wait_us for row in table),
            compute_over_median=computation / middle if middle and len(listed) > 1 else None,
            collectives=table,
        )
        for one, computation, table in zip(listed, per_step, tables, strict=True)
    )
    return RankComparison(ranks=rows, notes=notes)


def refuse_mixed_ranks(traces: Sequence[TracedRank]) -> None:
    """Refuse traces that cannot be one of each rank.

    Raises:
        RanksError: two traces are of the same rank, some say their rank and some do not, or none is given.
    """
    if not traces:
        raise RanksError("no trace to compare")
    seen: dict[int | None, str] = {}
    for trace in traces:
        if trace.rank is not None and trace.rank in seen:
            same = f"{seen[trace.rank]} and {trace.source} are both of rank {trace.rank}"
            raise RanksError(f"{same}: give one trace for each rank")
        seen[trace.rank] = trace.source
    if None in seen and len(seen) > 1:
        raise RanksError(f"{seen[None]} does not say which rank it is of, though other traces do")


_UNMATCHED = "Calls of {} without a counterpart in the other traces, so their waiting is not known: {}."
_PARTIAL = "Calls of {} in groups that have ranks without a trace here, so waiting may be counted as transfer: {}."
_GROUPLESS = "Calls of {} that do not say which ranks take part, so their waiting is not known: {}."

_Sums = Counter[str]
"""Calls, bytes and nanoseconds of one collective on one rank."""


def _match(ranks: Sequence[Iterable[CollectiveCalls]]) -> tuple[list[tuple[RankCollectiveRow, ...]], tuple[str, ...]]:
    """The collectives of each rank by name, the longest first, and sentences on what could not be matched."""
    tables: list[defaultdict[str, _Sums]] = [defaultdict(Counter) for _ in ranks]
    together: defaultdict[tuple[str, str, int | None], list[tuple[_Sums, CollectiveCalls]]] = defaultdict(list)
    counts: Counter[tuple[str, str]] = Counter()
    for table, listed in zip(tables, ranks, strict=True):
        for one in listed:
            sums = table[one.name]
            sums.update(calls=one.calls, ns=one.total_ns, bytes=one.bytes or 0, without_bytes=one.bytes is None)
            if one.group is None:
                counts[_GROUPLESS, one.name] += one.calls
            else:
                together[one.group, one.name, one.step].append((sums, one))
    for taking_part in together.values():
        _match_one(taking_part, counts)
    notes = [
        sentence.format(name, counts[kind, name])
        for sentence in (_UNMATCHED, _PARTIAL, _GROUPLESS)
        for kind, name in sorted(counts)
        if kind == sentence and len(ranks) > 1
    ]
    rows = [[_row(name, sums) for name, sums in table.items()] for table in tables]
    return [tuple(sorted(one, key=lambda row: (-row.latency_us, row.name))) for one in rows], tuple(notes)


def _row(name: str, sums: _Sums) -> RankCollectiveRow:
    return RankCollectiveRow(
        name=name,
        calls=sums["calls"],
        matched_calls=sums["matched"],
        bytes=None if sums["without_bytes"] else sums["bytes"],
        latency_us=sums["ns"] * _US,
        transfer_us=sums["transfer_ns"] * _US if sums["matched"] else None,
        wait_us=sums["wait_ns"] * _US if sums["matched"] else None,
    )


def _match_one(taking_part: Sequence[tuple[_Sums, CollectiveCalls]], counts: Counter[tuple[str, str]]) -> None:
    first = taking_part[0][1]
    if len(taking_part) < 2 or len({calls.calls for _, calls in taking_part}) > 1:
        counts[_UNMATCHED, first.name] += sum(calls.calls for _, calls in taking_part)
        return
    if len(taking_part) < (first.group_size or 0):
        counts[_PARTIAL, first.name] += first.calls
    # The transfer of calls that one rank left out is not known.
    known = min(len(calls.latency_ns) for _, calls in taking_part)
    latency_ns = np.array([calls.latency_ns[:known] for _, calls in taking_part], dtype=np.int64)
    transfer_ns = int(latency_ns.min(axis=0).sum())
    for (sums, calls), of_rank in zip(taking_part, latency_ns, strict=True):
        total_ns = calls.total_ns if known == calls.calls else int(of_rank.sum())
        sums.update(matched=known, transfer_ns=transfer_ns, wait_ns=total_ns - transfer_ns)


def _sum_of_those_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
