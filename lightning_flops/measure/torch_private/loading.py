"""What a run has beside its model: DataLoaders, and the key-value store of its ranks."""

from __future__ import annotations

from typing import Any

from lightning_flops.measure.torch_private.names import optional

store_getter = optional("torch.distributed.distributed_c10d:_get_default_store")
"""Answers with the function that answers with the store of the default process group; with None where there is none."""

iterator_class = optional("torch.utils.data.dataloader:_BaseDataLoaderIter")
"""Answers with the class of every DataLoader's iterators; with None in a torch that does not show it."""


def _is_loaders(iterator: Any) -> bool:
    """Whether *iterator* is a DataLoader's."""
    kind = iterator_class()
    return kind is not None and isinstance(iterator, kind)


def workers_of(iterator: Any) -> int | None:
    """The worker processes of a DataLoader's iterator; None if it does not say, or is another iterator."""
    workers = getattr(iterator, "_num_workers", None) if _is_loaders(iterator) else None
    return workers if isinstance(workers, int) else None


def fetched_ahead(loader: Any) -> int:
    """Batches that the workers of a DataLoader, or of its iterator, fetch ahead; 0 of anything without workers."""
    private = "_" if _is_loaders(loader) else ""
    workers, of_each = (getattr(loader, f"{private}{name}", 0) for name in ("num_workers", "prefetch_factor"))
    return int((workers or 0) * (of_each or 0))
