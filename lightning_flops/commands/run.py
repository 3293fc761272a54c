"""``lightning-flops run PROGRAM…``: a program runs unchanged, and its training is profiled."""

from __future__ import annotations

import argparse
import importlib
import io
import json
import os
import re
import runpy
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lightning_flops import entry_points
from lightning_flops.commands.terminal import Status, command, complain, option, say
from lightning_flops.config import ARGUMENTS, BLOCK, OWN_FOLDER, SETTINGS, config_from
from lightning_flops.errors import ConfigError

if TYPE_CHECKING:
    from lightning_flops.adapters.run_program import LoopFinder

_RANKS_OF_LAUNCHERS = ("RANK", "LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""Environment variables by which launchers number processes: the first that is there is 0 in the first process."""

_WHAT_TO_WRITE = (
    "put `with lightning_flops.profile_training(model, optimizer):` around the loop; in a program that starts others, "
    "put this command before each of them, as in torchrun --nproc-per-node 2 -m lightning_flops run train.py"
)


def _option(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def _value(text: str) -> object:
    """A setting's value: JSON, as 20, true or {"wait": 1}; any other text is text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def _settings(parser: argparse.ArgumentParser) -> None:
    """An option for each setting that can be written on a command line."""
    group = parser.add_argument_group("settings")
    for name in ARGUMENTS:
        words = SETTINGS[name].help.replace("``", "").replace("%", "%%")
        group.add_argument(_option(name), metavar="VALUE", type=_value, help=words)


@command(
    option("-m", dest="module", action="store_true", help="PROGRAM is a module's name, as after python -m"),
    option(
        "--log-dir", metavar="DIR", help="folder for TensorBoard and files, if the loggers of a framework have none"
    ),
    _settings,
    option(
        "program",
        nargs=argparse.PARSER,
        metavar="PROGRAM",
        help="a script; what follows it is its own",
    ),
    usage="%(prog)s [-h] [--profile-step N] [--log-dir DIR] [...] [-m] PROGRAM [ARGUMENT ...]",
)
def run(options: argparse.Namespace) -> int:
    """Run a training program unchanged, profiled.

    Profiled is every Trainer of Lightning and transformers, every DeepSpeed engine whose config has an
    enabled flops_profiler block, and otherwise its first loop. A profiler of the program's own goes
    before. LIGHTNING_FLOPS=0 in the environment leaves all but DeepSpeed alone. Processes of the Trainer
    and of torchrun are profiled, others that the program starts are not.

    Examples:
      lightning-flops run --profile-step 20 --log-dir logs train.py --epochs 3
      torchrun --nproc-per-node 2 -m lightning_flops run --tokens-per-sample 2048 -m my_package.train
    """
    program: list[str] = options.program
    given = {name: value for name, value in vars(options).items() if name in ARGUMENTS and value is not None}
    try:
        profiled = _Profiled(given, log_dir=options.log_dir)
    except ConfigError as wrong:
        words = re.sub(rf"{BLOCK}\.(\w+)", lambda found: _option(found[1]), str(wrong))
        complain(f"error: {words}", command="run")
        return Status.FAILED
    if not options.module and not os.path.exists(program[0]):
        complain(f"can't open file {program[0]!r}: No such file or directory")
        return Status.FAILED
    sys.argv = program
    error: BaseException | None = None
    try:
        profiled.begin()
        _run(program[0], is_module=options.module)
    except BaseException as raised:
        error = raised
        raise
    finally:
        profiled.end(error)
    return Status.DONE


def _run(target: str, *, is_module: bool) -> None:
    """Run the program as Python does."""
    if is_module:
        sys.path[0] = os.getcwd()
        runpy.run_module(target, run_name="__main__", alter_sys=True)
    else:  # runpy would take the module away from threads and exit handlers, which may outlive its last line
        sys.path[0] = os.path.dirname(os.path.realpath(target))
        main = sys.modules["__main__"] = ModuleType("__main__")
        main.__file__ = os.path.join(os.getcwd(), target)
        with io.open_code(main.__file__) as file:
            exec(compile(file.read(), main.__file__, "exec"), vars(main))


class _Profiled:
    """Has the program's training profiled. No framework is loaded before the program loads it.

    The settings *given* win over those in the environment; a ConfigError says what is wrong with one.
    """

    def __init__(self, given: dict[str, Any], *, log_dir: str | None) -> None:
        self._settings = {**entry_points.settings(), **given}
        self._log_dir = log_dir
        self._finder: LoopFinder | None = None
        self._config = config_from(self._settings, owner="run")

    def begin(self) -> None:
        """The program begins; it and what it starts see our environment, in which a value that is there stays."""
        from lightning_flops.adapters.when_imported import when_imported

        os.environ[entry_points.SETTINGS] = json.dumps(self._settings)
        os.environ.setdefault(entry_points.SWITCH, "1")
        if self._log_dir is not None:
            os.environ[entry_points.LOG_DIR] = self._log_dir
        os.environ.setdefault(entry_points.LOG_DIR, OWN_FOLDER)
        when_imported("deepspeed", lambda _: importlib.import_module("lightning_flops.deepspeed").install())
        if entry_points.is_on():
            when_imported("transformers.trainer", self._give_callback)
            when_imported("torch", self._find_loop)

    def _give_callback(self, trainer: ModuleType) -> None:
        """Have every Trainer of transformers add a callback of ours to those that it adds itself."""
        from lightning_flops.transformers import CallbackOfAnyTrainer

        trainer.DEFAULT_CALLBACKS.append(CallbackOfAnyTrainer(**self._settings))

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
        reports = sys.modules.get("lightning_flops.run.reports")  # not imported here: it would import torch
        outcomes = None if reports is None else reports.OUTCOMES
        rank = next((os.environ[name] for name in _RANKS_OF_LAUNCHERS if name in os.environ), "0")
        if rank == "0" and (outcomes is None or not (outcomes.profiles or outcomes.warned)):
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
