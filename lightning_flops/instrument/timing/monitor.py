"""Throughput of a run for as long as it trains, from a few host timestamps a step and no synchronization."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import compress
from operator import ne, sub
from typing import Final, NamedTuple

from lightning_flops import host_clock
from lightning_flops.instrument.torch_private.autograd import sequence_number
from lightning_flops.records import NO_TOKENS, BatchTokens, BatchTotals, Extremes, Shapes


class MonitorReading(NamedTuple):
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


LONGEST_LOG = 1000
"""Most batches that the log holds before it is added up: a few hundred kilobytes."""

Noted = tuple[float, float, int, Shapes, int, bool, BatchTokens | None, int | None]
"""What is noted of a batch, in this order.

When it was through, by the log's clock. How long the loop had waited for data by then, and in how many fetches. The
shapes of its tensors. The optimizer attempts that belong to it. Whether a step ended with it. Its tokens, or None if it
does not tell them. How many autograd nodes this thread had made by then, or None if nobody looked.
"""

ENDS_STEP: Final = 5
"""Where ``Noted`` says whether a step ended with the batch."""


class BatchLog:
    """What happens to the batches of a run, kept with as little as can be until the monitor adds it up.

    It is told of every batch, in training loops whose steps may take less than a millisecond. There, code that ran a
    step ago is no longer in the processor's cache. So this is small, and most steps of a run touch nothing else.

    Args:
        now: the host's clock, in seconds.
    """

    __slots__ = (
        *(
            "beyond",
            "excluded_nodes",
            "excluded_sec",
            "excluded_since",
            "fetch_since",
            "fetches",
            "nodes",
            "nodes_since",
        ),
        *("noted", "now", "reasons", "spare", "until", "wait_sec"),
    )

    def __init__(self, now: Callable[[], float] = host_clock.now) -> None:
        self.now = now
        """The clock that events are stamped by."""
        self.nodes: Callable[[], int] = sequence_number
        """How many autograd nodes this thread has made."""
        self.noted: list[Noted] = []
        """Batches that nobody was told of yet."""
        self.spare = 0
        """Only the monitor needs to know of so many of the next batches, and needs no more of them than ``Noted``. 0
        also means that nobody knows yet."""
        self.beyond = 0
        """So many more there would be, but that something may have to be done before them."""
        self.until = math.inf
        """From this time on somebody must look, though there were batches to spare."""
        self.fetch_since: float | None = None
        """When the loop began to wait for its data loader, if it waits."""
        self.wait_sec = 0.0
        """Time that the loop has waited for data."""
        self.fetches = 0
        """How many times it has."""
        self.reasons: set[str] = set()
        """Why the run does something other than training now."""
        self.excluded_sec = 0.0
        """Time that it has done so, before the present reasons."""
        self.excluded_since = 0.0
        """Only valid while there is a reason."""
        self.excluded_nodes = 0
        """Autograd nodes that were made in that time."""
        self.nodes_since = 0
        """By the time ``excluded_since``; only valid while there is a reason."""

    def note(self, shapes: Shapes, updates: int, ends_step: bool, tokens: BatchTokens | None = None) -> bool:
        """Note a batch that is through if only the monitor needs to know of it; returns whether that is so."""
        at = self.now()
        if self.spare and at < self.until and not self.reasons:
            self.spare -= 1
            self.noted.append(
                (
                    at - self.excluded_sec,
                    self.wait_sec,
                    self.fetches,
                    shapes,
                    updates,
                    ends_step,
                    tokens,
                    self.nodes() - self.excluded_nodes,
                )
            )
            return True
        return False

    def note_late(
        self,
        at: float,
        shapes: Shapes,
        updates: int,
        ends_step: bool,
        tokens: BatchTokens | None = None,
        *,
        nodes: int | None = None,
    ) -> None:
        """As ``note``, for a batch that was through *at* a time when nobody had to look; *nodes* were made by then."""
        self.spare = max(0, self.spare - 1)
        clock = (self.excluded_since if self.reasons else at) - self.excluded_sec
        trained = None if nodes is None or self.reasons else nodes - self.excluded_nodes
        self.noted.append((clock, self.wait_sec, self.fetches, shapes, updates, ends_step, tokens, trained))

    def none_to_spare(self) -> None:
        """The next batch is told of at once; then it is found out how many can be noted."""
        self.spare = self.beyond = 0

    def stop_before(self, batches: int) -> None:
        """Something may have to be done after so many *batches*: no more are to spare until then."""
        if self.spare > batches:
            self.beyond += self.spare - batches
            self.spare = batches

    def go_on(self) -> bool:
        """Nothing has to be done now after all; returns whether batches are to spare."""
        self.spare, self.beyond = self.spare + self.beyond, 0
        return self.spare > 0

    def clock(self) -> float:
        """Seconds that the run has trained, from a moment that is always the same."""
        return (self.excluded_since if self.reasons else self.now()) - self.excluded_sec

    def fetch_begins(self) -> None:
        """The loop asks the data loader for a batch."""
        self.fetch_since = self.now()

    def fetch_ends(self) -> None:
        """The data loader has delivered the batch."""
        since, self.fetch_since = self.fetch_since, None
        if since is not None:
            self.fetches += 1
            if not self.reasons:
                self.wait_sec += self.now() - since

    def waited(self, began: float, ended: float) -> None:
        """The same of a wait that is over."""
        self.fetches += 1
        if not self.reasons:
            self.wait_sec += ended - began

    def exclude(self, reason: str) -> None:
        """From here until ``include`` with the same *reason*, the run does something other than training."""
        if not self.reasons:
            self.excluded_since, self.nodes_since = self.now(), self.nodes()
        self.reasons.add(reason)

    def include(self, reason: str) -> None:
        """*reason* is over; the run trains again unless there is another one."""
        if reason in self.reasons:
            self.reasons.remove(reason)
            if not self.reasons:
                self.excluded_sec += self.now() - self.excluded_since
                self.excluded_nodes += self.nodes() - self.nodes_since


class _Clocks(NamedTuple):
    """Readings of the log at one moment."""

    at: float
    wait_sec: float
    fetches: int


Describe = Callable[
    [
        Sequence[Shapes],
        Sequence[int],
        Sequence[bool],
        Sequence[BatchTokens | None],
        Sequence[int | None],
        Sequence[float],
    ],
    Sequence[int | None],
]
"""Gets columns of batches that were noted: their shapes, their optimizer attempts, which of them ended a step, their
tokens, the autograd nodes by then; and the seconds of each step that ended. Returns the samples of each batch."""


def _not_described(*columns: object) -> Sequence[int | None]:
    raise TypeError("a monitor whose log has batches needs `describe`")


class Monitor:
    """Adds up batches, samples and data wait until it is read, and over the whole run.

    Args:
        now: the host's clock, in seconds.
        describe: is called, in order, with what was noted.
    """

    def __init__(self, now: Callable[[], float] = host_clock.now, *, describe: Describe = _not_described) -> None:
        self.log = BatchLog(now)
        self._describe = describe
        self._told: list[tuple[float, float, int, int | None, bool, BatchTokens | None]] = []
        """Batches of the running step that are in no sum yet: as in ``Noted``, with their samples."""
        self._spreads = _Spreads()
        self._batches = self._steps = 0
        self._samples: int | None = 0
        self._tokens = NO_TOKENS
        self._samples_before: int | None = 0
        """In the batches of earlier readings."""
        self._tokens_before = NO_TOKENS
        self._step_sec = 0.0
        """Of the running step, up to its last batch."""
        self._before = self._read_from = self._clocks()

    # ---- a run that goes on later

    def let_go(self) -> None:
        """The run may go on later: until then, nothing is noted, and whoever described batches is let go of."""
        self._add_all()
        self._describe = _not_described

    def goes_on(self, describe: Describe) -> None:
        """The run goes on from here; the time since it stopped is in no figure."""
        self._describe = describe
        log = self.log
        for reason in tuple(log.reasons):
            log.include(reason)
        log.fetch_since = None
        log.none_to_spare()
        self._step_sec = 0.0
        self.restart()

    # ---- events

    def restart(self) -> None:
        """Drop what happened since the last batch and the last reading: the next batch and reading begin here."""
        self._add_all()
        self._before = now = self._clocks()
        self._begin_reading(now)

    def leave_out(self) -> None:
        """The batch that ends here is in no figure, and nor is its time; the reading goes on."""
        self._add_all()
        log, before = self.log, self._before
        log.excluded_sec += log.clock() - before.at
        log.wait_sec, log.fetches = before.wait_sec, before.fetches

    def drop_open_step(self, *, and_before: int = 0) -> None:
        """What happened since the latest step ended is not of this run: another loop has begun.

        Args:
            and_before: so many steps before that are not of this run either; those that were added up stay in it.
        """
        log = self.log
        self._told.clear()
        self._step_sec = 0.0
        ends = [place for place, noted in enumerate(log.noted) if noted[ENDS_STEP]]
        kept = ends[: max(0, len(ends) - and_before)]
        del log.noted[kept[-1] + 1 if kept else 0 :]
        self.add_up()
        log.wait_sec, log.fetches = self._before.wait_sec, self._before.fetches

    def batch(self, *, samples: int | None, ends_step: bool, tokens: BatchTokens | None = None) -> float | None:
        """A batch went through the loop. Returns the seconds of the step that ended with it, if one did."""
        log, told = self.log, self._told
        if log.noted:
            self.add_up()
        told.append((log.clock(), log.wait_sec, log.fetches, samples, ends_step, tokens))
        if ends_step or len(told) > LONGEST_LOG:
            ended = self._add_told(len(told))
            return ended[-1] if ended else None
        return None

    # ---- sums

    def read(self) -> MonitorReading:
        """The batches since the last reading; the next reading begins here."""
        self._add_all()
        start, end = self._read_from, self._clocks()
        reading = MonitorReading(
            seconds=end.at - start.at,
            data_wait_sec=None if end.fetches == start.fetches else end.wait_sec - start.wait_sec,
            batches=self._batches,
            steps=self._steps,
            samples=self._samples,
            tokens=self._tokens,
        )
        self._begin_reading(end)
        return reading

    def totals(self) -> BatchTotals:
        """All batches of the run, except those that ``restart`` dropped."""
        self._add_all()
        samples = _sum(self._samples_before, self._samples)
        seconds, waits, rates = self._spreads.records()
        return BatchTotals(
            batches=0 if seconds is None else seconds.number,
            seconds=seconds,
            reader_sec=waits,
            samples=samples,
            samples_per_sec=None if samples is None else rates,
            tokens=self._tokens_before.plus(self._tokens),
        )

    def add_up(self) -> None:
        """Add what was noted; afterwards all but the batches of the running step is in the sums."""
        noted = self.log.noted
        if not noted:
            return
        columns = tuple(zip(*noted, strict=True))
        noted.clear()
        clocks, waits, fetches, shapes, updates, ends_step, tokens, nodes = columns
        told = self._told
        if ends_step[-1] and not told:  # most of the time
            seconds = self._seconds_of(clocks, waits, fetches)
            samples = self._describe(shapes, updates, ends_step, tokens, nodes, self._by_step(seconds, ends_step))
            self._add(seconds, samples, ends_step, tokens)
            return
        began, ended = self._before.at - self._step_sec, list(compress(clocks, ends_step))
        of_steps = list(map(sub, ended, (began, *ended)))
        told += zip(
            clocks,
            waits,
            fetches,
            self._describe(shapes, updates, ends_step, tokens, nodes, of_steps),
            ends_step,
            tokens,
            strict=True,
        )
        if ended:
            self._add_told(len(told) - ends_step[::-1].index(True))

    def _add_all(self) -> None:
        """Add what was noted and the running step so far, which is not dropped any more then."""
        self.add_up()
        if self._told:
            self._add_told(len(self._told))

    def _add_told(self, number: int) -> Sequence[float]:
        """Add the first *number* batches of those that are in no sum yet."""
        clocks, waits, fetches, samples, ends_step, tokens = tuple(zip(*self._told[:number], strict=True))
        del self._told[:number]
        seconds = self._seconds_of(clocks, waits, fetches)
        self._add(seconds, samples, ends_step, tokens)
        return self._by_step(seconds, ends_step)

    def _seconds_of(self, clocks: Sequence[float], waits: Sequence[float], fetches: Sequence[int]) -> list[float]:
        """The seconds of each batch; their waits are booked."""
        before = self._before
        seconds = list(map(sub, clocks, (before.at, *clocks)))
        if fetches[-1] != before.fetches:
            waited = map(sub, waits, (before.wait_sec, *waits))
            self._spreads.waits += compress(waited, map(ne, fetches, (before.fetches, *fetches)))
        self._before = _Clocks(clocks[-1], waits[-1], fetches[-1])
        return seconds

    def _by_step(self, seconds: list[float], ends_step: Sequence[bool]) -> Sequence[float]:
        """The seconds of each step that ended, of those of each batch."""
        if not self._step_sec and all(ends_step):  # most steps have one batch
            return seconds
        found = []
        for one, ends in zip(seconds, ends_step, strict=True):
            self._step_sec += one
            if ends:
                found.append(self._step_sec)
                self._step_sec = 0.0
        return found

    def _add(
        self,
        seconds: list[float],
        samples: Sequence[int | None],
        ends_step: Sequence[bool],
        tokens: Sequence[BatchTokens | None],
    ) -> None:
        self._spreads.add(seconds, samples)
        self._samples = _sum(self._samples, None if None in samples else sum(samples))  # type: ignore[arg-type]
        self._tokens = self._tokens.plus(*tokens)
        self._batches += len(seconds)
        self._steps += sum(ends_step)

    def _begin_reading(self, now: _Clocks) -> None:
        self._read_from = now
        self._samples_before = _sum(self._samples_before, self._samples)
        self._tokens_before = self._tokens_before.plus(self._tokens)
        self._batches = self._steps = self._samples = 0
        self._tokens = NO_TOKENS

    def _clocks(self) -> _Clocks:
        log = self.log
        return _Clocks(log.clock(), log.wait_sec, log.fetches)


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


class _Spreads:
    """Sums and extremes over all batches of a run. Its end asks for them, so they are found of many batches at once."""

    def __init__(self) -> None:
        self.waits: list[float] = []
        """Seconds of waits that are in no extremes yet; whoever books a wait adds it here."""
        self._seconds: list[float] = []
        self._samples: list[int | None] = []
        self._of_waits = self._of_seconds = self._of_rates = _NOTHING

    def add(self, seconds: Sequence[float], samples: Sequence[int | None]) -> None:
        """Add batches: their seconds and their samples."""
        self._seconds += seconds
        self._samples += samples
        if len(self._seconds) > LONGEST_LOG:
            self._add_up()

    def records(self) -> tuple[Extremes | None, Extremes | None, Extremes | None]:
        """Of seconds, of waits, and of samples a second where both are known; None where there was nothing."""
        self._add_up()
        return _if_any(self._of_seconds), _if_any(self._of_waits), _if_any(self._of_rates)

    def _add_up(self) -> None:
        seconds, self._seconds, samples, self._samples = self._seconds, [], self._samples, []
        waits, self.waits = self.waits, []
        rates = [its / sec for its, sec in zip(samples, seconds, strict=True) if its is not None and sec > 0]
        self._of_seconds = _with(self._of_seconds, seconds)
        self._of_waits = _with(self._of_waits, waits)
        self._of_rates = _with(self._of_rates, rates)


_NOTHING = Extremes(number=0, total=0.0, least=math.inf, greatest=-math.inf)


def _if_any(found: Extremes) -> Extremes | None:
    return found if found.number else None


def _with(known: Extremes, new: Sequence[float]) -> Extremes:
    """*known* with *new* numbers in it."""
    if not new:
        return known
    return Extremes(
        number=known.number + len(new),
        total=sum(new, known.total),
        least=min(known.least, *new),
        greatest=max(known.greatest, *new),
    )
