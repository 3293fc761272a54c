"""DataLoaders: the class of their iterators, and how many batches their workers fetch ahead."""

from __future__ import annotations

from typing import Any

from lightning_flops.instrument.torch_private.names import Attribute, take_later

_MODULE = "torch.utils.data.dataloader"

iterator_class = take_later(
    f"{_MODULE}:_BaseDataLoaderIter",
    None,
    "does not show where a DataLoader hands out its batches: the time that a DeepSpeed loop waits for its data is n/a",
)
"""Answers with the class of every DataLoader's iterators; with None in a torch that does not show it."""

_LOSS = "does not show how many batches a DataLoader fetches ahead: the first timed steps may live on batches that were"
_WORKERS = Attribute(f"{_MODULE}:_MultiProcessingDataLoaderIter", "_num_workers", _LOSS, reported=False)
_PREFETCHED = Attribute(f"{_MODULE}:_BaseDataLoaderIter", "_prefetch_factor", _LOSS, reported=False)


def _is_loaders(iterator: Any) -> bool:
    """Whether *iterator* is a DataLoader's."""
    kind = iterator_class()
    return kind is not None and isinstance(iterator, kind)


def workers_of(iterator: Any) -> int | None:
    """The worker processes of a DataLoader's iterator; None if it does not tell, or is another iterator."""
    workers = _WORKERS.get(iterator, None) if _is_loaders(iterator) else None
    return workers if isinstance(workers, int) else None


def fetched_ahead(loader: Any) -> int:
    """Batches that the workers of a DataLoader, or of its iterator, fetch ahead; 0 of anything without workers."""
    if _is_loaders(loader):
        workers, of_each = _WORKERS.get(loader, 0), _PREFETCHED.get(loader, 0)
    else:
        workers, of_each = getattr(loader, "num_workers", 0), getattr(loader, "prefetch_factor", 0)
    return int((workers or 0) * (of_each or 0))
