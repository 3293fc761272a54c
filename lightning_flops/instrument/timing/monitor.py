"""Throughput of a run for as long as it trains, from a few host timestamps a step and no synchronization."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_flops.analysis.step_laws import StepKey, StepSeconds
from lightning_flops.instrument.batches import Shapes
from lightning_flops.records import NO_TOKENS, BatchTokens, BatchTotals, Extremes


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorReading:
    """Batches between two readings, on this rank."""

    seconds: float
    """Wall time, without what was excluded."""
    data_wait_sec: float | None
    """Host time inside the data loader; None if no wait was seen."""
    batches: int
    steps: int
    samples: int | None
    """None if the size of a batch was not known."""
    tokens: BatchTokens
    """None in it where a batch does not tell."""
    keys: Mapping[StepKey, int]
    """How many of the steps had which batch shapes and updates."""


Describe = Callable[[Shapes, int, bool, BatchTokens | None], tuple[int | None, StepKey | None]]
"""Gets a batch's shapes, its optimizer attempts, whether it ended a step, and its tokens. Returns its samples, and what
a step that it ended is known by."""


def _not_described(*batch: object) -> tuple[int | None, StepKey | None]:
    raise TypeError("a monitor that is given batches by `passed` needs `describe`")


class _Clocks(NamedTuple):
    """The monitor's sums at one moment; all but the time itself only grow while the run trains."""

    at: float
    excluded_sec: float
    wait_sec: float
    fetches: int


_MOST_KEYS = 10_000
"""Most different steps whose times are kept apart."""

LONGEST_LOG = 1000
"""Most batches that the log holds before it is added up: a few hundred kilobytes."""


