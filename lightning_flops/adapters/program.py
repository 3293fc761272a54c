"""A program that runs unchanged and is profiled, whichever framework it loads, as soon as it has imported that."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_flops.config import config_from
from lightning_flops.sinks.console import say
from lightning_flops.units import package_logger

if TYPE_CHECKING:
    from lightning_flops.adapters.run_program import LoopFinder

logger = package_logger(__name__)

#: Environment variables by which launchers number processes: the first that is there is 0 in the first process.
_RANKS_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")

_WHAT_TO_WRITE = (
    "put `with lightning_flops.profile_training(model, optimizer):` around the loop; in a program that starts others, "
    "put this command before each of them, as in torchrun --nproc-per-node 2 -m lightning_flops run train.py"
)


def is_first_process() -> bool:
    """Whether this process is the only one of the program, or the first that a launcher has started."""
    return next((os.environ[name] for name in _RANKS_OF_LAUNCHERS if name in os.environ), "0") == "0"


class ProfiledProgram:
    """The training of this process's program, profiled. No framework is loaded before the program loads it.

    A ConfigError says what is wrong with one of the *settings*.
    """

    def __init__(self, settings: dict[str, Any], *, log_dir: str | None) -> None:
        self._settings = settings
        self._log_dir = log_dir
        self._finder: LoopFinder | None = None
        self._config = config_from(settings, owner="run")

    def begin(self, *, switched_on: bool) -> None:
        """The program begins; unless *switched_on*, only DeepSpeed's engines are profiled."""
        when_imported("deepspeed", lambda _: importlib.import_module("lightning_flops.deepspeed").install())
        if switched_on:
            when_imported("transformers.trainer", self._give_callback)
            when_imported("torch", self._find_loop)

    def _give_callback(self, trainer: ModuleType) -> None:
        """Have every Trainer of transformers add a callback of ours to those that it adds itself."""
        ours = importlib.import_module("lightning_flops.transformers")
        trainer.DEFAULT_CALLBACKS.append(ours.CallbackOfAnyTrainer(**self._settings))

    def _find_loop(self, torch: ModuleType) -> None:
        from lightning_flops.adapters.run_program import LoopFinder

        self._finder = LoopFinder(self._config, log_dir=self._log_dir)
        self._finder.begin()

    def end(self, error: BaseException | None) -> None:
        """The program is over, or *error* ends it: report what was measured, and say if nothing was."""
        if self._finder is not None:
            self._finder.end(error)
        if (of_engines := sys.modules.get("lightning_flops.deepspeed")) is not None:
            of_engines.end_all()  # a report that is being written counts, too
        reports = sys.modules.get("lightning_flops.run.delivery")  # not imported here: it would import torch
        outcomes = None if reports is None else reports.OUTCOMES
        if is_first_process() and (outcomes is None or not (outcomes.profiles or outcomes.warned)):
            say(f"nothing was profiled: {self._reason(outcomes, error)}")

    def _reason(self, outcomes: Any, error: BaseException | None) -> str:
        """Why nothing was profiled, and what to write."""
        if (switch := os.environ.get("LIGHTNING_FLOPS")) != "1":
            return f"LIGHTNING_FLOPS is {switch} in the environment"
        if outcomes is not None and (outcomes.runs or outcomes.reasons):
            if self._settings.get("timer_only"):
                return "timer_only was asked for; throughput is where the run's logs are"
            return "; ".join(dict.fromkeys(outcomes.reasons)) or "training ended before its step was counted to the end"
        if self._finder is None:
            return "the program did not import torch"
        if isinstance(error, Exception) and not self._finder.updated:
            return f"{type(error).__name__} ended the program before an optimizer made a step"
        seen = "no module that was called owns what its optimizers update"
        return f"{seen if self._finder.updated else 'no optimizer made a step'} in this process: {_WHAT_TO_WRITE}"


def when_imported(name: str, notify: Callable[[ModuleType], object]) -> None:
    """Call *notify* with the module *name*: now if the program has imported it, otherwise as soon as it has.

    If *notify* raises, this is logged; the import goes on. Looking for the module (``find_spec``) does not count as an
    import: transformers, for example, asks whether deepspeed is installed. After a failed import we wait for the next.
    """

    def imported(module: ModuleType) -> None:
        try:
            notify(module)
        except Exception:  # the program must get its module, whatever fails on our side
            logger.warning("the FLOPs profiler could not be installed for %s; the program goes on", name, exc_info=True)

    if (module := sys.modules.get(name)) is not None:
        imported(module)
    else:
        sys.meta_path.insert(0, _ImportWatch(name, imported))


@dataclass(eq=False)
class _ImportWatch(MetaPathFinder):
    """A finder that finds one module through the other finders, until that module has been imported."""

    name: str
    imported: Callable[[ModuleType], None]

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """What the other finders find, with a loader that notifies us; None for every other module."""
        if fullname != self.name:
            return None
        finders = [one for one in sys.meta_path if one is not self and hasattr(one, "find_spec")]
        spec = next(filter(None, (one.find_spec(fullname, path, target) for one in finders)), None)
        loader: Any = getattr(spec, "loader", None)
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self.name and self in sys.meta_path:  # a zip file's modules have one loader
                vars(loader).pop("exec_module", None)
                sys.meta_path.remove(self)
                self.imported(module)

        loader.exec_module = exec_module
        return spec
