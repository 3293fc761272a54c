"""DataLoaders: the class of their iterators, and the queues between an iterator and its worker processes."""

from __future__ import annotations

from typing import Any, NamedTuple

from lightning_flops.instrument.torch_private.names import Attribute, take, take_later

_MODULE = "torch.utils.data.dataloader"

iterator_class = take_later(
    f"{_MODULE}:_BaseDataLoaderIter",
    None,
    "does not show where a DataLoader hands out its batches: the time that a DeepSpeed loop waits for its data is n/a",
)
"""Answers with the class of every DataLoader's iterators; with None in a torch that does not show it."""

_WITH_WORKERS: Any = take(
    f"{_MODULE}:_MultiProcessingDataLoaderIter",
    None,
    "does not name the iterators of DataLoaders with workers: they are known by their queues",
    reported=False,
)

_LOSS = (
    "does not show how full a DataLoader's queue is: if the loop is faster than its loader, the first timed steps may "
    "live on batches that were fetched ahead"
)


def _attribute(name: str) -> Attribute:
    return Attribute(f"{_MODULE}:_MultiProcessingDataLoaderIter", name, _LOSS, reported=False)


def _of_any_iterator(name: str, loss: str) -> Attribute:
    return Attribute(f"{_MODULE}:_BaseDataLoaderIter", name, loss, reported=False)


_QUEUE = _attribute("_data_queue")
_RESULTS = _attribute("_worker_result_queue")
_TASKS = _attribute("_task_info")
_SENT = _attribute("_send_idx")
_RECEIVED = _attribute("_rcvd_idx")
_WORKERS = _attribute("_num_workers")
_PREFETCHED = _of_any_iterator(
    "_prefetch_factor",
    "does not show how many batches a DataLoader fetches ahead: the first timed steps may live on batches that were",
)
_YIELDED = _of_any_iterator(
    "_num_yielded",
    "does not show where a DataLoader with persistent workers begins anew: the first batch of a pass may be taken for "
    "one that was fetched together with the last one of the pass before",
)


class WorkerQueues(NamedTuple):
    """What lies between a loader's iterator and its worker processes."""

    ready: int
    """Batches that are made and not consumed."""
    ordered: int
    """Batches that were ordered and not consumed, the ready ones included."""
    workers: int


def has_workers(iterator: Any) -> bool:
    """Whether *iterator* is that of a DataLoader with worker processes."""
    if _WITH_WORKERS is None:
        return hasattr(iterator, "_data_queue")
    return isinstance(iterator, _WITH_WORKERS)


def worker_queues(iterator: Any) -> WorkerQueues:
    """The queues of an iterator with worker processes.

    Raises:
        AttributeError, TypeError: this torch keeps them in another way.
        NotImplementedError: the system does not tell how long a queue between processes is.
    """
    queue, results = _QUEUE.of(iterator), _RESULTS.of(iterator)
    # In a queue, from a worker or past the thread that pins memory; or taken from it before its turn.
    ready = int(queue.qsize()) + sum(len(task) == 2 for task in _TASKS.of(iterator).values())
    if results is not queue:
        ready += int(results.qsize())
    return WorkerQueues(ready, int(_SENT.of(iterator) - _RECEIVED.of(iterator)), int(_WORKERS.of(iterator)))


def _is_loaders(iterator: Any) -> bool:
    """Whether *iterator* is a DataLoader's."""
    kind = iterator_class()
    return kind is not None and isinstance(iterator, kind)


def workers_of(iterator: Any) -> int | None:
    """The worker processes of a DataLoader's iterator; None if it does not tell, or is another iterator."""
    workers = _WORKERS.get(iterator, None) if _is_loaders(iterator) else None
    return workers if isinstance(workers, int) else None


def yielded_by(iterator: Any) -> int | None:
    """Batches that a DataLoader's iterator has delivered in its present pass; None as for ``workers_of``.

    One with persistent workers begins anew in each pass.
    """
    yielded = _YIELDED.get(iterator, None) if _is_loaders(iterator) else None
    return yielded if isinstance(yielded, int) else None


def fetched_ahead(loader: Any) -> int:
    """Batches that the workers of a DataLoader, or of its iterator, fetch ahead; 0 of anything without workers."""
    if _is_loaders(loader):
        workers, of_each = _WORKERS.get(loader, 0), _PREFETCHED.get(loader, 0)
    else:
        workers, of_each = getattr(loader, "num_workers", 0), getattr(loader, "prefetch_factor", 0)
    return int((workers or 0) * (of_each or 0))
