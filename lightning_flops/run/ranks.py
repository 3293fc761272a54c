"""One report for all ranks: the others write what they measured into the process group's store, rank 0 reads it there.

No collective is used: where one rank is absent, a collective waits, and after its timeout training's group is broken,
too. No call waits inside the store either: a key is read only after it was seen there. The training thread looks at two
counters; what takes more is a job of the worker. Keys, all below ``lightning_flops/{number of the run}/``:

    {step}/{rank}    the rank's record of that window, or why there is none; rank 0 deletes what it has read
    {step}           how many ranks have written one
    {step}/timed     the step after which all ranks time that window, if it is not their first; rank 0 says so
    out/{rank}       why nothing more comes from the rank
    out              how many ranks are out
    left             how many ranks have closed; the last one deletes all of these
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import distributed

from lightning_flops import host_clock
from lightning_flops.analysis.rank_record import RankAbsence, RankRecord, make_rank_record, pack, unpack
from lightning_flops.analysis.ranks import with_ranks
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.torch_private.optional import store_getter
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)

Report: TypeAlias = Callable[[Profile, int], None]
Store: TypeAlias = Any  # a ``torch.distributed.Store``, whose methods torch gives no types

PAUSE_SEC = 0.02  # between two looks
_STEPS_AHEAD = 10  # more than the host of one rank may be ahead of another's, where nothing waits for the device
_run_numbers = itertools.count()


class NoStoreError(RuntimeError):
    """The ranks cannot exchange anything; the message says why."""


def default_store() -> Store:
    """The store of the default process group, looked up at each use.

    Whoever keeps it keeps rank 0's server: a group made anew would find keys of the old one in it, and fail.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise NoStoreError("torch.distributed has no process group")
    store = None if store_getter is None else store_getter()
    if store is None:
        raise NoStoreError(f"torch {torch.__version__} keeps its key-value store in another way")
    return store


@dataclass
class _Window:
    """A window of rank 0, which waits for the records of the others."""

    profile: Profile
    at: int  # where the loggers show it
    began: float
    deadline: float
    answers: dict[int, RankRecord | RankAbsence] = field(default_factory=dict)


