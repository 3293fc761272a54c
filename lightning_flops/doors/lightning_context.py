"""What a Lightning Trainer knows about its run, and where its reports go. Nothing here asks another rank."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from lightning_flops.config import OWN_FOLDER
from lightning_flops.doors.device_mesh import mesh_sizes
from lightning_flops.doors.run_place import run_context_on, sizes_along
from lightning_flops.instrument.patches import untapped
from lightning_flops.instrument.timing.settling import steps_to_settle
from lightning_flops.instrument.torch_private.loading import fetched_ahead
from lightning_flops.records import Loop, RunContext
from lightning_flops.session.output import LoggedOutput, RunFiles
from lightning_flops.session.private_names import PrivateNames
from lightning_flops.sinks.console import ConsoleSink
from lightning_flops.sinks.loggers import LoggersSink
from lightning_flops.text.printable import printable

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from lightning_flops.config import ProfilerConfig

IMPORT_ROOTS = ("lightning.pytorch", "pytorch_lightning")
"""The two names under which Lightning is installed."""

_DATA_WAIT = "the wait for data cannot be told apart, and is in other"

_OF_ANY_LOOP = {
    "_on_before_fetch": _DATA_WAIT,
    "_on_after_fetch": _DATA_WAIT,
    "_data_fetcher": _DATA_WAIT,
    "_start_profiler": _DATA_WAIT,
    "_stop_profiler": _DATA_WAIT,
    "_combined_loader": (
        "neither the worker processes of its data loaders nor their queues are seen, and the first timed steps may use "
        "batches that were fetched ahead"
    ),
    "_iterator": "the queues of its data loaders are not seen, and the first timed steps may use batches fetched ahead",
}

LOST = {
    **_OF_ANY_LOOP,
    "_after_closure": "what Lightning's hooks do inside the optimizer's step counts as the optimizer's",
    "_clip_gradients": "clipping the gradients is not marked as the optimizer's",
    "_optimizer_zero_grad": "dropping the gradients in a hook of the user's is in other",
    "_batches_that_stepped": "the loggers get trainer.global_step as their x-axis",
    "_lightning_optimizers": "zero_grad in manual optimization is in other",
}
"""Private names of Lightning that a fit uses, and what is lost if one is missing."""

_AFTER_CALLBACKS = "what a batch runs after the callbacks have heard of its end is not counted"

LOST_WITHOUT_TRAINING = {
    **_OF_ANY_LOOP,
    "_predict_step": _AFTER_CALLBACKS,
    "_evaluation_step": _AFTER_CALLBACKS,
}
"""The same of the names that a loop without training uses."""


def private_names(trainer: Trainer, *, lost: Mapping[str, str] = LOST) -> PrivateNames:
    """The private names of *trainer*'s Lightning that are in *lost*."""
    return PrivateNames(f"Lightning ({_version_of(_import_root(trainer))})", lost)


def is_lightnings_own(target: Any, name: str) -> bool:
    """Whether *target*'s method is Lightning's own, and not overridden or replaced."""
    function = getattr(getattr(target, name, None), "__func__", None)
    return function is not None and any(
        function is vars(kind).get(name) for kind in type(target).__mro__ if is_lightnings(kind)
    )


def is_lightnings(kind: type) -> bool:
    """Whether the class *kind* is defined in Lightning itself, and not in a package whose name begins as its name."""
    return kind.__module__.startswith(tuple(f"{root}." for root in IMPORT_ROOTS))


def last_step_of_development_run(trainer: Trainer) -> int | None:
    """The last step, counted from 0, that ``fast_dev_run`` runs; None in an ordinary run."""
    # Lightning sets this attribute from outside its class; it is the number of batches, or a bool.
    batches = int(getattr(trainer, "fast_dev_run", False))
    return math.ceil(batches / trainer.accumulate_grad_batches) - 1 if batches else None


def settle_steps(loop: Any, *, names: PrivateNames, batches_a_step: int) -> int:
    """Steps to leave alone after a counted one, as far as the loaders of *loop* show."""
    return steps_to_settle(batches_ahead=batches_fetched_ahead(loop, names=names), batches_a_step=batches_a_step)


def batches_fetched_ahead(loop: Any, *, names: PrivateNames) -> int:
    """Most batches that a loader of *loop* fetches ahead; 0 without workers."""
    return max(map(fetched_ahead, _loaders(loop, names)), default=0)


def loader_iterators(loop: Any, *, names: PrivateNames) -> list[Any]:
    """The current iterators of the loaders of *loop*; empty if this Lightning keeps them elsewhere."""
    combined = names.get(loop, "_combined_loader", None)
    iterator = None if combined is None else names.get(combined, "_iterator", None)
    return list(getattr(iterator, "iterators", None) or ())


