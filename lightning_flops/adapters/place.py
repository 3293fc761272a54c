"""Where a run takes place, in the same words for every framework, and how its ranks share the work.

Of a training loop that the user wrote: as torch knows it, or accelerate or Fabric if it uses them.
"""

from __future__ import annotations

import itertools
import logging
import math
import operator
import os
import platform
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lightning_flops.analysis.devices import name_of_chip
from lightning_flops.config import OWN_FOLDER, ProfilerConfig
from lightning_flops.errors import ConfigError
from lightning_flops.measure.module_scope import unwrapped
from lightning_flops.records import ParallelSizes, RunContext
from lightning_flops.run.output import LoggedOutput
from lightning_flops.sinks.console import say
from lightning_flops.sinks.services import Services, TensorBoardFiles
from lightning_flops.units import printable, shown


def run_context_on(device: torch.device, sizes: ParallelSizes, *, framework: str, **fields: Any) -> RunContext:
    """The context of a run by *framework*, whose package is loaded, on *device*, in groups of these *sizes*."""
    package = sys.modules.get(framework.partition(".")[0])
    return RunContext(
        framework=framework,
        framework_version=str(getattr(package, "__version__", "unknown")),
        torch_version=str(torch.__version__),  # whose class is its own
        device_type=device.type,
        device_name=name_of_chip(torch.cuda.get_device_properties(device))
        if device.type == "cuda"
        else platform.machine(),
        host=platform.node(),
        **asdict(sizes),
        **fields,
    )


