"""How full the queues are that DataLoader workers fill: whether a step that is timed lives on batches made before it.

A step that was slowed down, as a counted one is, gives the workers time to fetch ahead. A loop that is faster than its
loader then consumes those batches first, without any waiting, and only after that waits as it does in the long run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from lightning_flops.instrument.torch_private.loading import fetched_ahead, has_workers, worker_queues


class FeedState(Enum):
    """What the training loop lives on."""

    EMPTY = "empty"
    """The queue is empty: the loop waits for the workers, and goes on waiting."""
    KEEPS_UP = "keeps up"
    """Batches lie ready, and a worker has nothing to do: a queue is full."""
    DRAINING = "draining"
    """Batches lie ready, but all workers are busy: the loop consumes batches faster than they are made."""


class Backlog(NamedTuple):
    """Batches of one loader, right before one is consumed."""

    ready: int
    """Made, and not consumed."""
    behind: int
    """Ordered from the workers, and not made."""
    workers: int

    @property
    def state(self) -> FeedState:
        """What the loop lives on if this loader is its only one."""
        if self.ready == 0:
            return FeedState.EMPTY
        return FeedState.KEEPS_UP if self.behind < self.workers else FeedState.DRAINING


class Feed(Protocol):
    """What feeds the training loop."""

    def state(self) -> FeedState | None:
        """What the loop lives on right after a step; None if nobody can tell."""

    def least_steps(self) -> int:
        """Steps after a pause until the state tells the long run: until every worker had something to do again."""

    def rhythm_steps(self) -> int:
        """Steps after which the waiting of a loop that waits begins anew."""


class LoaderQueue:
    """The queues of the training loop's DataLoaders, by the loader that limits the loop.

    Args:
        backlogs: looks into the queues as they are now.
        batches_a_step: batches that one global step consumes of each.
    """

    def __init__(self, backlogs: Callable[[], Sequence[Backlog]], *, batches_a_step: int) -> None:
        self._backlogs = backlogs
        self._batches_a_step = batches_a_step

    def state(self) -> FeedState | None:
        """What the training loop lives on; None if no queue can be looked into."""
        states = {backlog.state for backlog in self._backlogs()}
        limiting = (FeedState.EMPTY, FeedState.DRAINING, FeedState.KEEPS_UP)
        return next((state for state in limiting if state in states), None)

    def least_steps(self) -> int:
        """Steps after a pause until every worker had something to do again; 0 if no queue can be looked into."""
        workers = max((one.workers for one in self._backlogs()), default=-1)
        return math.ceil((workers + 1) / self._batches_a_step)

    def rhythm_steps(self) -> int:
        """Steps after which a loop that waits for its loader has gone once around all workers.

        Workers that start together deliver together: the loop waits long for the first of their batches and not at all
        for the others, so that only whole rounds have the wait of the long run.
        """
        workers = max((one.workers for one in self._backlogs() if one.state is FeedState.EMPTY), default=1)
        return workers // math.gcd(workers, self._batches_a_step)


def batches_ahead(loader: Any) -> int:
    """Batches that the workers of a DataLoader, or of its iterator, fetch ahead; 0 of anything without workers."""
    return fetched_ahead(loader)


def backlogs_of(iterators: Iterable[Any], *, note: Callable[[str], None]) -> list[Backlog]:
    """The queues of those of a run's loader iterators that have worker processes.

    Args:
        iterators: of any kind.
        note: gets a sentence for the report if a queue cannot be looked into.
    """
    try:
        return [backlog_of(iterator) for iterator in iterators if has_workers(iterator)]
    except (AttributeError, NotImplementedError, TypeError) as error:
        # The queues are private to torch; and some systems do not tell how long a queue between processes is.
        note(
            f"How full the data loader's queue is could not be seen ({type(error).__name__}: {error}): if the loop is "
            "faster than its loader, the first timed steps may live on batches that were fetched ahead."
        )
        return []


def backlog_of(iterator: Any) -> Backlog:
    """Batches that *iterator* has ready and has ordered.

    Raises:
        AttributeError, TypeError: this torch keeps them in another way.
        NotImplementedError: the system does not tell.
    """
    queues = worker_queues(iterator)
    return Backlog(ready=queues.ready, behind=max(0, queues.ordered - queues.ready), workers=queues.workers)
