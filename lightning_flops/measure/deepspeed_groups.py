"""How many ranks share the work of a DeepSpeed run, as its process groups say; asks no rank, imports no DeepSpeed.

DeepSpeed keeps its groups in a module of its own. It also takes a model-parallel unit ("mpu") of the user's:
Megatron's, the grid of a pipeline, its own module of sequence-parallel groups, and others. The methods of such units
have had different names over the years.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from lightning_flops.records import ParallelSizes

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


def tensor_parallel_size_of_process() -> int:
    """Tensor-parallel size of the last engine of this process; 1 where DeepSpeed is not in use."""
    return _size(getattr(sys.modules.get("deepspeed.utils.groups"), "mpu", None), "tp_size")


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
