"""Jobs as functions of a device mesh, and what real ranks of them do in a step, by an account of the test's own.

``python -m tests.ranks.planned_jobs JOB...`` is one rank of a gloo group; it prints its account of each.
"""

from __future__ import annotations

import gc
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import distributed as torch_distributed, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, all_to_all_single_autograd
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

distributed: Any = torch_distributed  # which does not say what of it is public
BATCH, WIDTH, BLOCKS, OUT = 16, 32, 3, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(BLOCKS)])
        self.out = nn.Linear(WIDTH, OUT)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def tensor_parallel(mesh: Any, net: Net | None = None) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    net = net or Net()
    for block in net.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return net, torch.randn(BATCH, WIDTH)


def fully_sharded(mesh: Any, net: Net | None = None, **settings: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    net = net or Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh["dp"], **settings)
    fully_shard(net, mesh=mesh["dp"], **settings)
    return net, torch.randn(BATCH, WIDTH), adamw(net)


def not_resharded(mesh: Any) -> Any:
    return fully_sharded(mesh, reshard_after_forward=False)


def in_bfloat16(mesh: Any) -> Any:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return fully_sharded(mesh, mp_policy=policy)


def checkpointed(mesh: Any) -> Any:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = Net()
    for place, block in enumerate(net.blocks):
        # A checkpoint keeps the host's random state otherwise, of 5 KB.
        net.blocks[place] = checkpoint_wrapper(block, preserve_rng_state=False)
    return fully_sharded(mesh, net)


