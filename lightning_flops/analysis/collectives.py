"""Collectives of several ranks, matched call by call: who waited for whom.

The i-th call of a collective in a process group and step on one rank belongs to the i-th on the others; ranks' clocks
are never compared. Of the calls that belong together the shortest is the transfer: the rank that came last waited for
no other. What the others took longer was waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from lightning_flops.analysis.rank_record import TracedRank
from lightning_flops.errors import LightningFlopsError
from lightning_flops.schema.trace import CollectiveCalls, RankCollectiveRow, RankComparison, RankRow

_US = 1e-3


class RanksError(LightningFlopsError, ValueError):
    """Traces that cannot be of one run; the message names them and the contradiction."""


def compare(traced: Sequence[TracedRank]) -> RankComparison:
    """Computation, communication and waiting of several ranks of one run, given by rank.

    Where the ranks of a group made different numbers of calls in a step, these stay unmatched; the notes say so.
    """
    tables, notes = _match([one.collectives for one in traced])
    rows = tuple(
        RankRow(
            rank=one.rank,
            steps=one.steps,
            overlap=one.overlap,
            transfer_us=_sum_up_to((row.transfer_us for row in table), most=one.overlap.communication_us),
            wait_us=_sum_up_to((row.wait_us for row in table), most=one.overlap.communication_us),
            collectives=table,
        )
        for one, table in zip(traced, tables, strict=True)
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


_UNMATCHED = "Calls of {} whose counterparts in the other traces are not known, so neither is their waiting: {}."
_PARTIAL = "Calls of {} in groups that have ranks without a trace here, so waiting may be counted as transfer: {}."


def _match(ranks: Sequence[Iterable[CollectiveCalls]]) -> tuple[list[tuple[RankCollectiveRow, ...]], tuple[str, ...]]:
    """The collectives of each rank by name, the longest first, and sentences on what could not be matched."""
    tables: list[defaultdict[str, Counter[str]]] = [defaultdict(Counter) for _ in ranks]
    together: defaultdict[object, list[tuple[Counter[str], CollectiveCalls]]] = defaultdict(list)
    counts: Counter[tuple[str, str]] = Counter()
    for table, listed in zip(tables, ranks, strict=True):
        for one in listed:
            sums = table[one.name]
            sums.update(calls=one.calls, ns=one.total_ns, bytes=one.bytes or 0, without_bytes=one.bytes is None)
            together[one.group or id(one), one.name, one.step].append((sums, one))
    for taking_part in together.values():
        name, calls = taking_part[0][1].name, [one.calls for _, one in taking_part]
        if len(calls) < 2 or len(set(calls)) > 1:
            counts[_UNMATCHED, name] += sum(calls)
            continue
        if len(calls) < (taking_part[0][1].group_size or 0):
            counts[_PARTIAL, name] += calls[0]
        # The transfer of calls that one rank left out is not known.
        known = min(len(one.latency_ns) for _, one in taking_part)
        latency_ns = np.array([one.latency_ns[:known] for _, one in taking_part], dtype=np.int64)
        transfer_ns = int(latency_ns.min(axis=0).sum())
        for (sums, _), total_ns in zip(taking_part, latency_ns.sum(axis=1).tolist(), strict=True):
            sums.update(matched=known, transfer_ns=transfer_ns, wait_ns=total_ns - transfer_ns)
    found = sorted(counts.items(), key=lambda item: (item[0][0] == _PARTIAL, item[0][1])) if len(ranks) > 1 else ()
    rows = [sorted(map(_row, table.items()), key=lambda row: (-row.latency_us, row.name)) for table in tables]
    return [tuple(one) for one in rows], tuple(sentence.format(name, calls) for (sentence, name), calls in found)


def _row(item: tuple[str, Counter[str]]) -> RankCollectiveRow:
    name, sums = item
    return RankCollectiveRow(
        name=name,
        calls=sums["calls"],
        matched_calls=sums["matched"],
        bytes=None if sums["without_bytes"] else sums["bytes"],
        latency_us=sums["ns"] * _US,
        transfer_us=sums["transfer_ns"] * _US if sums["matched"] else None,
        wait_us=sums["wait_ns"] * _US if sums["matched"] else None,
    )


def _sum_up_to(values: Iterable[float | None], *, most: float) -> float | None:
    """The sum of those known, at most *most*: calls that overlap add up to more than the time they are under way."""
    known = [value for value in values if value is not None]
    return min(sum(known), most) if known else None
