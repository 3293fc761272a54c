"""One report for all ranks: the others write what they measured into the process group's store, rank 0 reads it there.

No collective is used: where one rank is absent, a collective waits, and after its timeout training's group is broken,
too. No call waits inside the store either: a key is read only after it was seen there. Keys, all below
``lightning_flops/{number of the run}/``:

    {step}/{rank}    the rank's record of that window, or why there is none; rank 0 deletes what it has read
    {step}           how many ranks have written one
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

Store: TypeAlias = Any  # a ``torch.distributed.Store``, whose methods torch gives no types

_PAUSE_SEC = 0.02  # between two looks
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
    began: float
    deadline: float
    answers: dict[int, RankRecord | RankAbsence] = field(default_factory=dict)


class Ranks:
    """One rank's part in the reports of one run; the worker's thread sends, the training thread does the rest.

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
        self._out = False
        self._failure: str | None = None
        self._ask(lambda store: None)
        if self._failure is not None:
            raise NoStoreError(self._failure)

    @property
    def pending(self) -> bool:
        """Whether ``ready`` has something to look for."""
        return bool(self._waiting)

    def send(self, profile: Profile) -> None:
        """Send rank 0 the record of *profile*."""
        self._last_step = profile.profile_step
        try:
            self._say(str(profile.profile_step), pack(make_rank_record(profile)))
        except Exception as error:  # notify rank 0, so that it does not wait for a record that will not come
            self.say_absent(profile.profile_step, f"its measurements could not be packed: {words_of(error)}")

    def say_absent(self, step: int | None, reason: str) -> None:
        """Notify rank 0 that no record of the window of *step* comes, or none any more (the first *reason* counts)."""
        if step is not None or not self._out:
            self._out |= step is None
            absence = pack(RankAbsence(rank=self._rank, reason=reason))
            self._say("out" if step is None else str(step), absence)

    def _say(self, about: str, packed: bytes) -> None:
        def write(store: Store) -> None:
            store.set(f"{self._keys}/{about}/{self._rank}", packed)
            store.add(f"{self._keys}/{about}", 1)

        if self._rank:
            self._ask(write)

    def await_reports(self, profile: Profile) -> None:
        """Let *profile*, of a window that has closed on rank 0, wait for the records of the other ranks."""
        now, timeout_sec = self._clock(), self._config.ranks_timeout_sec
        self._waiting.append(_Window(profile=profile, began=now, deadline=now + timeout_sec))
        words = "the report of step %d waits up to %g s for the %d other rank(s); training goes on"
        logger.info(words, profile.profile_step, timeout_sec, self._world_size - 1)

    def ready(self) -> list[Profile]:
        """The job's profiles whose ranks are all there or out of time."""
        merged = []
        while self._waiting and self._is_complete(self._waiting[0]):
            merged.append(self._merged(self._waiting.popleft()))
        return merged

    def finish(self, within_sec: float) -> list[Profile]:
        """The rest of the job's profiles, after at most *within_sec*."""
        ends = self._clock() + within_sec
        for window in self._waiting:
            window.deadline = min(window.deadline, ends)
        merged = self.ready()
        if self._waiting:
            logger.info("waiting %.1f s at most for the measurements of the other ranks", within_sec)
        while self._waiting:
            host_clock.sleep(_PAUSE_SEC)
            merged += self.ready()
        return merged

    def _is_complete(self, window: _Window) -> bool:
        late = self._clock() >= window.deadline
        self._ask(lambda store: self._read_records(window, store, late=late))
        return late or self._failure is not None or len(window.answers) == self._world_size - 1

    def _read_records(self, window: _Window, store: Store, *, late: bool) -> None:
        """Read the records of *window* once the counters say that all are there, or it is *late*."""
        run, step = self._keys, window.profile.profile_step
        if not late and store.add(f"{run}/{step}", 0) + store.add(f"{run}/out", 0) < self._world_size - 1:
            return
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
                return  # both counters count one rank, and this one is in neither
        store.delete_key(f"{run}/{step}")

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
