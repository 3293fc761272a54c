"""How full the queues of DataLoader workers are: shows whether timed steps use batches that were fetched before them.

A slow step, such as a counted one, gives the workers time to fetch ahead. If the loop is faster than its loader, it
uses those batches first, without any waiting. Only after that does it wait as it does in the long run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from lightning_flops.instrument.torch_private.loading import has_workers, worker_queues


class FeedState(Enum):
    """The state of the queue that feeds the training loop."""

    EMPTY = "empty"
    """The queue is empty: the loop waits for the workers, and will go on waiting."""
    KEEPS_UP = "keeps up"
    """Batches are ready, and a worker has nothing to do: a queue is full."""
    DRAINING = "draining"
    """Batches are ready, but all workers are busy: the loop uses batches faster than they are made."""


class Backlog(NamedTuple):
    """Batches of one loader, right before one is used."""

    ready: int
    """Made, and not used yet."""
    behind: int
    """Ordered from the workers, and not made yet."""
    workers: int

    @property
    def state(self) -> FeedState:
        """The loop's state if this loader is its only one."""
        if self.ready == 0:
            return FeedState.EMPTY
        return FeedState.KEEPS_UP if self.behind < self.workers else FeedState.DRAINING


class Feed(Protocol):
    """What feeds the training loop."""

    def state(self) -> FeedState | None:
        """The queue's state right after a step; None if not known."""

    def least_steps(self) -> int:
        """Steps after a pause until the state is that of the long run: until every worker had something to do again."""

    def rhythm_steps(self) -> int:
        """Number of steps after which the waits of a waiting loop repeat."""


class LoaderQueue:
    """The queues of the training loop's DataLoaders; the loader that limits the loop decides the state.

    Args:
        backlogs: reads the queues as they are now.
        batches_a_step: batches of each loader that one global step uses.
    """

    def __init__(self, backlogs: Callable[[], Sequence[Backlog]], *, batches_a_step: int) -> None:
        self._backlogs = backlogs
        self._batches_a_step = batches_a_step

    def state(self) -> FeedState | None:
        """The state of the queue that limits the loop; None if no queue can be read."""
        states = {backlog.state for backlog in self._backlogs()}
        limiting = (FeedState.EMPTY, FeedState.DRAINING, FeedState.KEEPS_UP)
        return next((state for state in limiting if state in states), None)

    def least_steps(self) -> int:
        """Steps after a pause until every worker had something to do again; 0 if no queue can be read."""
        workers = max((one.workers for one in self._backlogs()), default=-1)
        return math.ceil((workers + 1) / self._batches_a_step)

    def rhythm_steps(self) -> int:
        """Steps in which a loop that waits for its loader goes once around all workers.

        Workers that start together deliver together: the loop waits long for the first of their batches, and not at all
        for the others. So only whole rounds have the wait of the long run.
        """
        workers = max((one.workers for one in self._backlogs() if one.state is FeedState.EMPTY), default=1)
        return workers // math.gcd(workers, self._batches_a_step)


def backlogs_of(iterators: Iterable[Any], *, note: Callable[[str], None]) -> list[Backlog]:
    """The queues of a run's loader iterators, as far as they have worker processes.

    Args:
        iterators: of any kind.
        note: gets a sentence for the report if a queue cannot be read.
    """
    try:
        return [backlog_of(iterator) for iterator in iterators if has_workers(iterator)]
    except (AttributeError, NotImplementedError, TypeError) as error:
        # The queues are private to torch, and some systems do not give the length of a queue between processes.
        note(
            f"How full the data loader's queue is could not be seen ({type(error).__name__}: {error}): if the loop is "
            "faster than its loader, the first timed steps may live on batches that were fetched ahead."
        )
        return []


def backlog_of(iterator: Any) -> Backlog:
    """Batches that *iterator* has ready and has ordered.

    Raises:
        AttributeError, TypeError: this torch keeps them in another way.
        NotImplementedError: the system does not give the length of a queue.
    """
    queues = worker_queues(iterator)
    return Backlog(ready=queues.ready, behind=max(0, queues.ordered - queues.ready), workers=queues.workers)
