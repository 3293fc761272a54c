"""One rank of a job that does not run: its FLOPs, parameters and collectives, on fake tensors in one process."""

from __future__ import annotations

import math
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode

from lightning_flops.errors import LightningFlopsError
from lightning_flops.measure.counting.flop_counter import CausalAttention
from lightning_flops.measure.counting.formulas.contract import bytes_of
from lightning_flops.measure.counting.offline import Fakes, VariedBatch, called
from lightning_flops.measure.fake_steps import loss_in, two_steps
from lightning_flops.measure.memory import TensorLives
from lightning_flops.measure.module_scope import describe_modules, require_module
from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.measure.torch_private.needed import (
    DispatchMode,
    new_fake_mode,
    tree_map_only,
    unwraps_subclass,
)
from lightning_flops.measure.torch_private.one_rank import buckets_of, one_rank, ranks_in, ranks_of
from lightning_flops.measure.torch_private.optional import on_this_rank
from lightning_flops.records import summed
from lightning_flops.schema.plan import Collective, PlannedRank
from lightning_flops.signals import Undo, words_of
from lightning_flops.units import shown

_KIND = re.compile(
    r"(?:c10d|_c10d_functional(?:_autograd)?|_dtensor)::\w*?"
    r"(all_?reduce|all_?gather|reduce_scatter|all_?to_?all|broadcast|scatter|gather|reduce|send|recv)"
)
_OTHER_DEVICE = re.compile(r"(cuda|meta|xpu|hpu|npu|mps)(:\d+)?")
_TWO_WORDS = {"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"}
_MEGABYTE = 2**20
_BUCKET = 25 * _MEGABYTE  # of gradients, in which DistributedDataParallel reduces them; a first of one is early

_ENGINE = (
    "An engine of DeepSpeed is not planned. Plan what computes and sends the same: DistributedDataParallel for ZeRO 0, "
    "fully_shard(..., reshard_after_forward=False) for ZeRO 3; docs/plan.md has the others"
)
_INSTEAD = {  # by what stands in an error's traceback
    r"deepspeed[/\\](__init__|runtime)": _ENGINE,
    "DataDependentOutput|DynamicOutputShape": (
        "It depends on data; where that is a routing, give each expert an even share of the tokens"
    ),
    "flash_attention_for_cpu.*sharding strategy": (
        "Torch cuts attention along a sequence in kernels of GPUs alone; gather keys and values over the dimension, by "
        "a collective that has a gradient"
    ),
    "register_comm_hook": "A communication hook is not planned: without one, gradients are sent in their own dtype",
}


class Collectives(DispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of every call of a collective, and of what is sent from rank to rank, since it was entered last.

    The bytes of a call are those of its larger side: of what an all-gather puts out, of what a reduce-scatter takes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: defaultdict[Collective, list[int]] = defaultdict(list)

    def __enter__(self) -> None:
        self.sizes.clear()
        super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(unwraps_subclass, types)):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if found := _KIND.match(func.name()) if hasattr(func, "name") else None:
            kind = _TWO_WORDS.get(found[1].replace("_", ""), found[1])
            self.sizes[kind, ranks_of(func, args, kwargs or {})].append(max(map(bytes_of, (*args, out))))
        return out


