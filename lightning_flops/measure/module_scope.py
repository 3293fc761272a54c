"""Which modules a model has: their names without wrappers' prefixes, what a report says of each, their parameters.

And how many ranks share these, and the work, in a run of DeepSpeed.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from os.path import commonprefix
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.measure.torch_private.optional import (
    Held,
    children_of,
    flat_parts,
    is_replica,
    on_this_rank,
    wraps,
)
from lightning_flops.records import ModuleRecord, ParallelSizes, summed
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger


def _unflattened(
    whole: nn.Module, note: Callable[[str], object]
) -> tuple[dict[nn.Module, dict[Hashable, Held]], set[int]]:
    """What modules hold in the flat parameters of torch's FullyShardedDataParallel, and the ids of these.

    How large their own were, only a flat one says, which a wrapper holds: *whole* is the model in all its wrappers.
    *note* gets a sentence on what cannot be known.
    """
    pieces, flat = defaultdict[nn.Module, dict[Hashable, Held]](dict), set[int]()
    try:
        for wrapper in whole.modules():
            if wraps(wrapper, "_fsdp_wrapped_module"):
                tensors, found = flat_parts(wrapper)
                flat.update(map(id, tensors))
                for module, key, piece in found:
                    pieces[module][key] = piece
    except Exception as error:
        note(
            "Parameters are those of this rank's shards: what FullyShardedDataParallel made them of could not be read "
            f"({words_of(error)})."
        )
        return {}, set()
    return pieces, flat


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
        of_last_engine = getattr(sys.modules.get("deepspeed.utils.groups"), "mpu", None)
        size = math.prod(whole) if whole else size * _size(of_last_engine, "tp_size")
    return Held(shape, size * expert_parallel_size(parameter), trainable, on_this_rank(parameter).numel(), dtype)


logger = package_logger(__name__)


def require_module(model: object) -> None:
    """Raise a TypeError if *model* is no module."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def unwrapped(module: nn.Module) -> nn.Module:
    """The model inside of wrappers such as DistributedDataParallel or what ``torch.compile`` returns."""
    while (inner := next((child for name, child in module.named_children() if wraps(module, name)), None)) is not None:
        module = inner
    return module


def named_modules(
    module: nn.Module, name: str = "", above: frozenset[int] = frozenset()
) -> Iterator[tuple[str, nn.Module]]:
    """Every module of the root under each of its names, wrappers' prefixes removed, in ``named_modules`` order.

    *name* is that of *module*, by default the root, and *above* are the ids of those that contain it. A wrapper and the
    module it wraps have the same name; both are yielded, the wrapper first. A shared module is yielded under every
    name, and so are the modules below it. A module that contains itself is yielded once on each path.
    """
    yield name, module
    within = above | {id(module)}
    for key, child in children_of(module).items():
        if child is not None and id(child) not in within:
            below = name if wraps(module, key) else f"{name}.{key}" if name else key
            yield from named_modules(child, below, within)


class ModuleNames:
    """The names of a model's modules, kept beside the model."""

    def __init__(self, root: nn.Module | None) -> None:
        self._root = root
        self.known = self._read_names()  #: Each module's names: several if it is shared.
        self._strangers: set[nn.Module] = set()

    def _read_names(self) -> dict[nn.Module, tuple[str, ...]]:
        names: dict[nn.Module, tuple[str, ...]] = {}
        for name, module in () if self._root is None else named_modules(self._root):
            if name not in (known := names.get(module, ())):
                names[module] = (*known, name)
        return names

    def name_for(self, module: nn.Module, caller: str) -> str | None:
        """Name of a module that the module named *caller* calls; None if it is not one of the root's.

        For a shared module it is the name nearest to the caller's, or else the first. A replica of DataParallel's is
        taken for the root.
        """
        if is_replica(module):
            return ""
        if module not in self.known and module not in self._strangers:
            self.known = self._read_names()  # it came since these were read, or is not the root's, as a loss function
            self._strangers = {*self._strangers, module}.difference(self.known)
        # A wrapper that was put around a model later, as what torch.compile returns, has the model's name.
        known = self.known.get(module) or self.known.get(unwrapped(module), ())
        if len(known) < 2:
            return known[0] if known else None
        parts = caller.split(".")
        return max(known, key=lambda name: len(commonprefix([name.split("."), parts])))  # noqa: RUF071 - of lists