class Monitor:
    """Adds up batches, samples and data wait until it is read, and over the whole run.

    It is called at every batch, in training loops whose steps may take less than a millisecond. There, code that ran a
    step ago is no longer in the processor's cache. So an event only adds an entry to a log: a call that is made when
    the log is added up.

    Args:
        now: the host's clock, in seconds.
        describe: returns, for a batch given to ``passed``, what ``batch`` gets at once; called in order for each.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, *, describe: Describe = _not_described) -> None:
        self.now = now
        """The clock that events are stamped by."""
        self.log: list[tuple[Any, ...]] = []
        """Calls that are made when it is added up: each a function and its arguments."""
        self.later: Callable[[tuple[Any, ...]], None] = self.log.append
        """Adds such a call to the log.

        It is the list's own method, so that an event costs no call of ours. A door may add calls of its own, which
        call ``fetched`` and ``passed`` in turn.
        """
        self.fetch_since: float | None = None
        """When the loop began to wait for its data loader, if it waits."""
        self._describe = describe
        self._reasons: set[str] = set()
        self._excluded_sec = 0.0
        self._wait_sec = 0.0
        self._fetches = 0
        self._excluded_since = 0.0  # only valid while there is a reason
        self._cost = _Spread()
        self._wait = _Spread()
        self._rate = _Spread()
        self._total_samples: int | None = 0
        self._batches = 0
        self._steps = 0
        self._samples: int | None = 0
        self._keys: list[StepKey] = []
        self._counted_keys: Counter[StepKey] = Counter()
        self._tokens = self._total_tokens = NO_TOKENS
        self._new_tokens: list[BatchTokens | None] = []
        """Of batches whose tokens are in neither sum yet."""
        self._step_sec = 0.0
        self._in_step = False
        self._by_key: dict[StepKey, list[Any]] = {}
        """Steps of each key, and their seconds."""
        self._before = self._read_from = self._clocks(now())

    # ---- events

    def restart(self) -> None:
        """Drop what happened since the last batch and the last reading: the next batch and reading begin here."""
        self.add_up()
        now = self.now()
        self._cut_exclusion(now)
        self._begin_reading(now)
        self._before = self._clocks(now)

    def leave_out(self) -> None:
        """The batch that ends here is in no figure, and nor is its time; the reading goes on."""
        self.add_up()
        now = self.now()
        self._cut_exclusion(now)
        before = self._before
        self._excluded_sec += now - before.at - (self._excluded_sec - before.excluded_sec)
        self._wait_sec, self._fetches = before.wait_sec, before.fetches
        self._before = self._clocks(now)

    def drop_open_step(self, *, and_before: int = 0) -> None:
        """What was logged since the latest step ended is not of this run: another loop has begun.

        Args:
            and_before: so many steps before that are not of this run either; those that were added up stay in it.
        """
        log = self.log
        ends = [place for place, logged in enumerate(log) if self._ends_step(logged)]
        kept = ends[: max(0, len(ends) - and_before)]
        del log[kept[-1] + 1 if kept else 0 :]

    def _ends_step(self, logged: tuple[Any, ...]) -> bool:
        place = {self._add_batch: 3, self.passed: 4}.get(logged[0])
        return place is not None and bool(logged[place])

    def fetch_begins(self) -> None:
        """The loop asks the data loader for a batch."""
        self.fetch_since = self.now()

    def fetch_ends(self) -> None:
        """The data loader has delivered the batch."""
        since = self.fetch_since
        if since is not None:
            self.later((self.fetched, since, self.now()))
            self.fetch_since = None

    def exclude(self, reason: str) -> None:
        """From here until ``include`` with the same *reason*, the run does something other than training."""
        self.later((self._exclude, self.now(), reason))

    def include(self, reason: str) -> None:
        """*reason* is over; the run trains again unless there is another one."""
        self.later((self._include, self.now(), reason))

    def batch(
        self, *, samples: int | None, ends_step: bool, key: StepKey | None, tokens: BatchTokens | None = None
    ) -> None:
        """A batch went through the loop."""
        self.later((self._add_batch, self.now(), samples, ends_step, key, tokens))
        if len(self.log) > LONGEST_LOG:
            self.add_up()

    # ---- what the log calls

    def fetched(self, began: float, ended: float) -> None:
        """The loop waited for the data loader from one time to another."""
        self._fetches += 1
        if not self._reasons:
            self._wait_sec += ended - began

    def passed(
        self, at: float, shapes: Shapes, updates: int, ends_step: bool, tokens: BatchTokens | None = None
    ) -> None:
        """A batch went through the loop, that ``describe`` is asked about.

        Args:
            at: when it was through.
            shapes: shapes of its tensors.
            updates: optimizer attempts that belong to it.
            ends_step: a step ended with it.
            tokens: those in it; None if it does not tell.
        """
        samples, key = self._describe(shapes, updates, ends_step, tokens)
        self._add_batch(at, samples, ends_step, key, tokens)

    def _exclude(self, at: float, reason: str) -> None:
        if not self._reasons:
            self._excluded_since = at
        self._reasons.add(reason)

    def _include(self, at: float, reason: str) -> None:
        if reason in self._reasons:
            self._reasons.remove(reason)
            if not self._reasons:
                self._excluded_sec += at - self._excluded_since

    # ---- sums

    def read(self) -> MonitorReading:
        """The batches since the last reading; the next reading begins here."""
        self.add_up()
        now = self.now()
        self._cut_exclusion(now)
        start = self._read_from
        reading = MonitorReading(
            seconds=now - start.at - (self._excluded_sec - start.excluded_sec),
            data_wait_sec=None if self._fetches == start.fetches else self._wait_sec - start.wait_sec,
            batches=self._batches,
            steps=self._steps,
            samples=self._samples,
            tokens=self._tokens,
            keys=self._take_keys(),
        )
        self._begin_reading(now)
        return reading

    def seconds_by_key(self) -> Mapping[StepKey, StepSeconds]:
        """How long the steps of each key took, of those that ``restart`` and ``leave_out`` did not drop."""
        self.add_up()
        return {key: StepSeconds(*its) for key, its in self._by_key.items()}

    def totals(self) -> BatchTotals:
        """All batches of the run, except those that ``restart`` dropped."""
        self.add_up()
        return BatchTotals(
            batches=self._cost.number,
            seconds=self._cost.record(),
            reader_sec=self._wait.record(),
            samples=self._total_samples,
            samples_per_sec=None if self._total_samples is None else self._rate.record(),
            tokens=self._total_tokens,
        )

    def add_up(self) -> None:
        """Make the calls that the log holds; afterwards everything that has happened is in the sums."""
        log = self.log[:]
        self.log.clear()
        for call, *arguments in log:
            call(*arguments)
        self._cost.add_new()
        self._wait.add_new()
        self._rate.add_new()
        if self._new_tokens:
            self._tokens = self._tokens.plus(*self._new_tokens)
            self._total_tokens = self._total_tokens.plus(*self._new_tokens)
            self._new_tokens.clear()

    def _add_batch(
        self, at: float, samples: int | None, ends_step: bool, key: StepKey | None, tokens: BatchTokens | None
    ) -> None:
        if self._reasons:
            self._cut_exclusion(at)
        since, excluded_before, wait_before, fetches_before = self._before
        seconds = at - since - (self._excluded_sec - excluded_before)
        self._cost.new.append(seconds)
        self._step_sec = self._step_sec + seconds if self._in_step else seconds
        self._in_step = not ends_step
        if self._fetches != fetches_before:
            self._wait.new.append(self._wait_sec - wait_before)
        if samples is None:
            self._samples = self._total_samples = None
        else:
            if seconds > 0:
                self._rate.new.append(samples / seconds)
            if self._samples is not None:
                self._samples += samples
            if self._total_samples is not None:
                self._total_samples += samples
        self._new_tokens.append(tokens)
        self._batches += 1
        self._steps += ends_step
        if key is not None:
            self._keys.append(key)
            if len(self._keys) >= LONGEST_LOG:
                self._take_keys()
            its = self._by_key.get(key)
            if its is not None:
                its[0] += 1
                its[1] += self._step_sec
            elif len(self._by_key) < _MOST_KEYS:
                self._by_key[key] = [1, self._step_sec]
        self._before = _Clocks(at, self._excluded_sec, self._wait_sec, self._fetches)

    def _take_keys(self) -> Counter[StepKey]:
        self._counted_keys.update(self._keys)
        self._keys.clear()
        return self._counted_keys

    def _begin_reading(self, now: float) -> None:
        self._read_from = self._clocks(now)
        self._batches = 0
        self._steps = 0
        self._samples = 0
        self._keys.clear()
        self._counted_keys = Counter()
        self._tokens = NO_TOKENS

    def _clocks(self, now: float) -> _Clocks:
        return _Clocks(now, self._excluded_sec, self._wait_sec, self._fetches)

    def _cut_exclusion(self, now: float) -> None:
        """Book the time that was excluded up to *now*; ``include`` books the rest."""
        if self._reasons:
            self._excluded_sec += now - self._excluded_since
            self._excluded_since = now


class _Spread:
    """Sum, least and greatest of numbers."""

    __slots__ = ("greatest", "least", "new", "number", "total")

    def __init__(self) -> None:
        self.new: list[float] = []
        """Numbers that ``add_new`` adds."""
        self.number = 0
        self.total = 0.0
        self.least = float("inf")
        self.greatest = float("-inf")

    def add_new(self) -> None:
        new = self.new
        if new:
            self.number += len(new)
            self.total = sum(new, self.total)
            self.least = min(self.least, *new)
            self.greatest = max(self.greatest, *new)
            new.clear()

    def record(self) -> Extremes | None:
        """None if nothing was added."""
        if not self.number:
            return None
        return Extremes(number=self.number, total=self.total, least=self.least, greatest=self.greatest)
