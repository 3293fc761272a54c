"""Exact arithmetic on whole nanoseconds: sets of moments as disjoint half-open intervals, and rows grouped by a key."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_flops.schema.tables import Durations, Row

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Lanes = npt.NDArray[np.signedinteger]
Mask = npt.NDArray[np.bool_]
Values = npt.NDArray[Any]
T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

NS_PER_US, NS_PER_SEC = 1000, 1e9


def order_by(keys: npt.NDArray[np.signedinteger]) -> Ints:
    """The order in which *keys* rise, equal ones in their old order; numpy sorts integers of 16 bits fastest."""
    small = len(keys) and keys.min() >= 0 and keys.max() < 1 << 16
    return np.argsort(keys.astype(np.uint16) if small else keys, kind="stable")


def numbered(values: Iterable[K]) -> tuple[list[K], Ints]:
    """The different ones of *values* in order of first appearance, and for each value its place among these."""
    found: dict[K, int] = {}
    places = [found.setdefault(value, len(found)) for value in values]
    return [*found], np.array(places, dtype=np.int64)


class Intervals(NamedTuple):
    """Disjoint, non-empty intervals ``[start, end)`` in rising order, no two of which touch."""

    starts: Ints
    ends: Ints

    @property
    def total(self) -> int:
        """Nanoseconds covered."""
        return int((self.ends - self.starts).sum())


NOTHING = Intervals(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))  # no moment at all
_FIRST = -(2**62)  # a moment before all others


def merge(starts: Ints, ends: Ints) -> Intervals:
    """Every moment that at least one of the given intervals covers; they may overlap, be empty and be unordered."""
    some = ends > starts
    if not some.all():
        starts, ends = starts[some], ends[some]
    if not len(starts):
        return NOTHING
    if (starts[1:] < starts[:-1]).any():  # events mostly come in order: a gigabyte of them is not copied
        order = np.argsort(starts, kind="stable")
        starts, ends = starts[order], ends[order]
    reached = np.maximum.accumulate(ends)
    begins = starts[1:] > reached[:-1]
    return Intervals(starts[np.append(True, begins)], reached[np.append(begins, True)])


def union(*parts: Intervals) -> Intervals:
    """Every moment that at least one of *parts* covers."""
    starts, ends = zip(NOTHING, *parts, strict=True)
    return merge(np.concatenate(starts), np.concatenate(ends))


def intersect(left: Intervals, right: Intervals) -> Intervals:
    """Every moment that both cover."""
    return subtract(left, subtract(left, right))


def subtract(left: Intervals, right: Intervals) -> Intervals:
    """Every moment that *left* covers and *right* does not."""
    moments = np.concatenate([left.starts, right.ends, left.ends, right.starts])
    steps = np.repeat([1, -1], [len(left.starts) + len(right.starts)] * 2)
    order = np.argsort(moments, kind="stable")
    moments = moments[order]
    inside = np.flatnonzero(np.cumsum(steps[order])[:-1] == 1)
    return merge(moments[inside], moments[inside + 1])


def covered_within(covered: Intervals, starts: Ints, ends: Ints) -> Ints:
    """Nanoseconds that *covered* has within each of the spans ``[start, end)``, which may overlap one another."""
    before, until = np.append(0, np.cumsum(covered.ends - covered.starts)), np.append(_FIRST, covered.ends)

    def up_to(moments: Ints) -> Ints:
        # The interval that began last before the moment is the only one that the moment can cut.
        begun = np.searchsorted(covered.starts, moments, side="right")
        return before[begun] - np.maximum(until[begun] - moments, 0)

    return up_to(ends) - up_to(starts)


def inside(covered: Intervals, moments: Ints) -> Mask:
    """Which of *moments* are covered."""
    # The interval that began last is the only one that can cover the moment.
    return moments < np.append(_FIRST, covered.ends)[np.searchsorted(covered.starts, moments, side="right")]


def levels(starts: Ints, ends: Ints, weights: Floats) -> tuple[Ints, Floats]:
    """Moments, and the sum of the weights of all events that run from each of these on, held to 1."""
    groups = group_by(np.concatenate([starts, ends]))
    change = np.bincount(groups.number, np.concatenate([weights, -weights]))
    # Sums of binary fractions leave about 1e-13 where nothing runs.
    return groups.keys[0], np.clip(np.round(np.cumsum(change), 9), 0.0, 1.0)


def sums_by(owner: Ints, values: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """For each of *count* owners the sum of its *values*, exact of integers."""
    sums = np.zeros(count, dtype=values.dtype)
    np.add.at(sums, owner, values)
    return sums


def counted_once(owner: Ints, starts: Ints, ends: Ints) -> Ints:
    """*starts*, put off to the end of what began earlier and has the same *owner*, at most to their own *ends*."""
    first = int(starts.min(initial=-_FIRST))
    span = int(ends.max(initial=first)) - first + 1
    shift = owner * span - first  # every owner gets a stretch of time for itself
    starts, ends = starts + shift, ends + shift
    order = np.argsort(starts, kind="stable")
    later = order[1:]
    starts[later] = np.clip(np.maximum.accumulate(ends[order])[:-1], starts[later], ends[later])
    return starts - shift


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows sorted into groups by keys."""

    keys: tuple[Ints, ...]  #: The keys of each group, a column for each; the groups rise by these.
    order: Ints  #: Positions of the rows, group after group, in their old order inside a group.
    firsts: Ints  #: Where in ``order`` each group begins.

    @property
    def calls(self) -> list[int]:
        """Rows in each group."""
        return np.diff(np.append(self.firsts, len(self.order))).tolist()  # type: ignore[no-any-return]

    @property
    def number(self) -> Ints:
        """For each row the number of its group."""
        found = np.empty_like(self.order)
        found[self.order] = np.cumsum(np.bincount(self.firsts, minlength=len(self.order))) - 1
        return found

    def parts(self, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
        """The rows' values of each group."""
        return np.split(values[self.order], self.firsts)[1:]

    def sums(self, values: Ints | Floats) -> list[Any]:
        """Sum of the rows' values in each group; exact of integers."""
        return self.reduced(np.add, values)

    def sums_known(self, values: Ints) -> list[int | None]:
        """Sum of the rows' values in each group; None where one of them is not known, which is below 0."""
        least = self.reduced(np.minimum, values)
        return [total if one >= 0 else None for total, one in zip(self.sums(values), least, strict=True)]

    def reduced(self, how: np.ufunc, values: npt.NDArray[Any]) -> list[Any]:
        """The rows' values of each group put together."""
        return how.reduceat(values[self.order], self.firsts).tolist() if len(self.firsts) else []

    def means(self, values: Floats, weights: Ints) -> list[float | None]:
        """The weighted mean of the known *values* of each group; None where none is known, or has a weight."""
        known = ~np.isnan(values)
        totals, wholes = self.sums(np.where(known, values * weights, 0.0)), self.sums(np.where(known, weights, 0))
        return [ratio(total, whole) for total, whole in zip(totals, wholes, strict=True)]

    def durations(self, durations_ns: Ints, *, whole_ns: float | Ints) -> list[Durations]:
        """Statistics of each group; ratios are of *whole_ns*, one of all or of each group."""
        wholes = np.broadcast_to(whole_ns, self.firsts.shape).tolist()
        columns = (self.reduced(how, durations_ns) for how in (np.add, np.maximum, np.minimum))
        return [
            Durations(
                total_us=total / NS_PER_US,
                # One division of integers, rounded once: it cannot fall outside min and max.
                mean_us=total / (calls * NS_PER_US),
                max_us=longest / NS_PER_US,
                min_us=shortest / NS_PER_US,
                ratio=ratio(total, whole),
            )
            for calls, whole, total, longest, shortest in zip(self.calls, wholes, *columns, strict=True)
        ]


def group_by(*keys: Lanes) -> Groups:
    """Groups of rows that are equal in all of the columns *keys*."""
    order = order_by(keys[-1])
    for column in reversed(keys[:-1]):
        order = order[order_by(column[order])]
    begins = np.arange(len(order)) == 0
    for column in keys:
        begins[1:] |= np.diff(column[order]) != 0
    firsts = np.flatnonzero(begins)
    return Groups(tuple(column[order[firsts]].astype(np.int64) for column in keys), order, firsts)


def split_by(keys: Lanes, rows: Ints) -> Iterator[tuple[int, Ints]]:
    """Each of the *keys* that *rows* have, which index them, rising; and the rows that have it, in their order."""
    groups = group_by(keys[rows])
    yield from zip(groups.keys[0].tolist(), groups.parts(rows), strict=True)


def table(row: type[T], by: Callable[[T], Any] | None = None, /, **columns: Iterable[Any]) -> tuple[T, ...]:
    """The rows of a table, sorted *by* a key; *columns* are the values of each field of a row."""
    found = [row(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
    return tuple(found if by is None else sorted(found, key=by))


def longest_first(*clocks: str) -> Callable[[Row], tuple[Any, ...]]:
    """The key by which most tables are sorted: the total times of these fields, then what a row is of."""

    def key(row: Row) -> tuple[Any, ...]:
        spent = [getattr(row, clock) for clock in clocks]
        return *(-one.total_us if one else 0.0 for one in spent), row.name, getattr(row, "inputs", "")

    return key


def durations_of(durations_ns: Ints, *, whole_ns: float) -> Durations | None:
    """Statistics of all *durations_ns*; None when there are none."""
    return next(iter(group_by(np.zeros_like(durations_ns)).durations(durations_ns, whole_ns=whole_ns)), None)


def ratio(part: float, whole: float) -> float | None:
    """*part* over *whole*; None when there is no whole."""
    return part / whole if whole else None
