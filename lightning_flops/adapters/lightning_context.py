"""What a Lightning Trainer knows about its run, and where its reports go. Nothing here asks another rank."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from lightning_flops.adapters.place import announce_in_log, mesh_sizes, run_context_on, sizes_along
from lightning_flops.config import BLOCK, OWN_FOLDER
from lightning_flops.records import Loop, RunContext
from lightning_flops.run.output import LoggedOutput
from lightning_flops.sinks.services import Services

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_flops.config import ProfilerConfig

IMPORT_ROOTS = ("lightning.pytorch", "pytorch_lightning")
"""The two names under which Lightning is installed."""


def is_lightnings(kind: type) -> bool:
    """Whether the class *kind* is defined in Lightning itself, and not in a package whose name begins as its name."""
    return kind.__module__.startswith(tuple(f"{root}." for root in IMPORT_ROOTS))


def steps_in(trainer: Trainer, loop: Loop) -> float:
    """Steps of *loop* as far as they are known before it runs: of a fit, those of a development run."""
    if loop == "training":
        # Lightning sets this attribute from outside its class; it is the number of batches, or a bool.
        return math.ceil(int(getattr(trainer, "fast_dev_run", False)) / trainer.accumulate_grad_batches) or math.inf
    batches = getattr(trainer, f"{loop}_loop").max_batches
    return float(sum(batches) if isinstance(batches, list) else batches)


def loader_workers(trainer: Trainer, loop: Loop) -> int | None:
    """Fewest worker processes of the DataLoaders of *loop*; None if no loader says."""
    workers = [getattr(loader, "num_workers", None) for loader in loaders(trainer, loop)]
    return min((count for count in workers if isinstance(count, int)), default=None)


def loaders(trainer: Trainer, loop: Loop) -> list[Any]:
    """The data loaders of *loop*."""
    names = {"training": "train_dataloader", "validate": "val_dataloaders", "test": "test_dataloaders"}
    found = getattr(trainer, names.get(loop, "predict_dataloaders"))
    return _leaves(getattr(found, "iterables", found))


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in _leaves(one)]
    return [] if value is None else [value]


def run_context(trainer: Trainer, loop: Loop = "training") -> RunContext:
    """Where this run takes place, as far as a rank knows without asking the others."""
    root = _import_root(trainer)
    return run_context_on(
        trainer.strategy.root_device,
        sizes_along(mesh_sizes(_device_mesh(trainer.strategy)), world_size=trainer.world_size),
        framework=root,
        framework_version=str(getattr(sys.modules.get(root.partition(".")[0]), "__version__", "unknown")),
        precision=str(trainer.precision),
        rank=trainer.global_rank,
        world_size=trainer.world_size,
        accumulate=trainer.accumulate_grad_batches if loop == "training" else 1,
        strategy=type(trainer.strategy).__name__,
        loop=loop,
    )


def _device_mesh(strategy: Any) -> Any:
    """The mesh of *strategy*; None without one, or before its processes have found each other."""
    try:
        return strategy.device_mesh
    except (AttributeError, RuntimeError):
        return None


def _import_root(trainer: Trainer) -> str:
    modules = [kind.__module__ for kind in type(trainer).__mro__]  # the Trainer may be a subclass of the user's
    return next((root for module in modules for root in IMPORT_ROOTS if module.startswith(f"{root}.")), modules[0])


_NOWHERE = (
    'No file keeps it: give the Trainer a logger or a FlopsProfilerCallback, or call logging.basicConfig(level="INFO").'
)


def run_output(
    trainer: Trainer, config: ProfilerConfig, *, own_folder: str | None, loop: Loop = "training"
) -> LoggedOutput:
    """Where rank 0 shows the reports of this run: a development run writes no files but one that a setting names.

    Files are in *own_folder*, if any, when no logger has a folder.
    """
    part = "" if loop == "training" else loop
    development = bool(getattr(trainer, "fast_dev_run", False))
    return LoggedOutput(
        config,
        loggers=Services(trainer.loggers),
        folder=lambda: None if development else _log_folder(trainer) or own_folder,
        announce=functools.partial(announce_in_log, _import_root(trainer)),
        nowhere="" if development or own_folder else _NOWHERE,
        part=part,
    )


def _log_folder(trainer: Trainer) -> str | None:
    """The folder that a logger has for this run; None if none has one.

    Not ``trainer.log_dir``, which broadcasts and so needs all ranks, and not the ``save_dir`` of a logger without a
    folder for each run, which may be the working directory. A mock logger has an object under every name: only paths.
    """
    folders = [getattr(one, "log_dir", None) for one in trainer.loggers]
    return next((str(one) for one in folders if isinstance(one, (str, PurePath)) and str(one)), None)


def folder_of_trainer(trainer: Trainer) -> str:
    """Our own folder, below the Trainer's."""
    return f"{str(trainer.default_root_dir).rstrip('/')}/{OWN_FOLDER}"


# ---- DeepSpeed under Lightning


def is_deepspeed(trainer: Trainer) -> bool:
    """Whether *trainer* uses a DeepSpeedStrategy, of either import root, or a subclass of it."""
    return any(kind.__name__ == "DeepSpeedStrategy" for kind in type(trainer.strategy).__mro__)


def engine_of(trainer: Trainer) -> Any:
    """The engine that *trainer* uses in a fit; None without DeepSpeed."""
    return trainer.strategy.deepspeed_engine if is_deepspeed(trainer) else None  # type: ignore[attr-defined]


def block_of(trainer: Trainer) -> object | None:
    """The ``"flops_profiler"`` block of *trainer*'s DeepSpeed config; None if there is none."""
    config = getattr(trainer.strategy, "config", None) if is_deepspeed(trainer) else None
    return config.get(BLOCK) if isinstance(config, Mapping) else None