def loader_workers(loop: Any, *, names: PrivateNames) -> int | None:
    """Fewest worker processes of the DataLoaders of *loop*; None if no loader says."""
    workers = [getattr(loader, "num_workers", None) for loader in _loaders(loop, names)]
    return min((count for count in workers if isinstance(count, int)), default=None)


def _loaders(loop: Any, names: PrivateNames) -> Sequence[Any]:
    combined = names.get(loop, "_combined_loader", None)
    return () if combined is None else tuple(combined.flattened)


_FETCHES = {"_start_profiler": "_on_before_fetch", "_stop_profiler": "_on_after_fetch"}
"""What a data fetcher calls before and after a fetch, and the method of a loop that this is."""


def fetches_can_be_wrapped(loop: Any, methods: Any, *, names: PrivateNames) -> bool:
    """Whether the fetches of *loop* can be wrapped by its *methods*, and unwrapped in its fetcher, which keeps them."""
    fetcher = names.get(loop, "_data_fetcher", None)
    if fetcher is None:
        return False
    return all(names.has(fetcher, kept) and names.has(methods, method) for kept, method in _FETCHES.items())


def reset_fetcher(loop: Any, methods: Any, *, names: PrivateNames) -> None:
    """Give the data fetcher of *loop* the current methods of *methods*; it keeps those from when it was made."""
    fetcher = names.get(loop, "_data_fetcher", None)
    if fetcher is None:
        return
    for name, method in _FETCHES.items():
        kept = names.get(fetcher, name, None)
        current = names.get(methods, method, None)
        if current is not None and untapped(kept) == untapped(current):  # and not what somebody else has put there
            setattr(fetcher, name, current)


def run_context(trainer: Trainer, *, loop: Loop = "training") -> RunContext:
    """Where this run takes place, as far as a rank knows without asking the others."""
    root = _import_root(trainer)
    return run_context_on(
        trainer.strategy.root_device,
        sizes_along(mesh_sizes(_device_mesh(trainer.strategy)), world_size=trainer.world_size),
        framework=root,
        framework_version=_version_of(root),
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


@functools.cache  # each fit asks twice, and each time the file that says it would be parsed, for milliseconds
def _version_of(root: str) -> str:
    try:
        return version("lightning" if root.startswith("lightning.") else "pytorch-lightning")
    except PackageNotFoundError:
        return "unknown"


_NOWHERE = (
    "nothing keeps the report, because this Trainer has no logger with a folder, and nobody wrote a "
    'FlopsProfilerCallback into it: give it a logger, or the callback, or logging.basicConfig(level="INFO")'
)


def run_output(
    trainer: Trainer, config: ProfilerConfig, *, own_folder: str | None, loop: Loop = "training"
) -> LoggedOutput:
    """Where rank 0 shows the reports of this run. A development run writes no files unless a setting names one.

    Args:
        trainer: drives the run.
        config: the settings.
        own_folder: of the files if no logger has a folder; None: then there are no files.
        loop: what the run does. The tags and the files of a loop without training have its name in theirs.
    """
    part = "" if loop == "training" else loop
    development = bool(getattr(trainer, "fast_dev_run", False))
    return LoggedOutput(
        config,
        loggers=LoggersSink(trainer.loggers),
        console=ConsoleSink(),
        files=RunFiles(
            output_file=config.output_file,
            folder=lambda: None if development else _log_folder(trainer) or own_folder,
            part=part,
            timer_only=config.timer_only,
            html=config.html,
        ),
        text_file=True,
        x_axis=lambda step: step,
        announce=functools.partial(_announce, _import_root(trainer)),
        nowhere="" if development or own_folder else _NOWHERE,
        part=part,
    )


def _announce(root: str, sentence: str) -> None:
    """Say *sentence* in Lightning's own log, which a terminal shows by default, unless our own log is shown."""
    ours = logging.getLogger("lightning_flops")
    if not (ours.isEnabledFor(logging.INFO) and ours.hasHandlers()):  # if shown, its INFO lines have named each file
        logging.getLogger(root).info("%s", printable(sentence))


def _log_folder(trainer: Trainer) -> str | None:
    """The folder that a logger has for this run; None if none has one.

    We do not use ``trainer.log_dir``, because it broadcasts and so needs all ranks. We do not use the ``save_dir`` of a
    logger without a folder for each run: it belongs to the logging service, and may be the working directory. And we
    check that the value is a path: a mock logger in a test has an object under every name, and ``MagicMock`` makes one
    that is an ``os.PathLike``, whose folder would be left in the working directory.
    """
    for run_logger in trainer.loggers:
        folder = getattr(run_logger, "log_dir", None)
        if isinstance(folder, (str, PurePath)) and (path := str(folder)):
            return path
    return None


def folder_of_trainer(trainer: Trainer) -> str:
    """Our own folder, below the Trainer's."""
    return f"{str(trainer.default_root_dir).rstrip('/')}/{OWN_FOLDER}"