def describe_modules(
    root: nn.Module, *, whole: nn.Module | None = None, note: Callable[[str], object] = logger.warning
) -> tuple[ModuleRecord, ...]:
    """What each module of *root* is and how many parameters it holds, in ``named_modules`` order.

    A module with several names is listed under each; the later ones are aliases of the first. Parameters are counted
    once in each subtree, however often they are shared in it. A shard counts with its full size. *whole* is *root* with
    all its wrappers, which may know more about its parameters; *note* gets a sentence on anything that cannot be known.
    """
    pieces, flat = _unflattened(root if whole is None else whole, note)
    described: dict[str, nn.Module] = {}  #: Of a wrapper and what it wraps the latter, which the user wrote.
    own: dict[nn.Module, dict[Hashable, Held]] = {}
    below: defaultdict[str, dict[Hashable, Held]] = defaultdict(dict)
    for name, module in named_modules(root):
        described[name] = module
        if module not in own:
            own[module] = {**pieces.get(module, {})}  # the key of a parameter is the same for all that share it
            own[module] |= {id(one): held(one) for one in module.parameters(recurse=False) if id(one) not in flat}
        if own[module]:
            for above in {"", *itertools.accumulate(name.split("."), "{}.{}".format)}:  # itself and all around it
                below[above].update(own[module])
    first_name: dict[nn.Module, str] = {}
    records = []
    with random_state_kept():
        for name, module in described.items():
            shapes = tuple(held.shape for held in own[module].values() if held.shape is not None)
            all_held = below[name].values()
            first = first_name.setdefault(module, name)
            records.append(
                ModuleRecord(
                    name=name,
                    type_name=type(module).__name__,
                    extra_repr=_extra_repr(module),
                    params=sum(held.size for held in all_held),
                    trainable_params=sum(held.size for held in all_held if held.trainable),
                    local_params=sum(held.local for held in all_held),
                    parameter_bytes=_bytes_by_dtype(all_held),
                    alias_of=None if first == name else first,
                    # A size of 1 is one channel per group: no sum over channels.
                    weight_sizes=tuple(size for shape in shapes if len(shape) >= 2 for size in shape[:2] if size != 1),
                    parameter_shapes=shapes,
                )
            )
    return tuple(records)


def _extra_repr(module: nn.Module) -> str:
    try:
        return str(module.extra_repr())
    except Exception as error:
        # A user's method may need something that the module does not have yet, and may raise anything.
        return f"extra_repr raised {words_of(error).partition(':')[0]}"


def _bytes_by_dtype(parameters: Iterable[Held]) -> dict[str, int]:
    sums = summed(((held.dtype, held.size * held.dtype.itemsize) for held in parameters), 0)
    return dict(sorted((str(dtype).removeprefix("torch."), size) for dtype, size in sums.items() if size))


# ---- how many ranks share the work of a DeepSpeed run, as its process groups say; asks no rank, imports no DeepSpeed

# DeepSpeed keeps its groups in a module of its own. It also takes a model-parallel unit ("mpu") of the user's:
# Megatron's, the grid of a pipeline, its own module of sequence-parallel groups, and others. The methods of such units
# have had different names over the years.

#: What units call each way in the names of their methods; the first that a unit has means it.
_KINDS = {"tp_size": ("tensor_model", "slice", "model"), "pp_size": ("pipeline_model", "pipe"), "cp_size": ("context",)}


def parallel_sizes(engine: Any) -> ParallelSizes:
    """Sizes of *engine*'s groups.

    DeepSpeed's own ``dp_world_size`` is not asked: with a unit for sequence parallelism it is None, and without one it
    counts ranks that share a sequence.
    """
    mpu, module = getattr(engine, "mpu", None), getattr(engine, "module", None)
    sizes = {name: _size(mpu, name) for name in _KINDS}
    sizes["sp_size"] = getattr(engine, "sequence_parallel_size", None) or 1
    ranks = int(getattr(engine, "world_size", None) or 1)  # the process group may be gone where a run ends
    parameters = module.parameters() if isinstance(module, torch.nn.Module) else ()
    return ParallelSizes(
        dp_size=max(1, ranks // math.prod(sizes.values())),
        ep_size=max(map(expert_parallel_size, parameters), default=1),
        **sizes,
    )


def expert_parallel_size(parameter: torch.Tensor) -> int:
    """Ranks that hold other experts in the place of *parameter*; 1 where it is no expert's.

    DeepSpeed marks the parameters of experts, and writes the size into the name of their group.
    """
    if getattr(parameter, "allreduce", True):
        return 1
    digits = str(getattr(parameter, "group_name", "")).removeprefix("ep_size_")
    return max(1, int(digits)) if digits.isdecimal() else 1


def _size(mpu: Any, name: str) -> int:
    """What the model-parallel unit *mpu* says; 1 if it says nothing, or if there is none."""
    if hasattr(mpu, "initialize_sequence_parallel"):
        return 1  # DeepSpeed's sequence-parallel groups, which answer to "model parallel" too
    methods = [f"get_{kind}_parallel_world_size" for kind in _KINDS[name]]
    return next((int(getattr(mpu, method)()) for method in methods if hasattr(mpu, method)), 1)
