"""Private names of torch that a part of the profiler reads: of compiled code, profilers, loaders, wrapped modules.

Each has a stand-in. Where torch lacks one, what is read from it is not known, and all else works.
"""

from __future__ import annotations

import functools
import math
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.profiler import record_function
from torch.utils.data import BatchSampler

from lightning_flops.measure.torch_private.needed import frames_outwards, modes_off, take
from lightning_flops.signals import Quiet

# ---- torch.compile: when it compiles, and what it keeps of what it has compiled


def was_used() -> bool:
    """Whether the compiler was loaded: before that, nothing can have been compiled."""
    return "torch._dynamo" in sys.modules


def has_compiled() -> bool:
    """Whether the compiler keeps anything that it has compiled."""
    return bool(getattr(take("torch._dynamo.convert_frame:output_codes", None) if was_used() else None, "seen", ()))


def graph_breaks() -> Counter[str]:
    """How often the compiler has broken a graph in this process, by its reasons."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return Counter({str(why): int(number) for why, number in dict(counters.get("graph_break", {})).items()})


def recompilations() -> list[str]:
    """Why the compiler has compiled anew what it had compiled in this process; it keeps the latest 64 compilations.

    Not where what trains is evaluated for the first time: each of the two is compiled once. After that torch may name
    the change between these two though the batch's shape has changed, too.
    """
    latest: Any = getattr(sys.modules.get("torch._dynamo.utils"), "get_compilation_metrics", list)()
    found, evaluated = [], set[str]()
    for one in latest:
        why = str(getattr(one, "recompile_reason", None) or "").partition("#")[0]
        code = why.partition("/")[0]
        if code not in evaluated and (": grad_mode" in why or ".training ==" in why):
            evaluated.add(code)
        elif why:
            found.append(why)
    return found


def leave_compiled_code() -> None:
    """What calls us is compiled in two parts, and we run between them as we are; nothing where it is not compiled.

    Our caller must be hidden.
    """
    if is_dynamo_compiling():
        torch._dynamo.graph_break()


@functools.cache
def compiler_callbacks() -> Any:
    """Torch's callbacks for the start and end of a compilation; None where torch cannot compile."""
    return take("torch._dynamo.callback:callback_handler", None)


