"""What is known of a training loop that the user wrote: from torch, and from accelerate or Fabric if it uses them."""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lightning_flops.config import OWN_FOLDER, ProfilerConfig
from lightning_flops.doors.device_mesh import mesh_sizes
from lightning_flops.doors.run_place import run_context_on, sizes_along
from lightning_flops.records import RunContext
from lightning_flops.session.output import LoggedOutput, RunFiles
from lightning_flops.sinks.console import ConsoleSink
from lightning_flops.sinks.event_files import BoardRecord
from lightning_flops.sinks.loggers import LoggersSink
from lightning_flops.sinks.sink import Sink
from lightning_flops.sinks.writers import TensorBoardFiles, WritersSink


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the library that drives the loop knows of it; without one, what torch knows."""

    name: str
    version: str
    rank: int
    world_size: int
    precision: Callable[[str], str]
    """Its words for the precision, given the dtype of an autocast in the loop; empty: there is none."""
    strategy: str
    writers: tuple[Any, ...] = ()
    """As ``WritersSink`` takes them."""
    loggers: tuple[Any, ...] = ()
    """As ``LoggersSink`` takes them."""


def frame_of(model: nn.Module, *, accelerator: Any, fabric: Any) -> Frame:
    """The frame of a loop that trains *model*.

    Args:
        model: what the loop calls.
        accelerator: an ``accelerate.Accelerator``, or None.
        fabric: a ``lightning.fabric.Fabric``, or None.
    """
    if accelerator is not None:
        return Frame(
            name="accelerate",
            version=str(getattr(sys.modules.get("accelerate"), "__version__", "unknown")),
            rank=int(accelerator.process_index),
            world_size=int(accelerator.num_processes),
            precision=lambda autocast: _precision(
                model, autocast if accelerator.mixed_precision == "no" else str(accelerator.mixed_precision)
            ),
            strategy=_strategy(model),
            writers=tuple(accelerator.trackers),
        )
    if fabric is not None:
        root = "lightning.fabric" if type(fabric).__module__.startswith("lightning.") else "lightning_fabric"
        package = sys.modules.get(root.partition(".")[0])
        return Frame(
            name=root,
            version=str(getattr(package, "__version__", "unknown")),
            rank=int(fabric.global_rank),
            world_size=int(fabric.world_size),
            precision=lambda _: str(fabric.strategy.precision.precision),
            strategy=type(fabric.strategy).__name__,
            loggers=tuple(fabric.loggers),
        )
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    return Frame(
        name="torch",
        version=torch.__version__,
        rank=torch.distributed.get_rank() if distributed else 0,
        world_size=torch.distributed.get_world_size() if distributed else 1,
        precision=lambda autocast: _precision(model, autocast),
        strategy=_strategy(model),
    )


def _strategy(model: nn.Module) -> str:
    """The wrapper that spreads the work, by its class; empty without one."""
    kinds = {kind.__name__ for kind in type(model).__mro__}
    wrappers = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule", "DataParallel")
    return next((name for name in wrappers if name in kinds), "")


def _precision(model: nn.Module, mixed: str) -> str:
    """The dtype of the parameters, and the one that autocast computes in, if that is on."""
    parameter = next((one for one in model.parameters() if one.is_floating_point()), None)
    own = "" if parameter is None else str(parameter.dtype).removeprefix("torch.")
    return f"{mixed} mixed, {own} parameters" if mixed else own


def device_of(model: nn.Module) -> torch.device:
    """Where the model computes: where its first parameter is."""
    tensor: torch.Tensor | None = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.device("cpu") if tensor is None else tensor.device


def run_context(frame: Frame, model: nn.Module, *, accumulate: int, autocast: str) -> RunContext:
    """Where the loop runs, as far as a rank knows without asking the others; *autocast* as for ``Frame.precision``."""
    return run_context_on(
        device_of(model),
        sizes_along(_mesh_sizes(model), world_size=frame.world_size),
        framework=frame.name,
        framework_version=frame.version,
        precision=frame.precision(autocast),
        rank=frame.rank,
        world_size=frame.world_size,
        accumulate=accumulate,
        strategy=frame.strategy,
    )


def _mesh_sizes(model: nn.Module) -> dict[str, int]:
    """The largest size of each known dimension of the meshes that the model's parameters are spread over."""
    meshes = {id(mesh): mesh for one in model.parameters() if (mesh := getattr(one, "device_mesh", None)) is not None}
    sizes: dict[str, int] = {}
    for mesh in meshes.values():
        for name, size in mesh_sizes(mesh).items():
            sizes[name] = max(size, sizes.get(name, 1))
    return sizes


class LoopOutput:
    """Where rank 0 shows the reports of one loop.

    Args:
        frame: whose loggers or trackers get them.
        log_dir: a folder for TensorBoard's files and ours; None: no such folder.
        writer: what else gets them, as ``WritersSink`` takes it; None: nothing else.
        or_own: if nobody has a folder for our files, they go into one of our own.
        part: as for ``LoggedOutput``.
    """

    def __init__(
        self,
        frame: Frame,
        *,
        log_dir: str | os.PathLike[str] | None,
        writer: Any,
        or_own: bool = False,
        part: str = "",
    ) -> None:
        writers = [*frame.writers, *(() if writer is None else (writer,))]
        self._folder = None if log_dir is None else os.fspath(log_dir)
        if self._folder is not None:
            writers.insert(0, TensorBoardFiles(self._folder))
        self._writers = WritersSink(writers)
        self._loggers = LoggersSink(frame.loggers)
        self._own_folder = OWN_FOLDER if or_own else None
        self._part = part
        self._logged: LoggedOutput | None = None
        self._logger_folders = [getattr(logger, "log_dir", None) for logger in frame.loggers]

    def logged(self, config: ProfilerConfig, *, announce: Callable[[str], None] | None) -> LoggedOutput:
        """What sessions write to, each turn of the loop to the same; the arguments are those of ``LoggedOutput``."""
        if self._logged is None:
            self._logged = self._new_logged(config, announce=announce)
        return self._logged

    def _new_logged(self, config: ProfilerConfig, *, announce: Callable[[str], None] | None) -> LoggedOutput:
        return LoggedOutput(
            config,
            loggers=_Both(self._writers, self._loggers),
            console=ConsoleSink(),
            files=RunFiles(
                output_file=config.output_file,
                folder=self._files_folder,
                part=self._part,
                timer_only=config.timer_only,
                html=config.html,
            ),
            text_file=True,
            x_axis=lambda step: step,
            announce=announce,
            part=self._part,
        )

    def _files_folder(self) -> str | None:
        if self._folder is not None:
            return self._folder
        known = (one for one in self._logger_folders if isinstance(one, (str, os.PathLike)) and os.fsdecode(one))
        return next(map(os.fsdecode, known), None) or self._writers.folder() or self._own_folder

    def close(self) -> None:
        """Close what was opened for the reports; what is written afterwards opens it again."""
        self._writers.close()


class _Both:
    """Two sinks that get the same."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    @property
    def takes_scalars(self) -> bool:
        return any(sink.takes_scalars for sink in self._sinks)

    def write_scalars(self, scalars: Mapping[str, float], *, step: int) -> None:
        for sink in self._sinks:
            sink.write_scalars(scalars, step=step)

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        taken = [sink.write_text(tag, text, step=step) for sink in self._sinks]  # all of them, whoever takes it
        return any(taken)

    def keep_file(self, path: str) -> None:
        for sink in self._sinks:
            sink.keep_file(path)

    def write_record(self, record: BoardRecord, *, step: int) -> None:
        for sink in self._sinks:
            sink.write_record(record, step=step)
