"""Calls of taps that a door is told of later, while only the monitor needs to know of them."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import TYPE_CHECKING, Any

from lightning_flops.instrument.timing.monitor import BatchLog
from lightning_flops.session.replayed import Replayed
from lightning_flops.session.token_reader import TokenReader

if TYPE_CHECKING:
    from lightning_flops.records import BatchTokens, Shapes

FETCH, NO_BATCH, FORWARD, FORWARD_ENDS, BACKWARD, BACKWARD_ENDS, UPDATE, UPDATE_ENDS, TOLD = range(9)
"""Kinds of what is noted. A forward, a backward and an update have two, one for the begin and the next for the end.

NO_BATCH is a fetch that raised. TOLD is that the loop has told of a batch.
"""

FACTS = (1, 1, 2, 0, 0, 1, 1, 2, 2)
"""How many facts are noted with each kind.

A fetch: a tuple of when it began and ended, and of its batch the shapes and the tokens. FORWARD: when, and what is seen
in its arguments, None if its batch was fetched. UPDATE: the optimizer. BACKWARD_ENDS: when. UPDATE_ENDS and TOLD, with
which a step may end: when, and how many autograd nodes were made by then. All others: none.
"""

Seen = tuple["Shapes", "BatchTokens | None"]
"""The shapes and the tokens of a batch."""

MOST_KINDS = 2000
"""If more than that is noted, the door is told, also within a step: these are a few hundred kilobytes."""


class NotedCalls:
    """What the taps of a loop note between windows, when nobody asks what has happened before the monitor is read.

    Telling a door at once takes dozens of calls a step, whose code is no longer in the processor's cache. A note takes
    none. The door is told of many steps together, of the same calls in the same order. Before anything unusual is told
    at once, ``stop`` tells it all that was noted.

    Args:
        tell: gets the kinds that were noted, and their facts.
        tokens: reads the tokens of what is fetched.
        replayed: remembers what is fetched.
    """

    __slots__ = (
        *(
            "__weakref__",
            "_tell",
            "facts",
            "feeds",
            "fetching",
            "hands_over",
            "has_batch",
            "kinds",
            "nodes",
            "now",
            "on",
        ),
        *("replayed", "running", "steps_left", "thread", "tokens", "until"),
    )

    def __init__(
        self, tell: Callable[[bytes, list[Any]], object], *, tokens: TokenReader, replayed: Replayed | None = None
    ) -> None:
        self.tokens = tokens
        self.replayed = Replayed() if replayed is None else replayed
        self.on = False
        """Calls on the thread ``thread`` are noted."""
        self.thread = 0
        self.kinds = bytearray()
        self.facts: list[Any] = []
        self.steps_left = 0
        """In less than so many steps somebody must look."""
        self.until = 0.0
        """From this time on somebody must look."""
        self.has_batch = False
        """A batch has been fetched since the last forward, and nothing more is to be seen of it."""
        self.fetching = False
        """A fetch that is going to be noted is running."""
        self.feeds: Callable[[], Any] = _nobody
        """Returns the iterator whose fetches are noted, if it still exists."""
        self.hands_over: Callable[[Seen | None], Seen | None] | None = None
        """Of what was fetched, returns what the loop gets now, if that is not the same; None is no batch."""
        self.running: list[Any] = []
        """What the door has made of the begin of each call that is running."""
        self.now: Callable[[], float] = _no_time
        self.nodes: Callable[[], int] = _no_nodes
        self._tell = tell

    def start(self, log: BatchLog, *, steps: int, has_batch: bool) -> None:
        """Note the calls of this thread from here on, for less than so many *steps*, as long as *log* may."""
        self.now, self.nodes, self.thread = log.now, log.nodes, get_ident()
        self.steps_left, self.until, self.has_batch = steps, log.until, has_batch
        self.on = True

    def fetched(self, since: float, ended: float, found: Seen | None) -> None:
        """A fetch has ended.

        Args:
            since: when it began.
            ended: when it ended.
            found: the batch that was fetched; None if there was none.
        """
        if self.hands_over is not None:
            found = self.hands_over(found)
        if found is None:
            self.has_batch = False
            self.kinds.append(NO_BATCH)
            self.facts.append((since, ended, None, None))
        else:
            self.has_batch = not self.replayed.wants_arguments(*found)
            self.kinds.append(FETCH)
            self.facts.append((since, ended, *found))
        if not self.on:
            self.tell_all()
        elif len(self.kinds) > MOST_KINDS:  # a loop may fetch without end, and do nothing with what it gets
            self.stop()

    def stop(self) -> None:
        """Tell the door of everything that was noted; from here on it is told at once."""
        if self.on:
            self.on = False
            if self.kinds:  # a loop whose batches are of no DataLoader has each fetch told at once, and nothing noted
                self.tell_all()

    def tell_all(self) -> None:
        """Tell the door of everything that was noted."""
        kinds, facts = bytes(self.kinds), self.facts[:]
        self.kinds.clear()
        self.facts.clear()
        self._tell(kinds, facts)

    def close(self) -> None:
        """Note nothing any more, and let go of what was noted."""
        self.on = False
        self.kinds.clear()
        self.facts.clear()

    def ends_now(self, ends: Callable[[Any], object]) -> None:
        """The call that began last has ended, and the door is told at once."""
        self.stop()
        token = self.running.pop()
        if token is not None:
            ends(token)

    def fails_now(self, fails: Callable[[Any, BaseException], object], error: BaseException) -> None:
        """The call that began last has raised *error*, and the door is told at once."""
        self.stop()
        token = self.running.pop()
        if token is not None:
            fails(token, error)


def _nobody() -> None:
    return None


def _no_time() -> float:
    return 0.0


def _no_nodes() -> int:
    return 0