class OnTheCpu(TorchFunctionMode):
    """Inside, whatever is made on another device or moved there is a fake tensor of the CPU's, whose groups we fake."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.cuda:
            return args[0]
        args, kwargs = tree_map_only((str, torch.device), _on_cpu, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def _on_cpu(device: Any) -> Any:
    return "cpu" if _OTHER_DEVICE.fullmatch(str(device)) else device


def plan_rank(
    make: Callable[[Any], Any],
    mesh: Mapping[str, int],
    rank: int,
    *,
    at: Mapping[str, int] = {},
    microbatches: int = 1,
    causal_attention: CausalAttention = "full",
) -> PlannedRank:
    """FLOPs, parameters and collectives of one *rank* in a training step of the job that *make* builds on its mesh.

    The step is the second: the first makes what lasts, such as optimizer states. Nothing has values, so the model may
    be of any size. *make* takes the mesh and returns a model, a batch and, if there is one, an optimizer. The batch is
    brought to the sizes of *at*. Of a pipeline's stage it is one of so many *microbatches*.

    Raises:
        LightningFlopsError: the job cannot be planned; the message says why.
    """
    with Undo() as inside:
        inside.enter_context(random_state_kept())
        one_rank(inside, rank, math.prod(mesh.values()))
        device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        inside.replace(DistributedDataParallel, "__init__", _replicate)
        inside.replace(DistributedDataParallel, "forward", _forward)
        fakes = Fakes(new_fake_mode())
        inside.enter_context(fakes.mode)
        inside.enter_context(torch.compiler.set_stance("force_eager"))
        try:
            with OnTheCpu():
                made = make(device_mesh)
            model, batch, optimizer = _made(made)
            batch = tree_map_only(torch.Tensor, fakes.mode.from_tensor, VariedBatch.like(batch, at) if at else batch)
            batches = [batch, *(tree_map_only(torch.Tensor, _another, batch) for _ in range(microbatches - 1))]
            replicas = [one for one in model.modules() if isinstance(one, DistributedDataParallel)]
            lives = TensorLives()
            _see_resized(inside, lives)
            lives.hold(map(on_this_rank, (*model.parameters(), *model.buffers())), "parameters")
            lives.hold((one for replica in replicas for one in vars(replica)["buckets"]), "gradients")
            collectives = Collectives()
            inside.enter_context(fakes)
            counter, tensors = two_steps(
                model,
                [batches],
                optimizer,
                fakes,
                lambda batch: loss_in(called(model, batch)),
                (TensorLives(), lives),  # in the first, DTensor finds shapes by operators on whole tensors
                causal_attention=causal_attention,
                around=collectives,
            )
            root = describe_modules(model)[0]
        except LightningFlopsError:
            raise
        except Exception as error:  # of the user's model, or of what torch does not do without values
            failed = traceback.format_exc()
            instead = next((f". {words}" for pattern, words in _INSTEAD.items() if re.search(pattern, failed)), "")
            raise LightningFlopsError(f"the job cannot be planned: {words_of(error)[:500]}{instead}") from error
    for one in replicas:
        _reduce(one, collectives)
    return PlannedRank(
        mesh=dict(mesh),
        rank=rank,
        flops=counter.record(),
        params=root.params,
        local_params=root.local_params,
        collectives=dict(sorted(collectives.sizes.items())),
        tensors=tensors,
    )


def _see_resized(undo: Undo, lives: TensorLives) -> None:
    """FSDP gives bytes to what it gathers parameters into, and takes them back, which no operator shows."""
    resize, name = torch.UntypedStorage.resize_, "resize_"

    def seen(storage: Any, size: int) -> Any:
        answer = resize(storage, size)
        lives.resized(storage)
        return answer

    undo.callback(delattr, torch.UntypedStorage, name)  # its own is that of the class below it
    setattr(torch.UntypedStorage, name, seen)


# ---- DistributedDataParallel, which asks for its parameters' values: a wrapper of its class that asks for none


def _replicate(
    self: Any,
    module: nn.Module,
    *args: Any,
    broadcast_buffers: bool = True,
    process_group: Any = None,
    bucket_cap_mb: float | None = None,
    gradient_as_bucket_view: bool = False,
    device_mesh: Any = None,
    **others: Any,
) -> None:
    nn.Module.__init__(self)
    self.module = module
    self.ranks = ranks_in(process_group if device_mesh is None else device_mesh.get_group())
    limit = _BUCKET if bucket_cap_mb is None else int(bucket_cap_mb * _MEGABYTE)
    self.limits = [_MEGABYTE, limit] if bucket_cap_mb is None else [limit]
    self.broadcasts = broadcast_buffers
    made = [] if gradient_as_bucket_view else [one for one in module.parameters() if one.requires_grad]
    self.buckets = list(map(torch.empty_like, made))  # its gradients lie in them once more


def _forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs)


def _reduce(replica: Any, collectives: Collectives) -> None:
    """What its ranks send each other in a step: gradients, the last layers' first, and the buffers of rank 0."""
    gradients = [one for one in replica.module.parameters() if one.requires_grad][::-1]
    collectives.sizes["all_reduce", replica.ranks] += buckets_of(gradients, replica.limits)
    buffers = summed(((one.dtype, one.nbytes) for one in replica.module.buffers() if replica.broadcasts), 0)
    if buffers:
        collectives.sizes["broadcast", replica.ranks] += buffers.values()


def _made(answer: Any) -> tuple[nn.Module, Any, Any]:
    if not isinstance(answer, tuple) or not 2 <= len(answer) <= 3:
        raise LightningFlopsError(
            f"the function must return a model and a batch, and an optimizer if there is one, got {shown(answer)}"
        )
    require_module(answer[0])
    if type(answer[0]).__module__.startswith("deepspeed."):
        raise LightningFlopsError(_ENGINE)
    return answer if len(answer) == 3 else (*answer, None)


def _another(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
