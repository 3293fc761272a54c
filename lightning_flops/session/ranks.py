"""One rank's part in the report of the whole job: the others send what they measured, rank 0 collects it and reports.

Rank 0 trains on while it waits: between batches, ``show_ready`` looks whether the answers are there.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from lightning_flops.analysis.rank_record import RankRecordError, make_rank_record, pack, unpack
from lightning_flops.analysis.ranks import with_ranks
from lightning_flops.config import OWN_FOLDER
from lightning_flops.schema.rank_record import RankRecord
from lightning_flops.schema.ranks import RankAbsence
from lightning_flops.session.rank_exchange import Collection, RankExchange, next_run_number
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.schema.profile import Profile

logger = package_logger(__name__)

_ABSENCES_LOGGED = 8
"""A log line names at most this many absent ranks."""

_SEC_AFTER_ERROR = 2.0
"""How long a report may wait for the other ranks when training has raised."""

_SEC_TO_LEAVE = 2.0
"""A rank whose run is over waits at most this long until the store has what it sent."""

_SEC_FOR_FOLDER = 2.0
"""A rank waits at most this long to learn where files go. Rank 0 wrote that to the store when the run began."""

_FOLDER = "folder"


class RankReports:
    """Sends, collects and merges what the ranks of one run measured.

    Args:
        exchange: how the ranks exchange messages.
        config: the settings.
        show: shows this rank's profile; on rank 0 that is the job's.
    """

    def __init__(self, exchange: RankExchange, *, config: ProfilerConfig, show: Callable[[Profile], None]) -> None:
        self._exchange = exchange
        self._config = config
        self._show = show
        self._pending: collections.deque[tuple[Profile, Collection[RankRecord | RankAbsence]]] = collections.deque()
        self._awaited = config.next_profile_step(steps_done=0)
        self._last_sent: int | None = None

    @property
    def pending(self) -> bool:
        """Whether a report waits for other ranks."""
        return bool(self._pending)

    def await_window(self, step: int | None) -> None:
        """The next window is that of *step*; None: there is none. From here on, rank 0 waits for an answer about it."""
        self._awaited = step

    def hand_over(self, profile: Profile) -> None:
        """Add *profile*, of a window that has closed on this rank, to the job's report."""
        step, self._awaited = profile.profile_step, None
        if self._exchange.rank == 0:
            self._pending.append((profile, self._exchange.collect(step, read=_read)))
            logger.info(
                "the report of step %d waits up to %g s for the %d other rank(s); training goes on",
                step,
                self._exchange.timeout_sec,
                self._exchange.world_size - 1,
            )
            return
        try:
            packed = pack(make_rank_record(profile))
        except Exception as error:  # tell rank 0, so that it does not wait for a record that will not come
            packed = self._absence(f"its measurements could not be packed: {type(error).__name__}: {error}")
        self._exchange.send(step, packed)
        self._last_sent = step
        self._show(profile)

    def say_absent(self, step: int, reason: str) -> None:
        """Tell rank 0 that this rank sends no record for the window of *step*, and the *reason*."""
        if self._exchange.rank:
            self._exchange.send(step, self._absence(reason))

    def say_out(self, reason: str) -> None:
        """Tell rank 0 that this rank sends nothing more; *reason* says why the window that was due does not come."""
        if not self._exchange.rank:
            return
        # If rank 0 waits for one all the same, it has other settings, or skipped a step.
        if self._awaited is None:
            reason = "it profiled no step" if self._last_sent is None else f"it last profiled step {self._last_sent}"
        self._exchange.send_out(self._absence(reason))

    def show_ready(self) -> bool:
        """Show the reports that need not wait any more; return whether there were any."""
        before = len(self._pending)
        while self._pending and self._pending[0][1].ready:
            self._show_next()
        return len(self._pending) < before

    def show_all(self, *, within_sec: float | None = None) -> None:
        """Show every report, after waiting for the rest of its time, or for *within_sec* if that is shorter."""
        while self._pending:
            collection = self._pending[0][1]
            if within_sec is not None:
                collection.hurry(within_sec)
            if not collection.ready:
                logger.info("waiting %.1f s at most for the measurements of the other ranks", collection.seconds_left)
                collection.wait_until_ready()
            self._show_next()

    def finish(self, *, steps_done: int, interrupted_by: BaseException | None) -> None:
        """The run is over: tell rank 0 of a window that never closed; rank 0 itself waits for the other ranks."""
        if interrupted_by is None:
            self.say_out(f"its run ended after {steps_done} step(s), before its window closed")
            self.show_all()
        else:
            self.say_out(f"its training was interrupted by {type(interrupted_by).__name__}")
            # Do not hold the exception back for long. Its cause may have ended the other ranks, too.
            self.show_all(within_sec=_SEC_AFTER_ERROR if isinstance(interrupted_by, Exception) else 0.0)

    def _show_next(self) -> None:
        self._show(self._merged(*self._pending.popleft()))

    def _merged(self, profile: Profile, collection: Collection[RankRecord | RankAbsence]) -> Profile:
        """*profile*, which is rank 0's, with what the other ranks sent, and which ranks sent nothing and why."""
        received = dict(collection.answers)
        answers = [
            received[rank] if rank in received else RankAbsence(rank=rank, reason=collection.why_missing)
            for rank in range(1, self._exchange.world_size)
        ]
        _log_absences([answer for answer in answers if isinstance(answer, RankAbsence)], profile, of=1 + len(answers))
        try:
            return with_ranks(
                profile,
                [make_rank_record(profile), *answers],
                waited_sec=collection.waited_sec,
                thresholds=self._config.thresholds,
            )
        except Exception as error:  # a report of rank 0 alone is still a report
            note = f"What the ranks sent could not be put together: {type(error).__name__}: {error}."
            logger.warning(note, exc_info=logger.isEnabledFor(logging.DEBUG))
            return replace(profile, notes=(*profile.notes, note))

    def tell_folder(self, folder: str) -> None:
        """Let all ranks know where rank 0's files go; empty if it writes none."""
        self._exchange.tell(_FOLDER, folder)

    def folder(self) -> str | None:
        """Where rank 0's files go; None if it writes none. If it did not say: our folder in the working directory."""
        folder = self._exchange.ask(_FOLDER, within_sec=_SEC_FOR_FOLDER)
        return OWN_FOLDER if folder is None else folder or None

    def leave(self, *, wait: bool) -> None:
        """This rank sends nothing more; with *wait*, wait a little until the store has what it sent."""
        self._exchange.leave(within_sec=_SEC_TO_LEAVE if wait else 0.0)

    def _absence(self, reason: str) -> bytes:
        return pack(RankAbsence(rank=self._exchange.rank, reason=reason))