class Ranks:
    """One rank's part in the reports of one run; *report* of its methods gets a profile, and where loggers show it.

    The first error of the store ends the exchange: rank 0 then reports on the ranks that it has heard of, and names the
    error as the reason why the others are missing. In the constructor it is a ``NoStoreError``.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        config: ProfilerConfig,
        number: int | None = None,
        find_store: Callable[[], Store] = default_store,
        clock: Callable[[], float] = host_clock.now,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._config = config
        self._find_store = find_store
        self._clock = clock
        # All ranks of a program begin the same runs in the same order, so that each can number them by itself.
        self._keys = f"lightning_flops/{next(_run_numbers) if number is None else number}"
        self._waiting: deque[_Window] = deque()
        self._last_step: int | None = None
        self._timed_after: tuple[int, int] | None = None  # a window, and the step after which all ranks time it
        self._absent: set[int | None] = set()  # windows of which no record comes; None: all that are not sent yet
        self._failure: str | None = None
        self._ask(lambda store: None)
        if self._failure is not None:
            raise NoStoreError(self._failure)

    @property
    def pending(self) -> bool:
        """Whether a window waits for other ranks."""
        return bool(self._waiting)

    def send(self, profile: Profile) -> None:
        """Send rank 0 the record of *profile*."""
        self._last_step = profile.profile_step
        if profile.profile_step in self._absent:
            return
        try:
            self._say(str(profile.profile_step), pack(make_rank_record(profile)))
        except Exception as error:  # notify rank 0, so that it does not wait for a record that will not come
            self.say_absent(profile.profile_step, f"its measurements could not be packed: {words_of(error)}")

    def say_absent(self, step: int | None, reason: str) -> None:
        """Notify rank 0 that no record of the window of *step* comes, or none any more (the first *reason* counts)."""
        if step not in self._absent:
            self._absent.add(step)
            absence = pack(RankAbsence(rank=self._rank, reason=reason))
            self._say("out" if step is None else str(step), absence)

    def _say(self, about: str, packed: bytes) -> None:
        def write(store: Store) -> None:
            store.set(f"{self._keys}/{about}/{self._rank}", packed)
            store.add(f"{self._keys}/{about}", 1)

        if self._rank:
            self._ask(write)

    def may_time(self, step: int, steps_done: int, *, ready: bool) -> bool:
        """Whether the steps after *steps_done* are timed for the window of *step*, on all ranks from the same one on.

        Rank 0 names that step, a few ahead, when it is *ready* and has the reports of the windows before.
        """
        key = f"{self._keys}/{step}/timed"
        if self._timed_after is None or self._timed_after[0] != step:
            if self._rank:
                after = self._ask(lambda store: int(store.get(key)) if store.check([key]) else None)
            elif ready and not self._waiting:
                after = steps_done + _STEPS_AHEAD
                self._ask(lambda store: store.set(key, str(after)))
            else:
                after = None
            if after is None:
                return self._failure is not None
            self._timed_after = step, after
            if after < steps_done:
                self.say_absent(step, f"it timed the steps from {steps_done} on, the others from {after} on")
        return steps_done >= self._timed_after[1]

    def await_reports(self, profile: Profile, *, at: int = 0) -> None:
        """Let *profile*, of a window that has closed on rank 0, wait for the records of the other ranks."""
        now, timeout_sec = self._clock(), self._config.ranks_timeout_sec
        self._waiting.append(_Window(profile=profile, at=at, began=now, deadline=now + timeout_sec))
        words = "the report of step %d waits up to %g s for the %d other rank(s); training goes on"
        logger.info(words, profile.profile_step, timeout_sec, self._world_size - 1)

    def is_due(self) -> bool:
        """Whether the window that waits longest is to be merged: the counters say that all is there, or it is late."""
        if not self._waiting:
            return False
        window = self._waiting[0]
        keys = [f"{self._keys}/{window.profile.profile_step}", f"{self._keys}/out"]
        sent = self._ask(lambda store: sum(int(store.add(key, 0)) for key in keys))
        return sent is None or sent >= self._world_size - 1 or self._clock() >= window.deadline

    def merge(self, report: Report) -> None:
        """Read what the ranks have sent for the window that waits longest, and *report* the job if that is complete."""
        if not self._waiting:
            return
        window = self._waiting[0]
        late = self._clock() >= window.deadline
        self._ask(lambda store: self._read_records(window, store, late=late))
        if late or self._failure is not None or len(window.answers) == self._world_size - 1:
            try:
                report(self._merged(window), window.at)
            finally:
                self._waiting.popleft()

    def finish(self, within_sec: float, report: Report, absent: str = "") -> None:
        """Report the windows that still wait, after at most *within_sec*; *absent*: why no other comes of this rank."""
        if absent:
            self.say_absent(None, absent)
        ends = self._clock() + within_sec
        for window in self._waiting:
            window.deadline = min(window.deadline, ends)
        if self._waiting:
            logger.info("waiting %.1f s at most for the measurements of the other ranks", within_sec)
        while self._waiting:
            if self.is_due():
                self.merge(report)
            else:
                host_clock.sleep(PAUSE_SEC)
        self.close()

    def _read_records(self, window: _Window, store: Store, *, late: bool) -> None:
        """Read the records of *window*, for which the counters say that all are there, or which is *late*."""
        run, step = self._keys, window.profile.profile_step
        for rank in range(1, self._world_size):
            if rank in window.answers:
                continue
            # The order matters: before a rank says that it is out, it has sent everything else.
            out, key = f"{run}/out/{rank}", f"{run}/{step}/{rank}"
            is_out = store.check([out])
            if store.check([key]):
                window.answers[rank] = _read(rank, store.get(key))
                store.delete_key(key)
            elif is_out:
                window.answers[rank] = _read(rank, store.get(out))
            elif not late:
                return
        for key in (f"{run}/{step}", f"{run}/{step}/timed"):
            store.delete_key(key)

    def _merged(self, window: _Window) -> Profile:
        """The profile of *window*, with what the other ranks sent, and which ranks sent nothing and why."""
        profile, why = window.profile, self._failure
        if why is None:
            hurried = window.deadline < window.began + self._config.ranks_timeout_sec
            why = f"no answer within {window.deadline - window.began:.3g} s{', when training ended' * hurried}"
        others = range(1, self._world_size)
        answers = [window.answers.get(rank) or RankAbsence(rank=rank, reason=why) for rank in others]
        if missing := [f"rank {one.rank}: {one.reason}" for one in answers if isinstance(one, RankAbsence)]:
            words = "; ".join([*missing[:8], *([f"and {len(missing) - 8} more"] if len(missing) > 8 else [])])
            there, step = self._world_size - len(missing), profile.profile_step
            logger.warning("the report of step %d is of %d of %d ranks; %s", step, there, self._world_size, words)
        try:
            answers.insert(0, make_rank_record(profile))
            return with_ranks(profile, answers, thresholds=self._config.thresholds)
        except Exception as error:  # a report of rank 0 alone is still a report
            note = f"What the ranks sent could not be put together: {words_of(error)}."
            logger.warning(note, exc_info=logger.isEnabledFor(logging.DEBUG))
            return replace(profile, notes=(*profile.notes, note))

    def close(self) -> None:
        """End this rank's part: it sends and reads nothing more."""
        last = self._last_step
        self.say_absent(None, "it profiled no step" if last is None else f"it last profiled step {last}")
        self._ask(self._leave)
        self._failure = "this rank has left"

    def _leave(self, store: Store) -> None:
        if store.add(f"{self._keys}/left", 1) == self._world_size:
            for key in store.list_keys():
                if key.startswith(f"{self._keys}/"):
                    store.delete_key(key)

    def _ask(self, do: Callable[[Store], Any]) -> Any:
        """What *do* returns of the store; None from the first failure on."""
        if self._failure is None:
            try:
                return do(self._find_store())
            except NoStoreError as error:
                self._failure = str(error)
            except Exception as error:  # the store's server may be gone, with the process that held it
                logger.debug("the ranks' store failed", exc_info=True)
                self._failure = f"the key-value store failed: {words_of(error)}"
        return None


def _read(rank: int, packed: bytes) -> RankRecord | RankAbsence:
    """What *rank* sent; whatever that is, only that rank is missing from the report."""
    try:
        answer = unpack(packed)
    except Exception as error:
        return RankAbsence(rank=rank, reason=f"what it sent cannot be read: {words_of(error)}")
    return answer if answer.rank == rank else RankAbsence(rank=rank, reason=f"what it sent is of rank {answer.rank}")