def of_the_first_kind(mesh: Any, **settings: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    policy = ModuleWrapPolicy({Block})
    device = torch.device("cpu")  # torch asks for an accelerator where nobody names a device
    net = FullyShardedDataParallel(Net(), device_id=device, device_mesh=mesh, auto_wrap_policy=policy, **settings)
    return net, torch.randn(BATCH, WIDTH), adamw(net)


def hybrid_of_the_first_kind(mesh: Any) -> Any:
    from torch.distributed.fsdp import ShardingStrategy

    return of_the_first_kind(mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)


def adamw(net: nn.Module) -> Any:
    return torch.optim.AdamW(net.parameters(), foreach=False)


def both(mesh: Any) -> Any:
    net, _ = tensor_parallel(mesh)
    return fully_sharded(mesh, net)


def replicated(mesh: Any) -> Any:
    net = nn.parallel.DistributedDataParallel(nn.Sequential(Net(), nn.BatchNorm1d(OUT)))
    return net, torch.randn(BATCH, WIDTH), adamw(net)


def in_buckets(mesh: Any) -> Any:
    """Of 9 MB a layer: one, three, three and one in a bucket."""
    net = nn.parallel.DistributedDataParallel(nn.Sequential(*(nn.Linear(1500, 1500) for _ in range(8))))
    return net, torch.randn(4, 1500)


class Odd(nn.Module):
    """Five columns, of which a rank of two has three or two."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.relu(self.up(x))).square()  # of a sum alone the product's kernel would copy gradients


def unevenly(mesh: Any) -> Any:
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    net = parallelize_module(Odd(), mesh["tp"], {"up": ColwiseParallel(output_layouts=Replicate())})
    return net, torch.randn(BATCH, WIDTH), torch.optim.SGD(net.parameters(), momentum=0.9, foreach=False)


class InSequence(nn.Module):
    """A block whose norm has the rank's part of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.block = nn.LayerNorm(WIDTH), Block()

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norm(x)
        return self.block.down(torch.relu(self.block.up(x)))


def sequence_parallel(mesh: Any) -> Any:
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    part = Shard(1)
    styles = {
        "": PrepareModuleInput(input_layouts=(part,), desired_input_layouts=(part,)),
        "norm": SequenceParallel(),
        "block.up": ColwiseParallel(input_layouts=part),
        "block.down": RowwiseParallel(output_layouts=part),
    }
    net = parallelize_module(InSequence(), mesh["tp"], styles)
    return net, torch.randn(2, BATCH // mesh["tp"].size(), WIDTH)


def hybrid(mesh: Any) -> Any:
    """Shards of two ranks, which two such groups have."""
    from torch.distributed.fsdp import fully_shard

    net = Net()
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net, torch.randn(BATCH, WIDTH), torch.optim.AdamW(net.parameters(), foreach=False)


class Attention(nn.Module):
    """Of a rank's own tokens to those of all ranks that share a sequence: their keys and values are *gathered*.

    Or, as Ulysses has it, each rank is sent its heads of all tokens.
    """

    def __init__(self, mesh: Any, *, gathered: bool) -> None:
        super().__init__()
        self.qkv, self.gathered = nn.Linear(WIDTH, 3 * WIDTH), gathered
        self.group, self.ranks = mesh.get_group(), mesh.size()

    def forward(self, x: torch.Tensor) -> Any:
        query, *others = (part.unflatten(-1, (4, -1)) for part in self.qkv(x).chunk(3, -1))  # of four heads
        if self.gathered:
            others = [all_gather_tensor_autograd(one.contiguous(), 1, self.group) for one in others]
        else:
            query, *others = (self.sent(one, 2, 1) for one in (query, *others))
        with sdpa_kernel(SDPBackend.MATH):  # whose products torch's own counter counts
            out = scaled_dot_product_attention(*(one.transpose(1, 2) for one in (query, *others))).transpose(1, 2)
        return (out if self.gathered else self.sent(out, 1, 2)).flatten(2)

    def sent(self, x: torch.Tensor, cut: int, joined: int) -> torch.Tensor:
        parts = torch.stack(x.chunk(self.ranks, cut))
        sent: Any = all_to_all_single_autograd(parts.flatten(0, 1), None, None, self.group)
        return torch.cat([*sent.unflatten(0, (self.ranks, -1))], joined)


def reduced(parameters: Iterable[nn.Parameter], mesh: Any) -> None:
    """Their gradients are added up over the ranks as they are made."""
    group = mesh.get_group()
    one: Any
    for one in parameters:
        one.register_post_accumulate_grad_hook(lambda one: distributed.all_reduce(one.grad, group=group))


def context_parallel(mesh: Any, *, gathered: bool = True) -> Any:
    net = Attention(mesh["cp"], gathered=gathered)
    reduced(net.parameters(), mesh["cp"])
    return net, torch.randn(2, BATCH // mesh["cp"].size(), WIDTH), adamw(net)


def ulysses(mesh: Any) -> Any:
    return context_parallel(mesh, gathered=False)


class Experts(nn.Module):
    """Four, of which a rank has its share; every expert gets as many tokens."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.group, self.ranks = mesh.get_group(), mesh.size()
        self.router, self.own = nn.Linear(WIDTH, 4), nn.ModuleList(Block() for _ in range(4 // self.ranks))

    def forward(self, x: torch.Tensor) -> Any:
        share = self.router(x).softmax(-1).amax(-1, keepdim=True)
        came: Any = all_to_all_single_autograd(x * share, None, None, self.group)
        by_expert = came.unflatten(0, (self.ranks, len(self.own), -1)).unbind(1)
        pairs = zip(self.own, by_expert, strict=True)
        done = torch.stack([own(one.flatten(0, 1)).unflatten(0, one.shape[:2]) for own, one in pairs], 1)
        return all_to_all_single_autograd(done.flatten(0, 2), None, None, self.group)


def expert_parallel(mesh: Any) -> Any:
    net = Experts(mesh["ep"])
    reduced(net.router.parameters(), mesh["ep"])
    return net, torch.randn(BATCH, WIDTH), adamw(net)


JOBS: dict[str, tuple[Callable[[Any], Any], dict[str, int]]] = {
    "tensor_parallel": (tensor_parallel, {"tp": 2}),
    "fully_sharded": (fully_sharded, {"dp": 2}),
    "replicated": (replicated, {"dp": 2}),
    "in_buckets": (in_buckets, {"dp": 2}),
    "unevenly": (unevenly, {"tp": 2}),
    "sequence_parallel": (sequence_parallel, {"tp": 2}),
    "not_resharded": (not_resharded, {"dp": 2}),
    "in_bfloat16": (in_bfloat16, {"dp": 2}),
    "checkpointed": (checkpointed, {"dp": 2}),
    "of_the_first_kind": (of_the_first_kind, {"dp": 2}),
    "context_parallel": (context_parallel, {"cp": 2}),
    "ulysses": (ulysses, {"cp": 2}),
    "expert_parallel": (expert_parallel, {"ep": 2}),
    "both": (both, {"dp": 2, "tp": 2}),
    "hybrid": (hybrid, {"replicas": 2, "shards": 2}),
    "tensor_parallel on 4": (tensor_parallel, {"tp": 4}),
    "sequence_parallel on 4": (sequence_parallel, {"tp": 4}),
    "fully_sharded on 4": (fully_sharded, {"dp": 4}),
    "replicated on 4": (replicated, {"dp": 4}),
    "hybrid_of_the_first_kind": (hybrid_of_the_first_kind, {"replicas": 2, "shards": 2}),
    "context_parallel on 4": (context_parallel, {"cp": 4}),
    "ulysses on 4": (ulysses, {"cp": 4}),
    "expert_parallel on 4": (expert_parallel, {"ep": 4}),
}


class Seen(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls of operators of torch.distributed, and the elements of what they take and put out, by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(one.__name__ in ("DTensor", "AsyncCollectiveTensor") for one in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        time.sleep(0.001)  # in which gloo's threads let go of what they have sent
        name = str(func)
        if "c10d" in name and "wait" not in name and "wrap" not in name:
            self.calls[name] += 1
            self.bytes[name] += max(sum(one.nbytes for one in flat(part)) for part in (*args, out))
        return out


def flat(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from flat(one)


def risen(step: Callable[[], None]) -> tuple[int, int]:
    """By how much memory rises in a step at most, by the CPU allocator's events, without and with what gloo allocates.

    That is copies of messages, which its threads hold until they are sent, and some of what is received.
    """
    gc.collect()
    processor = torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[processor], profile_memory=True) as profiler, Seen():
        step()
    results: Any = profiler.profiler
    held, peaks, of_gloo = [0, 0], [0, 0], set[int]()
    for _, place, size, by_gloo in sorted(allocations(results.kineto_results.experimental_event_tree())):
        if by_gloo and size > 0:
            of_gloo.add(place)
        held = [held[0] if place in of_gloo else held[0] + size, held[1] + size]
        if size < 0:
            of_gloo.discard(place)
        peaks = list(map(max, peaks, held))
    return peaks[0], peaks[1]


def allocations(events: Iterable[Any], *, of_gloo: bool = False) -> Iterable[tuple[int, int, int, bool]]:
    """When, where, how much (less than nothing of what is freed), and whether gloo's code does it."""
    for one in events:
        kind, fields = one.typed
        if kind.name == "Allocation":
            yield one.start_time_ns, fields.ptr, fields.alloc_size, of_gloo
        yield from allocations(one.children, of_gloo=of_gloo or one.name.startswith(("c10d::", "gloo:")))


def account(job: str) -> dict[str, Any]:
    """What this rank does in its third step, by torch's own counter and a mode of this file."""
    make, sizes = JOBS[job]
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    net, batch, *optimizers = make(mesh)

    def step() -> None:
        net(batch).sum().backward()
        for one in optimizers:
            one.step()
        net.zero_grad()

    step()
    step()  # DistributedDataParallel tells its ranks of new buckets here
    seen, counter = Seen(), FlopCounterMode(display=False)
    with counter, seen:
        step()
    local = [one.to_local() if hasattr(one, "to_local") else one for one in net.parameters()]
    states = [one for optimizer in optimizers for state in optimizer.state.values() for one in state.values()]
    held = [one.to_local() if hasattr(one, "to_local") else one for one in (*net.buffers(), *states, batch)]
    if isinstance(net, nn.parallel.DistributedDataParallel):
        held += local  # its buckets
    there = sum(one.untyped_storage().nbytes() for one in (*local, *held))  # what is padded, too
    risings = [
        risen(step) for _ in range(10)
    ]  # the least of them, as gloo holds what it sends, longer on a busy machine
    return {
        "peaks": [there + min(some) for some in zip(*risings, strict=True)],
        "flops": counter.get_total_flops(),
        "local_params": sum(math.prod(one.shape) for one in local),
        "collectives": {name: [calls, seen.bytes[name]] for name, calls in sorted(seen.calls.items())},
    }


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    answer = {job: account(job) for job in sys.argv[1:]}
    distributed.destroy_process_group()
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
