"""Statistics of groups of events: how many, and their total, mean, longest and shortest time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lightning_flops.analysis.trace.intervals import Ints, order_by
from lightning_flops.schema.trace_steps import Durations

NS_PER_US = 1000


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """Rows sorted into groups by a key."""

    keys: Ints
    """The key of each group, rising."""
    order: Ints
    """Positions of the rows, group after group, in their old order inside a group."""
    firsts: Ints
    """Where in ``order`` each group begins."""

    def calls(self) -> Ints:
        """Rows in each group."""
        return np.diff(np.append(self.firsts, len(self.order)))

    def sums(self, values: Ints) -> Ints:
        """Sum of the rows' values in each group, exact."""
        return np.add.reduceat(values[self.order], self.firsts) if len(self.firsts) else values[:0]

    def durations(self, durations_ns: Ints, *, whole_ns: float | Sequence[float]) -> list[Durations]:
        """Statistics of each group; ratios are of *whole_ns*, one for all groups or one for each."""
        if not len(self.firsts):
            return []
        ordered = durations_ns[self.order]
        totals = np.add.reduceat(ordered, self.firsts).tolist()
        largest = np.maximum.reduceat(ordered, self.firsts).tolist()
        least = np.minimum.reduceat(ordered, self.firsts).tolist()
        wholes = whole_ns if isinstance(whole_ns, Sequence) else [whole_ns] * len(totals)
        columns = (self.calls().tolist(), totals, largest, least, wholes)
        return [_statistics(*group) for group in zip(*columns, strict=True)]


def group_by(keys: Ints) -> Groups:
    """Groups of equal *keys*."""
    order = order_by(keys)
    ordered = keys[order]
    firsts = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]])) if len(keys) else np.zeros(0, int)
    return Groups(ordered[firsts].astype(np.int64), order, firsts.astype(np.int64))


def durations_of(durations_ns: Ints, *, whole_ns: float) -> Durations | None:
    """Statistics of all *durations_ns*; None when there are none."""
    if not len(durations_ns):
        return None
    total, most, fewest = int(durations_ns.sum()), int(durations_ns.max()), int(durations_ns.min())
    return _statistics(len(durations_ns), total, most, fewest, whole_ns)


def ratio(part: float, whole: float) -> float | None:
    """*part* over *whole*; None when there is no whole."""
    return part / whole if whole else None


def _statistics(calls: int, total_ns: int, max_ns: int, min_ns: int, whole_ns: float) -> Durations:
    return Durations(
        total_us=total_ns / NS_PER_US,
        # One division of integers, rounded once: it cannot fall outside min and max.
        mean_us=total_ns / (calls * NS_PER_US),
        max_us=max_ns / NS_PER_US,
        min_us=min_ns / NS_PER_US,
        ratio=ratio(total_ns, whole_ns),
    )
