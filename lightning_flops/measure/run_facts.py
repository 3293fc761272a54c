"""How a run is set up, read once a window from objects that are there anyway: no synchronization, no rank asked."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from lightning_flops.measure.module_hooks import with_inner
from lightning_flops.measure.torch_private.optional import graph_breaks, recompilations
from lightning_flops.records import OptimizerFacts, RunFacts
from lightning_flops.signals import Quiet


def gather_run_facts(
    root: nn.Module,
    *,
    device: torch.device,
    optimizers: Iterable[Any] | None,
    loader_workers: int | None,
    padding_ratio: float | None = None,
) -> RunFacts:
    """The facts of this process, which trains *root* on *device*; what cannot be read is left unknown.

    The optimizers are torch's, or wrappers with an ``optimizer`` or ``param_groups``; the rest is passed on.
    """
    # ROCm's numbers are no compute capabilities.
    is_nvidias = device.type == "cuda" and torch.cuda.is_available() and torch.version.hip is None
    replicated = (len(module.device_ids) for module in root.modules() if isinstance(module, nn.DataParallel))
    breaks, anew = graph_breaks(), recompilations()
    return RunFacts(
        padding_ratio=padding_ratio,
        compute_capability=torch.cuda.get_device_capability(device) if is_nvidias else None,
        data_parallel_devices=max(replicated, default=0),
        process_group_backend=_backend(device),
        nccl=distributed.is_available() and distributed.is_nccl_available(),
        optimizers=None if optimizers is None else tuple(_optimizer_facts(one, device) for one in optimizers),
        loader_workers=loader_workers,
        compiled=any(
            type(one).__name__ == "OptimizedModule" or getattr(one, "_compiled_call_impl", None) is not None
            for one in root.modules()
        ),
        cores=_cores(),
        graph_breaks=breaks.total(),
        graph_break_reason=breaks.most_common(1)[0][0].splitlines()[0][:150] if breaks else "",
        recompilations=len(anew),
        recompilation_reason=anew[-1].splitlines()[0].split(": ", 1)[-1][:150] if anew else "",
    )


def _cores() -> int | None:
    """Cores that this process may use: those that it is bound to, or a container's quota of their time, if less."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with Quiet(OSError, ValueError):  # no such limit, or no such system
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return min(bound or 1, max(1, int(quota) // int(period)))
    return bound


def _backend(device: torch.device) -> str | None:
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    # "gloo", "nccl", or by device: "cpu:gloo,cuda:nccl".
    parts = (part.rpartition(":") for part in str(distributed.get_backend_config()).split(","))
    return next((backend for name, _, backend in parts if name in ("", device.type)), None)


def _optimizer_facts(optimizer: Any, device: torch.device) -> OptimizerFacts:
    every = with_inner(optimizer)
    torchs = (one for one in every if "foreach" in getattr(one, "defaults", ()))
    inner = next(torchs, every[-1])
    if not isinstance(inner, torch.optim.Optimizer):
        return OptimizerFacts(type_name=type(inner).__name__)
    # What holds for the first group of parameters holds for the others, as far as we know.
    group = {**inner.defaults, **next(iter(inner.param_groups), {})}
    on_cuda, foreach = device.type == "cuda", group.get("foreach")
    ways = [
        ("fused", group.get("fused")),
        ("", "foreach" not in group),
        ("tensor by tensor", group.get("differentiable")),
        # By default torch takes foreach on a GPU alone. On a CPU it updates tensor by tensor all the same.
        ("foreach", on_cuda and foreach in (None, True)),
        ("tensor by tensor", True),
    ]
    chosen = next(place for place, (_, holds) in enumerate(ways) if holds)
    helps = {
        # On a device of which torch's docs say nothing, nothing is faster.
        "fused": (device.type == "cpu" and not foreach) or (on_cuda and not isinstance(inner, torch.optim.Adagrad)),
        "foreach": on_cuda and chosen == len(ways) - 1,
    }
    faster = [f"{name}=True" for name, helped in helps.items() if helped and name in inner.defaults and chosen > 2]
    return OptimizerFacts(type_name=type(inner).__name__, updates=ways[chosen][0], faster_with=tuple(faster))
