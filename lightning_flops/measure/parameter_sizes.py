"""How large a parameter is as a part of the whole model, and how much of it this rank holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_flops.measure.deepspeed_groups import expert_parallel_size, tensor_parallel_size_of_process
from lightning_flops.measure.torch_private.optional import flat_parts, on_this_rank, wraps


class Held(NamedTuple):
    """A parameter that a module holds."""

    shape: tuple[int, ...] | None  #: None for a lazy one.
    size: int  #: Elements of it in the whole model.
    trainable: bool
    local: int  #: Elements of it in this rank's memory.
    dtype: torch.dtype


class Parameters:
    """The parameters of a model's modules, as they were before torch's FullyShardedDataParallel made flat ones of them.

    How large they were, only a flat parameter says, which a wrapper holds: *whole* is the model in all its wrappers.
    *note* gets a sentence on what cannot be known.
    """

    def __init__(self, whole: nn.Module, *, note: Callable[[str], object]) -> None:
        self._pieces: dict[nn.Module, dict[Hashable, Held]] = {}
        self._flat: set[int] = set()
        try:
            for wrapper in whole.modules():
                if wraps(wrapper, "_fsdp_wrapped_module"):
                    tensors, pieces = flat_parts(wrapper)
                    self._flat.update(map(id, tensors))
                    for module, (key, shape, trainable, local, dtype) in pieces:
                        found = Held(shape, math.prod(shape), trainable, local, dtype)
                        self._pieces.setdefault(module, {})[key] = found
        except Exception as error:
            self._pieces.clear()
            self._flat.clear()
            note(
                "Parameters are those of this rank's shards: what FullyShardedDataParallel made them of could not be "
                f"read ({type(error).__name__}: {error})."
            )

    def of(self, module: nn.Module) -> dict[Hashable, Held]:
        """What *module* itself holds; the key of a parameter is the same for all that share it."""
        own = (one for one in module.parameters(recurse=False) if id(one) not in self._flat)
        return {**self._pieces.get(module, {}), **{id(parameter): held(parameter) for parameter in own}}


def held(parameter: torch.Tensor) -> Held:
    """The sizes of *parameter*.

    A rank that holds one shard of a parameter answers for the ranks that hold the other shards, and the same holds for
    experts. If several pipeline stages hold a copy of it, only the first stage counts it, so that stages add up to the
    model.
    """
    trainable, dtype = bool(parameter.requires_grad), parameter.dtype
    if is_lazy(parameter):
        return Held(None, 0, trainable, 0, dtype)
    # ZeRO-3 empties a parameter while it is not in use and keeps its full shape beside it; a DTensor's is the full one.
    shape = tuple(map(int, getattr(parameter, "ds_shape", None) or parameter.shape))
    size = 0 if getattr(parameter, "ds_pipe_replicated", False) else math.prod(shape)
    # Megatron's mark, which DeepSpeed's automatic tensor parallelism sets as well.
    if size and getattr(parameter, "tensor_model_parallel", False):
        # The shape before DeepSpeed cut it, unevenly perhaps; if it was not kept, shards are taken to be equally large.
        meta = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None)
        whole = meta.get("logical_shape") if isinstance(meta, Mapping) else None
        size = math.prod(whole) if whole else size * tensor_parallel_size_of_process()
    return Held(shape, size * expert_parallel_size(parameter), trainable, on_this_rank(parameter).numel(), dtype)