def sizes_along(known: Mapping[str, int], *, world_size: int) -> ParallelSizes:
    """How many ranks share the work, given the *known* sizes of dimensions as ``mesh_sizes`` names them."""
    # Ranks with different experts see different data.
    same_data = math.prod(size for name, size in known.items() if name != "ep")
    return ParallelSizes(dp_size=max(1, world_size // same_data), **{f"{name}_size": known[name] for name in known})


_KINDS = {"tensor": "tp", "pipeline": "pp", "context": "cp", "sequence": "sp", "expert": "ep"}
#: The kind of parallelism of a device mesh's dimension, by its name: Lightning's, torchtitan's and the usual names.
_DIMENSIONS = {name: kind for word, kind in _KINDS.items() for name in (kind, f"{word}_parallel")} | {"ulysses": "sp"}


def mesh_sizes(mesh: Any) -> dict[str, int]:
    """Sizes of the dimensions of *mesh* that we know, by our names for them; empty without a mesh.

    Along every other dimension the ranks see different data, whatever the mesh calls it: replicas, shards or both.
    """
    sizes: dict[str, int] = {}
    names = getattr(mesh, "mesh_dim_names", None) or ()
    for name, size in zip(names, mesh.shape if names else (), strict=True):
        if (kind := _DIMENSIONS.get(name)) is not None:
            sizes[kind] = sizes.get(kind, 1) * int(size)
    return sizes


def log_is_shown() -> bool:
    """Whether our own log is shown, whose INFO lines name each file."""
    ours = logging.getLogger("lightning_flops")
    return ours.isEnabledFor(logging.INFO) and ours.hasHandlers()


def announce_in_log(name: str, sentence: str) -> None:
    """Say *sentence* in the framework's own log of this *name*, which a terminal shows, unless our own is shown."""
    if not log_is_shown():
        logging.getLogger(name).info("%s", printable(sentence))


# ---- a loop of the user's


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the library that drives the loop knows of it; without one, what torch knows."""

    framework: str  # whose package is loaded
    rank: int
    world_size: int
    strategy: str
    precision: Callable[[str], str]  # its words, given the dtype of an autocast in the loop; empty: there is none
    sizes: ParallelSizes | None = None  # None: as the meshes say that the model's parameters are spread over
    writers: tuple[Any, ...] = ()  # services that get the reports


def frame_of(model: nn.Module, *, accelerator: Any, fabric: Any) -> Frame:
    """The frame of a loop that trains *model* by accelerate's *accelerator*, Lightning's *fabric* or neither (None)."""
    if accelerator is not None:
        return accelerate_frame(accelerator, model)
    if fabric is not None:
        return Frame(
            framework="lightning.fabric" if type(fabric).__module__.startswith("lightning.") else "lightning_fabric",
            rank=int(fabric.global_rank),
            world_size=int(fabric.world_size),
            precision=lambda _: str(fabric.strategy.precision.precision),
            strategy=type(fabric.strategy).__name__,
            writers=tuple(fabric.loggers),
        )
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return Frame(
        framework="torch",
        rank=torch.distributed.get_rank() if distributed else 0,
        world_size=torch.distributed.get_world_size() if distributed else 1,
        precision=lambda autocast: _precision(model, autocast),
        strategy=_strategy(model),
    )


def accelerate_frame(accelerator: Any, model: nn.Module, *, framework: str = "accelerate") -> Frame:
    """The frame of a loop that trains *model* by *accelerator*."""
    world_size = int(accelerator.num_processes)
    given = getattr(accelerator, "parallelism_config", None)
    known = {kind: int(getattr(given, f"{kind}_size", 1) or 1) for kind in ("tp", "cp", "sp")}
    mixed = str(accelerator.mixed_precision)
    return Frame(
        framework=framework,
        rank=int(accelerator.process_index),
        world_size=world_size,
        precision=lambda autocast: _precision(model, autocast if mixed == "no" else mixed),
        strategy=_strategy(model),
        sizes=None if given is None else sizes_along(known, world_size=world_size),
        writers=tuple(accelerator.trackers),
    )


def _strategy(model: nn.Module) -> str:
    """The wrapper that spreads the work, by its class; empty without one."""
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")
    return next((name for name in wrappers if any(name == kind.__name__ for kind in type(model).__mro__)), "")


def _precision(model: nn.Module, mixed: str) -> str:
    """The dtype of the parameters, and the one that autocast computes in, if that is on."""
    parameter = next((one for one in model.parameters() if one.is_floating_point()), None)
    own = "" if parameter is None else str(parameter.dtype).removeprefix("torch.")
    return f"{mixed} mixed, {own} parameters" if mixed else own


def device_of(model: nn.Module) -> torch.device:
    """Where the model computes: where its first parameter is."""
    tensor: torch.Tensor | None = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def run_context(
    frame: Frame, model: nn.Module, device: torch.device, *, accumulate: int, autocast: str = ""
) -> RunContext:
    """Where the loop runs, as far as a rank knows without asking the others; *autocast* as for ``Frame.precision``."""
    sizes = frame.sizes
    if sizes is None:  # the largest of each known dimension of the meshes that the parameters are spread over
        meshes = {id(mesh): mesh for mesh in (getattr(one, "device_mesh", None) for one in model.parameters())}
        known = [item for mesh in meshes.values() for item in mesh_sizes(mesh).items()]
        sizes = sizes_along(dict(sorted(known, key=operator.itemgetter(1))), world_size=frame.world_size)
    return run_context_on(
        device,
        sizes,
        framework=frame.framework,
        rank=frame.rank,
        world_size=frame.world_size,
        strategy=frame.strategy,
        precision=frame.precision(autocast),
        accumulate=accumulate,
    )


def loop_output(
    frame: Frame,
    config: ProfilerConfig,
    *,
    log_dir: str | os.PathLike[str] | None,
    writer: Any = None,
    or_own: bool = False,
) -> LoggedOutput:
    """Where rank 0 shows the reports of one loop.

    The services of *frame* get them, *writer*, and TensorBoard's files in *log_dir*. If none has a folder for our own
    files, these go into one of ours with *or_own*, and else nowhere.
    """
    folder = None if log_dir is None else os.fspath(log_dir)
    written = [] if folder is None else [TensorBoardFiles(folder)]
    services = Services([*written, *frame.writers, *([] if writer is None else [writer])])
    return LoggedOutput(
        config,
        loggers=services,
        folder=lambda: folder or services.folder() or (OWN_FOLDER if or_own else None),
        announce=lambda sentence: None if log_is_shown() else say(sentence),
        nowhere="print(profiler.profile) shows the report; log_dir=... keeps it.",
    )


def called_in(model: nn.Module) -> tuple[nn.Module, ...]:
    """What a loop that trains *model* calls: the models in a ModuleDict, which itself is never called."""
    return tuple(model.children()) if isinstance(model, nn.ModuleDict) else (model,)


def root_of(model: nn.Module) -> nn.Module:
    """*model*, or the models in it, without their wrappers."""
    if not isinstance(model, nn.ModuleDict):
        return unwrapped(model)
    return nn.ModuleDict({name: unwrapped(one) for name, one in model.items()})


def optimizers_in(given: Any) -> tuple[Any, ...]:
    """The optimizers that a user gave, without accelerate's and Fabric's wrappers; a ConfigError for anything else."""
    several = map(_unwrapped, () if given is None else given if isinstance(given, Iterable) else (given,))
    found = tuple({id(one): one for one in several}.values())
    for one in found:
        # Its class has it, so that its calls can be heard; we hold none.
        if not (callable(getattr(type(one), "step", None)) and type(one).__weakrefoffset__):
            raise ConfigError(f"optimizer must be an optimizer or several, with a method step, got {shown(one)}")
    return found


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer inside of those that accelerate or Fabric has put around it, which may call it, or not."""
    theirs = ("accelerate.", "lightning.fabric.", "lightning_fabric.")
    inner = getattr(optimizer, "optimizer", None)
    is_theirs = any(kind.__module__.startswith(theirs) for kind in type(optimizer).__mro__)
    return _unwrapped(inner) if is_theirs and inner is not None else optimizer
