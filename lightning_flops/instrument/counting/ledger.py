"""What one counter has written down: the books of every thread, and sentences for the report."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

from lightning_flops.instrument.counting.thread_state import ENDED, ThreadState
from lightning_flops.instrument.torch_private.names import LOST
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)


class Ledger:
    """The books of all threads of one counter, and its notes.

    It knows neither the counter nor the model: what writes into it does not keep them alive.
    """

    def __init__(self) -> None:
        self.local = threading.local()
        """Holds each thread's books as ``local.state``, once ``state()`` was called on it."""
        self._notes: list[str] = []
        self._lock = threading.Lock()
        self._threads: list[ThreadState] = []
        self._failures: set[str] = set()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the report, those on what this torch does not tell first."""
        return tuple(dict.fromkeys((*LOST, *self._notes)))

    def state(self) -> ThreadState:
        """The books of this thread, new ones at first."""
        try:
            state: ThreadState = self.local.state
        except AttributeError:
            state = self.local.state = ThreadState()
            with self._lock:
                for other in self._threads:
                    if other.ident == state.ident:
                        other.ident = ENDED  # the system gives a thread's identifier to the next one
                self._threads.append(state)
        return state

    def threads(self) -> list[ThreadState]:
        """The books of all threads."""
        with self._lock:
            return list(self._threads)

    def note(self, sentence: str) -> None:
        """Takes a sentence for the report; one that it has already changes nothing."""
        if sentence not in self._notes:
            self._notes.append(sentence)

    def failed(self, where: str, error: Exception) -> None:
        """Notes for the report that the counter failed in *where*, and says so in the log, the first time of all.

        For the handlers that torch calls: whatever is raised in one of them, the user's step goes on. So it raises
        nothing itself, whatever a handler of the user's log does.
        """
        with suppress(Exception):
            if where in self._failures:
                return
            self._failures.add(where)
            sentence = f"Counting failed in {where} ({type(error).__name__}: {error}); FLOPs may be missing."
            self.note(sentence)
            level = logging.WARNING if len(self._failures) == 1 else logging.DEBUG
            logger.log(level, sentence, exc_info=error)