def is_compiled_in_place(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called: no hook fires inside of such a module."""
    return vars(module).get("_compiled_call_impl") is not None


def is_compiled(node: Any) -> bool:
    """Whether an autograd node is that of a compiled region."""
    return type(node).__name__ == "CompiledFunctionBackward"


def graph_frame() -> FrameType | None:
    """The innermost running frame of a graph's code, which torch.fx makes; None where none runs."""
    running = frames_outwards(sys._getframe())
    return next((one for one in running if one.f_code.co_filename.startswith("<eval_with_key>")), None)


def class_of_generated_graphs() -> Any:
    """The class of what inductor makes of a graph, whose instances are called to run it; None if nothing was made.

    An instance's ``source_code`` and ``inductor_post_grad_graph_str`` are what was made and what of, as text.
    """
    return getattr(sys.modules.get("torch._inductor.output_code"), "CompiledFxGraph", None)


def class_of_packages() -> Any:
    """The class of what ``aoti_load_package`` returns, which is called to run it; None where it was not used."""
    return getattr(sys.modules.get("torch.export.pt2_archive._package"), "AOTICompiledModel", None)


@functools.cache
def dtype_abbreviated(short: str) -> torch.dtype:
    """The dtype that torch's compiler writes in this way, such as ``bf16``.

    Raises:
        KeyError: torch does not say.
    """
    table: dict[torch.dtype, str] = take("torch.utils._dtype_abbrs:dtype_abbrs", {})
    return {short: dtype for dtype, short in table.items()}[short]


def triton_kernel(index: int) -> Any:
    """The Triton kernel that compiled code knows by this number; None where torch does not say."""
    table = take("torch._higher_order_ops.triton_kernel_wrap:kernel_side_table", None)
    return None if table is None else table.get_kernel(index)


def kernel_name(kernel: Any) -> str:
    """The name of a Triton kernel, or of the one in an autotuner or ``wrap_triton``."""
    return str(getattr(getattr(kernel, "fn", kernel), "__name__", None) or type(kernel).__name__)


def class_of_triton_kernels() -> Any:
    """The class of what ``@triton.jit`` returns, whose ``run`` launches it; one without where no Triton was loaded."""
    return getattr(sys.modules.get("triton.runtime.jit"), "JITFunction", object)


_CustomOperator: Any = take("torch.library:CustomOpDef", ())


def custom_operator_name(target: Any) -> str | None:
    """``namespace::name`` of what ``torch.library.custom_op`` and ``triton_op`` return; None for anything else."""
    return str(target._qualname) if isinstance(target, _CustomOperator) else None


# ---- TorchScript

torchscript: Any = take("torch.jit:_recursive", None)  #: The module of torch that makes TorchScript of a user's module.

READS_MODULE = "create_script_module"  #: Its function that reads that module, and compiles each hook on it.

# ---- torch.profiler

#: Makes a mark of this name, to be entered and left. Torch's public one takes ten times as long.
new_mark: Callable[[str], Any] = take("torch._C:_profiler._RecordFunctionFast", record_function)

#: The base of torch.profiler.profile: no schedule of its own, and no count of steps that others share.
new_profiler: Any = take("torch.profiler:_KinetoProfile", torch.profiler.profile)

#: Whether a profiler of torch's records what runs now on this thread; False where torch does not say.
profiler_is_recording: Callable[[], bool] = take("torch._C:_autograd._profiler_enabled", lambda: False)

#: Called to have the parts of torch that are written in Python know that no profiler records.
profiler_has_stopped: Callable[[], None] = take("torch.autograd.profiler:_run_on_profiler_stop", lambda: None)

#: Functions in ``torch.autograd.profiler`` that torch calls to prepare and to start a profiler, by name.
SET_UP = [name for name in ("_prepare_profiler", "_enable_profiler") if hasattr(torch.autograd.profiler, name)]

#: Steps by who counts them: a torch.profiler.profile has ``ProfilerStep`` in it from when it is made to the end of its
#: block. Between its warm-up and its first step nothing else shows that it exists. Empty where that cannot be known.
counted_steps: Mapping[str, int] = take("torch.autograd.profiler:KinetoStepTracker._step_dict", {})


# ---- a run's DataLoaders, and the key-value store of its ranks

#: Returns the store of the default process group; None where torch has no such function.
store_getter: Callable[[], Any] | None = take("torch.distributed.distributed_c10d:_get_default_store", None)

#: The class of every DataLoader's iterators; None in a torch that does not show it.
iterator_class: Any = take("torch.utils.data.dataloader:_BaseDataLoaderIter", None)


def workers_of(iterator: Any) -> int | None:
    """The worker processes of a DataLoader's iterator; None if it does not say, or is another iterator."""
    workers = getattr(iterator, "_num_workers", None) if isinstance(iterator, iterator_class or ()) else None
    return workers if isinstance(workers, int) else None


def loader_of(iterator: Any) -> Any:
    """What a DataLoader and its iterators, one an epoch, have in common; of anything else that itself."""
    sampler = getattr(iterator, "_index_sampler", None)
    return iterator if sampler is None else sampler


def rows_fetched(iterator: Any) -> int | None:
    """The rows that the batch sampler of a DataLoader gave for the batch that *iterator* has brought last.

    None where that cannot be known: of another iterator, of an IterableDataset, of a batch sampler or a length that is
    not torch's, of batches out of order; and of a ``batch_size`` of 1, whose one item may be a whole batch.
    """
    sampler, number = (getattr(iterator, name, None) for name in ("_index_sampler", "_num_yielded"))
    # Torch before 2.6 knows no other order.
    if (
        type(sampler) is not BatchSampler
        or sampler.batch_size < 2
        or not (number and getattr(iterator, "_in_order", True))
    ):
        return None
    with Quiet(Exception):  # a stream, or a sampler of the user's that does not say
        # What is left of it after the batches before.
        return max(0, min(sampler.batch_size, len(sampler.sampler) - sampler.batch_size * (number - 1))) or None  # type: ignore[arg-type]
    return None


def fetched_ahead(loader: Any) -> int:
    """Batches that the workers of a DataLoader, or of its iterator, fetch ahead; 0 of anything without workers."""
    private = "_" if isinstance(loader, iterator_class or ()) else ""
    workers, of_each = (getattr(loader, f"{private}{name}", 0) for name in ("num_workers", "prefetch_factor"))
    return int((workers or 0) * (of_each or 0))


# ---- clipping

#: What torch clips gradients by, as modules and names. ``clip_grad_norm_`` calls those that begin with a line, also
#: where a program has imported it by its name.
CLIPS = [
    (torch.nn.utils, "clip_grad_norm_"),
    (torch.nn.utils, "clip_grad_value_"),
    (torch.nn.utils.clip_grad, "_get_total_norm"),
    (torch.nn.utils.clip_grad, "_clip_grads_with_norm_"),
]

# ---- modules: what they hold, what wrappers do with a model, which part of a tensor a rank has


def children_of(module: nn.Module) -> Mapping[str, nn.Module | None]:
    """The modules that *module* holds, by name; none under a name that holds none, or before its ``__init__``."""
    return vars(module).get("_modules", {})  # type: ignore[no-any-return]


def is_replica(module: nn.Module) -> bool:
    """Whether *module* is a copy that DataParallel made, for one device and one forward."""
    return bool(vars(module).get("_is_replica"))  # a module of the user's may answer to any name


#: Name of the child that a wrapper wraps -> classes of torch, DeepSpeed and Lightning that call it so.
WRAPPERS: Mapping[str, frozenset[str]] = {
    "_orig_mod": frozenset({"OptimizedModule"}),
    "module": frozenset(
        {"DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine", "_FabricModule"}
    ),
    "_fsdp_wrapped_module": frozenset({"FullyShardedDataParallel"}),
    "_checkpoint_wrapped_module": frozenset({"CheckpointWrapper", "OffloadWrapper", "ActivationWrapper"}),
    "_forward_module": frozenset({"_FabricModule"}),
    "_original_module": frozenset({"_FabricModule"}),
}

_WITH_WRAPPERS = ("torch", "deepspeed", "lightning", "lightning_fabric")  #: Packages that wrap models.


def wraps(module: nn.Module, child: str) -> bool:
    """Whether *module* is a wrapper, and its child of this name is the module that it wraps.

    The wrapper's class, or one of its base classes, decides, and never the child's name alone. We compare classes by
    name, so that no framework is imported for this.
    """
    return child in WRAPPERS and any(
        cls.__name__ in WRAPPERS[child] and cls.__module__.partition(".")[0] in _WITH_WRAPPERS
        for cls in type(module).__mro__
    )


def put_tensors(module: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """The module computes with *tensors* in the place of its own parameters and buffers of these names."""
    tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for held in tables:
        held.update({name: tensors[name] for name in held if name in tensors})


def forget_hooks(optimizer: Any) -> None:
    """No hook of this one *optimizer* is called any more, until its attributes are put back."""
    optimizer._optimizer_step_pre_hooks = optimizer._optimizer_step_post_hooks = OrderedDict()


class Held(NamedTuple):
    """A parameter that a module holds."""

    shape: tuple[int, ...] | None  #: None for a lazy one.
    size: int  #: Elements of it in the whole model.
    trainable: bool
    local: int  #: Elements of it in this rank's memory.
    dtype: torch.dtype


def flat_parts(wrapper: nn.Module) -> tuple[list[torch.Tensor], list[tuple[nn.Module, Hashable, Held]]]:
    """What a FullyShardedDataParallel has made of parameters, and what these were, each with its module and a key.

    The key is the same for every module that shares the parameter, and of no other one.

    With ``use_orig_params`` the old parameters are left to see, as views of this rank's part (empty ones, too);
    without, they are gone.

    Raises:
        AttributeError: this torch keeps it in another way.
    """
    handle: Any = wrapper._handle
    if handle is None:
        return [], []
    flat = handle.flat_param
    originals = flat._params or ()
    named = {}
    for index, (info, shape, shard) in enumerate(
        zip(flat._param_infos, flat._shapes, flat._shard_param_infos, strict=True)
    ):
        trainable = bool((originals[index] if originals else flat).requires_grad)
        piece = Held(tuple(shape), math.prod(shape), trainable, shard.numel_in_shard or 0, flat.dtype)
        named[info.module, info.param_name] = (id(flat), index), piece
    pieces: list[Any] = [(module, *piece) for (module, _), piece in named.items()]
    pieces += [(one.module, *named[one.prim_module, one.prim_param_name]) for one in flat._shared_param_infos]
    return [flat, *originals], pieces


def on_this_rank(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of *tensor*, which ZeRO-3 or a DTensor may have split; ZeRO-3 keeps the part in ds_tensor."""
    shard = getattr(tensor, "ds_tensor", None)
    if isinstance(shard, torch.Tensor):
        tensor = shard
    to_local: Any = getattr(tensor, "to_local", None)
    if not callable(to_local):
        return tensor
    with modes_off(), torch.no_grad():  # neither a mode nor autograd sees this reading
        shard = to_local()
    return shard if isinstance(shard, torch.Tensor) else tensor
