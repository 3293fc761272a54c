"""Parts of a tensor: its sparse values, its nested sizes, its shard."""

from __future__ import annotations

from typing import Any

import torch

from lightning_flops.instrument.torch_private.dispatch import modes_off


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that a COO tensor stores."""
    return tensor._values()


def stored_count(tensor: torch.Tensor) -> int:
    """How many elements a COO tensor stores."""
    return int(tensor._nnz())


def stored_indices(tensor: torch.Tensor) -> torch.Tensor:
    """The indices of the elements that a COO tensor stores: a row for each sparse dimension."""
    return tensor._indices()


def nested_sizes(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """Shapes of the tensors in a nested tensor with strides."""
    return [tuple(map(int, row)) for row in tensor._nested_tensor_size().tolist()]


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of *tensor*, which ZeRO-3 or a DTensor may have split; ZeRO-3 keeps the part in ds_tensor."""
    shard = getattr(tensor, "ds_tensor", None)
    if isinstance(shard, torch.Tensor):
        tensor = shard
    to_local: Any = getattr(tensor, "to_local", None)
    if not callable(to_local):
        return tensor
    # Neither autograd nor a subclass sees this reading.
    shard = getattr(tensor, "_local_tensor", None)
    if shard is None:
        with modes_off(), torch.no_grad():
            shard = to_local()
    return shard if isinstance(shard, torch.Tensor) else tensor
