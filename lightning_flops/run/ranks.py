"""One report for all ranks: the others write what they measured into the process group's store, rank 0 reads it there.

No collective is used: where one rank is absent, a collective waits, and after its timeout training's group is broken,
too. No call waits inside the store either: a key is read only after it was seen there. Rank 0's worker looks at two
counters until all is there, and training goes on. Keys, all below ``lightning_flops/{number of the run}/``:

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
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch

from lightning_flops import host_clock
from lightning_flops.analysis.ranks import RankAbsence, RankRecord, make_rank_record, pack, unpack, with_ranks
from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.torch_private.optional import store_getter
from lightning_flops.schema.profile import Profile
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)

Store: TypeAlias = Any  # a ``torch.distributed.Store``, whose methods torch gives no types

PAUSE_SEC = 0.05  # between two looks
_STEPS_AHEAD = 10  # more than the host of one rank may be ahead of another's, where nothing waits for the device
_run_numbers = itertools.count()


def default_store() -> Store:
    """The store of the default process group, looked up at each use.

    Whoever keeps it keeps rank 0's server: a group made anew would find keys of the old one in it, and fail.
    """
    if store_getter is None:
        raise RuntimeError(f"torch {torch.__version__} keeps it in another way")
    return store_getter()


class Ranks:
    """One rank's part in the reports of one run; *pause* lets so many seconds go by, 0.0: the wait is over.

    The first error of the store ends the exchange: rank 0 then reports on the ranks that it has heard of, and names the
    error as the reason why the others are missing.
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
        pause: Callable[[float], None] = host_clock.sleep,
    ) -> None:
        self._rank = rank
        self._others = range(1, world_size)
        self._config = config
        self._find_store = find_store
        self._clock, self._pause = clock, pause
        # All ranks of a program begin the same runs in the same order, so that each can number them by itself.
        self._keys = f"lightning_flops/{next(_run_numbers) if number is None else number}"
        self._ended = 0.0, math.inf  # when the run has, and how long others are waited for from then on
        self._last_step: int | None = None
        self._timed_after: tuple[int, int] | None = None  # a window, and the step after which all ranks time it
        self._absent: set[int | None] = set()  # windows of which no record comes; None: all that are not sent yet
        self.failure: str | None = None  # why nothing can be exchanged any more
        self._ask(lambda store: store.add)  # of a group without a store there is none

    def exchange(self, profile: Profile) -> Profile:
        """Send rank 0 the record of *profile*; on rank 0, wait for the others' and return the profile of all ranks."""
        self._last_step = step = profile.profile_step
        if not self._rank:
            return self._merged(profile, self._answers(step))
        if step not in self._absent:
            try:
                self._say(str(step), pack(make_rank_record(profile)))
            except Exception as error:  # notify rank 0, so that it does not wait for a record that will not come
                self.say_absent(step, f"its measurements could not be packed: {words_of(error)}")
        return profile

    def say_absent(self, step: int | None, reason: str) -> None:
        """Notify rank 0 that no record of the window of *step* comes, or none any more (the first *reason* counts)."""
        if step not in self._absent:
            self._absent.add(step)
            self._say("out" if step is None else str(step), pack(RankAbsence(rank=self._rank, reason=reason)))

    def _say(self, about: str, packed: bytes) -> None:
        def write(store: Store) -> None:
            store.set(f"{self._keys}/{about}/{self._rank}", packed)
            store.add(f"{self._keys}/{about}", 1)

        if self._rank:
            self._ask(write)

    def may_time(self, step: int, steps_done: int, *, ready: bool) -> bool:
        """Whether the steps after *steps_done* are timed for the window of *step*, on all ranks from the same one on.

        Rank 0 names that step, a few ahead, when it is *ready*: it has the reports of the windows before.
        """
        key = f"{self._keys}/{step}/timed"
        if self._timed_after is None or self._timed_after[0] != step:
            if self._rank:
                after = self._ask(lambda store: int(store.get(key)) if store.check([key]) else None)
            elif ready:
                after = steps_done + _STEPS_AHEAD
                self._ask(lambda store: store.set(key, str(after)))
            else:
                after = None
            if after is None:
                return self.failure is not None
            self._timed_after = step, after
            if after < steps_done:
                self.say_absent(step, f"it timed the steps from {steps_done} on, the others from {after} on")
        return steps_done >= self._timed_after[1]

    def hurry(self, within_sec: float) -> None:
        """The run is over: wait for other ranks no longer than so many seconds from now on."""
        self._ended = self._clock(), within_sec

    def _answers(self, step: int) -> list[RankRecord | RankAbsence]:
        """What each of the other ranks says of the window of *step*, for which it is waited."""
        answers: dict[int, RankRecord | RankAbsence] = {}
        began, timeout_sec = self._clock(), self._config.ranks_timeout_sec
        logger.info(
            "the report of step %d waits up to %g s for the %d other rank(s); training goes on",
            step,
            timeout_sec,
            len(self._others),
        )
        counters = [f"{self._keys}/{step}", f"{self._keys}/out"]
        is_over = False
        while not is_over:
            ended, within_sec = self._ended
            waits_sec = min(timeout_sec, max(0.0, ended - began) + within_sec)
            is_late = self._clock() - began >= waits_sec
            sent = self._ask(lambda store: sum(int(store.add(counter, 0)) for counter in counters)) or 0
            if is_late or sent >= len(self._others):
                self._ask(partial(self._read_records, step, answers))
            is_over = is_late or self.failure is not None or len(answers) == len(self._others)
            self._pause(0.0 if is_over else PAUSE_SEC)
        if is_late and within_sec < math.inf:  # the run is over: what is left of its windows waits no longer
            self._ended = self._clock(), 0.0
        why = self.failure or f"no answer within {waits_sec:.3g} s{', when training ended' * (waits_sec < timeout_sec)}"
        return [answers.get(rank) or RankAbsence(rank=rank, reason=why) for rank in self._others]

    def _read_records(self, step: int, answers: dict[int, RankRecord | RankAbsence], store: Store) -> None:
        """Add to *answers* what has come for the window of *step*, which is not awaited twice."""
        for rank in self._others:
            if rank in answers:
                continue
            # The order matters: before a rank says that it is out, it has sent everything else.
            out, key = f"{self._keys}/out/{rank}", f"{self._keys}/{step}/{rank}"
            is_out = store.check([out])
            if store.check([key]):
                answers[rank] = _read(rank, store.get(key))
                store.delete_key(key)
            elif is_out:
                answers[rank] = _read(rank, store.get(out))

    def _merged(self, profile: Profile, answers: list[RankRecord | RankAbsence]) -> Profile:
        """*profile* with the other ranks' *answers*, and which of them sent nothing and why."""
        if missing := [f"rank {one.rank}: {one.reason}" for one in answers if isinstance(one, RankAbsence)]:
            words = "; ".join([*missing[:8], *([f"and {len(missing) - 8} more"] if len(missing) > 8 else [])])
            ranks, step = len(answers) + 1, profile.profile_step
            logger.warning("the report of step %d is of %d of %d ranks; %s", step, ranks - len(missing), ranks, words)
        try:
            return with_ranks(profile, [make_rank_record(profile), *answers], thresholds=self._config.thresholds)
        except Exception as error:  # a report of rank 0 alone is still a report
            note = f"What the ranks sent could not be put together: {words_of(error)}."
            logger.warning(note, exc_info=logger.isEnabledFor(logging.DEBUG))
            return replace(profile, notes=(*profile.notes, note))

    def close(self, why: str = "") -> None:
        """End this rank's part: it sends and reads nothing more; *why*, if that is not clear by what it has sent."""
        last = self._last_step
        self.say_absent(None, why or ("it profiled no step" if last is None else f"it last profiled step {last}"))
        self._ask(self._leave)
        self.failure = "this rank has left"

    def _leave(self, store: Store) -> None:
        if store.add(f"{self._keys}/left", 1) == len(self._others) + 1:
            for key in store.list_keys():
                if key.startswith(f"{self._keys}/"):
                    store.delete_key(key)

    def _ask(self, do: Callable[[Store], Any]) -> Any:
        """What *do* returns of the store; None from the first failure on."""
        if self.failure is None:
            try:
                return do(self._find_store())
            except Exception as error:  # the store's server may be gone, with the process that held it
                logger.debug("the ranks' store failed", exc_info=True)
                self.failure = f"the key-value store failed: {words_of(error)}"
        return None


def _read(rank: int, packed: bytes) -> RankRecord | RankAbsence:
    """What *rank* sent; whatever that is, only that rank is missing from the report."""
    try:
        answer = unpack(packed)
    except Exception as error:
        return RankAbsence(rank=rank, reason=f"what it sent cannot be read: {words_of(error)}")
    return answer if answer.rank == rank else RankAbsence(rank=rank, reason=f"what it sent is of rank {answer.rank}")