def join_ranks(*, rank: int, world_size: int, config: ProfilerConfig, show: Callable[[Profile], None]) -> RankReports:
    """The part of *rank* in the reports of the run that begins now.

    Raises:
        NoExchangeError: the ranks cannot tell each other anything.
    """
    exchange = RankExchange(
        rank=rank, world_size=world_size, run_number=next_run_number(), timeout_sec=config.ranks_timeout_sec
    )
    return RankReports(exchange, config=config, show=show)


def _read(rank: int, packed: bytes) -> RankRecord | RankAbsence:
    try:
        answer = unpack(packed)
    except RankRecordError as error:
        return RankAbsence(rank=rank, reason=f"what it sent cannot be read: {error}")
    except Exception as error:  # whatever that rank sent, only that rank is missing from the report
        logger.debug("a record could not be read", exc_info=True)
        return RankAbsence(rank=rank, reason=f"what it sent cannot be read: {type(error).__name__}: {error}")
    if answer.rank != rank:
        return RankAbsence(rank=rank, reason=f"what it sent is of rank {answer.rank}")
    return answer


def _log_absences(absences: list[RankAbsence], profile: Profile, *, of: int) -> None:
    if not absences:
        return
    named = [f"rank {absence.rank}: {absence.reason}" for absence in absences[:_ABSENCES_LOGGED]]
    if len(absences) > _ABSENCES_LOGGED:
        named.append(f"and {len(absences) - _ABSENCES_LOGGED} more")
    logger.warning(
        "the report of step %d is of %d of %d ranks; %s", profile.profile_step, of - len(absences), of, "; ".join(named)
    )
