"""Collectives of several ranks, matched call by call: who waited for whom.

The i-th call of a collective in a process group and step on one rank belongs to the i-th on the others; ranks' clocks
are never compared. Of the calls that belong together the shortest is the transfer: the rank that came last waited for
no other. What the others took longer was waiting.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import numpy as np

from lightning_flops.analysis.rank_names import name_ranks
from lightning_flops.errors import LightningFlopsError
from lightning_flops.schema.communication import (
    CollectiveCalls,
    Overlap,
    RankCollectiveRow,
    RankComparison,
    RankRow,
)

_NS_PER_US = 1000
_COUNTS_NAMED = 4


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
        RanksError: two are of the same rank, or there is none.
    """
    _refuse_doubles(traced)
    listed = sorted(traced, key=lambda one: -1 if one.rank is None else one.rank)
    tables, notes = _match([one.collectives for one in listed])
    per_step = [one.overlap.computation_us / one.steps for one in listed]
    middle = median(per_step)
    if len({one.steps for one in listed}) > 1:
        notes = (
            f"The traces hold different numbers of steps ({_steps_in_words(listed)}): only figures per step can be "
            "compared.",
            *notes,
        )
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
    longest = max(per_step)
    alone = len(listed) > 1 and per_step.count(longest) == 1
    slowest = listed[per_step.index(longest)] if alone else None
    return RankComparison(
        ranks=rows,
        computes_longest=None if slowest is None else slowest.rank,
        notes=notes,
    )


def _steps_in_words(traced: Iterable[TracedRank]) -> str:
    by_steps: defaultdict[int, list[int]] = defaultdict(list)
    for one in traced:
        if one.rank is not None:
            by_steps[one.steps].append(one.rank)
    words = [f"{steps} of {name_ranks(ranks)}" for steps, ranks in by_steps.items()]
    return ", ".join(words[:_COUNTS_NAMED]) + (" …" if len(words) > _COUNTS_NAMED else "")


def _refuse_doubles(traced: Sequence[TracedRank]) -> None:
    if not traced:
        raise RanksError("no trace to compare")
    seen: dict[int, str] = {}
    for one in traced:
        if one.rank is None:
            continue
        if one.rank in seen:
            raise RanksError(
                f"{seen[one.rank]} and {one.source} are both of rank {one.rank}: give one trace for each rank"
            )
        seen[one.rank] = one.source


@dataclass(slots=True)
class _Sums:
    """All calls of one name on one rank, added up."""

    calls: int = 0
    matched_calls: int = 0
    bytes: int | None = 0
    latency_ns: int = 0
    transfer_ns: int = 0
    wait_ns: int = 0


class _TakingPart(NamedTuple):
    """One rank's calls among those that belong together."""

    place: int
    calls: CollectiveCalls


_UNMATCHED = "Calls of {} without a counterpart in the other traces, so their waiting is not known: {}."
_PARTIAL = "Calls of {} in groups that have ranks without a trace here, so waiting may be counted as transfer: {}."
_GROUPLESS = "Calls of {} that do not say which ranks take part, so their waiting is not known: {}."


def _match(ranks: Sequence[Iterable[CollectiveCalls]]) -> tuple[list[tuple[RankCollectiveRow, ...]], tuple[str, ...]]:
    """The collectives of each rank by name, and sentences on what could not be matched."""
    sums: list[defaultdict[str, _Sums]] = [defaultdict(_Sums) for _ in ranks]
    together: defaultdict[tuple[str, str, int | None], list[_TakingPart]] = defaultdict(list)
    counts: Counter[tuple[str, str]] = Counter()
    for index, listed in enumerate(ranks):
        for calls in listed:
            one = sums[index][calls.name]
            one.calls += calls.calls
            one.bytes = None if one.bytes is None or calls.bytes is None else one.bytes + calls.bytes
            one.latency_ns += calls.total_ns
            if calls.group is None:
                counts[_GROUPLESS, calls.name] += calls.calls
            else:
                together[calls.group, calls.name, calls.step].append(_TakingPart(index, calls))
    for taking_part in together.values():
        _match_one(taking_part, sums, counts)
    tables = [tuple(sorted((_row(*item) for item in one.items()), key=_by_latency)) for one in sums]
    if len(ranks) < 2:
        return tables, ()
    notes = [
        sentence.format(name, counts[kind, name])
        for sentence in (_UNMATCHED, _PARTIAL, _GROUPLESS)
        for kind, name in sorted(counts)
        if kind == sentence
    ]
    return tables, tuple(notes)


def _match_one(
    taking_part: Sequence[_TakingPart], sums: Sequence[Mapping[str, _Sums]], counts: Counter[tuple[str, str]]
) -> None:
    if len(taking_part) < 2 or len({one.calls.calls for one in taking_part}) > 1:
        for one in taking_part:
            counts[_UNMATCHED, one.calls.name] += one.calls.calls
        return
    first = taking_part[0].calls
    if len(taking_part) < (first.group_size or 0):
        counts[_PARTIAL, first.name] += first.calls
    # The transfer of calls that one rank left out is not known.
    known = min(len(one.calls.latency_ns) for one in taking_part)
    rows = [np.array(one.calls.latency_ns[:known], dtype=np.int64) for one in taking_part]
    transfer_ns = int(np.minimum.reduce(rows).sum())
    for (place, calls), row in zip(taking_part, rows, strict=True):
        total = sums[place][calls.name]
        total.matched_calls += known
        total.transfer_ns += transfer_ns
        total.wait_ns += (calls.total_ns if known == calls.calls else int(row.sum())) - transfer_ns


def _row(name: str, sums: _Sums) -> RankCollectiveRow:
    matched = sums.matched_calls > 0
    return RankCollectiveRow(
        name=name,
        calls=sums.calls,
        matched_calls=sums.matched_calls,
        bytes=sums.bytes,
        latency_us=sums.latency_ns / _NS_PER_US,
        transfer_us=sums.transfer_ns / _NS_PER_US if matched else None,
        wait_us=sums.wait_ns / _NS_PER_US if matched else None,
    )


def _by_latency(row: RankCollectiveRow) -> tuple[float, str]:
    return -row.latency_us, row.name


def _sum_of_those_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
