"""Parts of a tensor: its sparse values, its nested sizes, its storage's number, its shard."""

from __future__ import annotations

from typing import Any

import torch

from lightning_flops.instrument.torch_private.dispatch import modes_off, out_of_sight
from lightning_flops.instrument.torch_private.names import Attribute, take, take_later

_SPARSE_LOSS = (
    "does not show the parts of a sparse tensor as they are stored: elements that are stored twice count once"
)


def _merged(tensor: torch.Tensor) -> torch.Tensor:
    with out_of_sight(), torch.no_grad():
        return tensor.detach().coalesce()


_values = take_later("torch:Tensor._values", lambda tensor: _merged(tensor).values(), _SPARSE_LOSS)
_count = take_later("torch:Tensor._nnz", lambda tensor: _merged(tensor).values().shape[0], _SPARSE_LOSS)
_indices = take_later("torch:Tensor._indices", lambda tensor: _merged(tensor).indices(), _SPARSE_LOSS)


def stored_values(tensor: torch.Tensor) -> torch.Tensor:
    """The elements that a COO tensor stores."""
    return _values()(tensor)  # type: ignore[no-any-return]


def stored_count(tensor: torch.Tensor) -> int:
    """How many elements a COO tensor stores."""
    return int(_count()(tensor))


def stored_indices(tensor: torch.Tensor) -> torch.Tensor:
    """The indices of the elements that a COO tensor stores: a row for each sparse dimension."""
    return _indices()(tensor)  # type: ignore[no-any-return]


_nested_size: Any = take(
    "torch:Tensor._nested_tensor_size",
    None,
    "does not show the sizes in a nested tensor at once: each of its tensors is asked",
    reported=False,
)


def nested_sizes(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """Shapes of the tensors in a nested tensor with strides."""
    if _nested_size is None:
        return [tuple(part.shape) for part in tensor.unbind()]
    return [tuple(map(int, row)) for row in _nested_size(tensor).tolist()]


_no_memory: Any = take(
    "torch:Tensor._is_zerotensor",
    lambda tensor: False,
    "does not tell tensors of zeros without memory: nothing is lost by that",
    reported=False,
)


_STORAGE = Attribute(
    "torch:UntypedStorage",
    "_cdata",
    "does not number storages: empty ones are not told apart, and custom operators of such tensors may be listed as "
    "uncounted",
)


_SHARD = Attribute(
    "torch.distributed.tensor:DTensor",
    "_local_tensor",
    "does not show a DTensor's local part at once: DTensor.to_local is asked",
    reported=False,
)


def local_shard(tensor: torch.Tensor) -> torch.Tensor | None:
    """What this rank holds of a DTensor; None for any other tensor."""
    to_local: Any = getattr(tensor, "to_local", None)
    if not callable(to_local):
        return None
    # Neither autograd nor a subclass sees this reading.
    shard = _SHARD.get(tensor, None)
    if shard is None:
        with modes_off(), torch.no_grad():
            shard = to_local()
    return shard if isinstance(shard, torch.Tensor) else None
