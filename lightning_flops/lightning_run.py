"""What a Lightning Trainer tells about the run it drives. Nothing here asks another rank."""

from __future__ import annotations

import math
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from lightning_flops.records import RunContext

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


def settle_steps(trainer: Trainer) -> int:
    """Steps until the batches that the loader fetched ahead during the counted step are used up; two at least."""
    ahead = 0
    combined = trainer.fit_loop._combined_loader
    for loader in combined.flattened if combined is not None else ():
        ahead = max(ahead, (getattr(loader, "num_workers", 0) or 0) * (getattr(loader, "prefetch_factor", 0) or 0))
    return max(2, math.ceil(ahead / trainer.accumulate_grad_batches))


def run_context(trainer: Trainer) -> RunContext:
    """Where this fit runs, as far as a rank can tell without asking the others."""
    device = trainer.strategy.root_device
    root = type(trainer).__module__.partition(".trainer")[0]
    sizes = _mesh_sizes(trainer)
    return RunContext(
        framework=root,
        framework_version=_version("lightning" if root.startswith("lightning.") else "pytorch-lightning"),
        torch_version=torch.__version__,
        device_type=device.type,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine(),
        precision=str(trainer.precision),
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        dp_size=sizes.get("data_parallel", trainer.world_size),
        tp_size=sizes.get("tensor_parallel", 1),
        accumulate=trainer.accumulate_grad_batches,
        strategy=type(trainer.strategy).__name__,
    )


def _mesh_sizes(trainer: Trainer) -> dict[str, int]:
    """Sizes of the device mesh of a ModelParallelStrategy by dimension; empty for every other strategy."""
    mesh = getattr(trainer.strategy, "_device_mesh", None)
    names = getattr(mesh, "mesh_dim_names", None)
    return {name: int(mesh[name].size()) for name in names} if mesh is not None and names else {}


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "unknown"


def log_folder(trainer: Trainer) -> str:
    """The folder of the run's logs; not ``trainer.log_dir``, which asks all ranks to take part in a broadcast."""
    for run_logger in trainer.loggers:
        folder = getattr(run_logger, "log_dir", None) or run_logger.save_dir
        if folder:
            return str(folder)
    return str(trainer.default_root_dir)
