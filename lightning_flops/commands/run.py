"""``lightning-flops run PROGRAM…``: a program runs unchanged, and its training is profiled."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from lightning_flops import entry_points
from lightning_flops.adapters.program import ProfiledProgram, is_first_process
from lightning_flops.commands.common import Status, command, option, option_name, setting
from lightning_flops.config import ARGUMENTS, BLOCK, OWN_FOLDER
from lightning_flops.errors import ConfigError
from lightning_flops.sinks.console import say

_OF_ANY_PROGRAM = ("batch_size",)  # an option that most programs have


def _settings(parser: argparse.ArgumentParser) -> None:
    """An option for each setting that can be written on a command line."""
    group = parser.add_argument_group("settings")
    for name in ARGUMENTS:
        setting(name)(group)


def _misplaced(program: Sequence[str], *, is_module: bool) -> list[str]:
    """Options behind the *program* that are ours by their names, and that its file does not speak of."""
    text = ""
    if not is_module:
        with contextlib.suppress(OSError):
            text = Path(program[0]).read_text(encoding="utf-8", errors="replace")
    ours = {option_name(name): name for name in ARGUMENTS if name not in _OF_ANY_PROGRAM}
    found = dict.fromkeys(one.partition("=")[0].replace("_", "-") for one in program[1:])
    return [one for one in found if one in ours and one not in text and ours[one] not in text]


@command(
    option("-m", dest="module", action="store_true", help="PROGRAM is a module's name, as after python -m"),
    option("--log-dir", metavar="DIR", help="folder for TensorBoard and files, if a framework's loggers have none"),
    _settings,
    option("program", nargs=argparse.PARSER, metavar="PROGRAM", help="a script; what follows it is its own"),
    usage="%(prog)s [-h] [--profile-step N] [--log-dir DIR] [...] [-m] PROGRAM [ARGUMENT ...]",
)
def run(options: argparse.Namespace) -> Status | None:
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
        settings = {**entry_points.settings(), **given}  # those that are given win over those in the environment
        profiled = ProfiledProgram(settings, log_dir=options.log_dir)
    except ConfigError as wrong:
        words = re.sub(rf"{BLOCK}\.(\w+)", lambda found: option_name(found[1]), str(wrong))
        say(f"error: {words}", command="run")
        return Status.FAILED
    if not options.module and not os.path.exists(program[0]):
        say(f"can't open file {program[0]!r}: No such file or directory")
        return Status.FAILED
    if is_first_process() and (behind := _misplaced(program, is_module=options.module)):
        say(
            f"{', '.join(behind)} {'stands' if len(behind) == 1 else 'stand'} behind {program[0]}, which gets what "
            "follows it: options of this command stand before it",
            command="run",
        )
    # The program and what it starts see our environment, in which a value that is there stays.
    os.environ[entry_points.SETTINGS] = json.dumps(settings)
    os.environ.setdefault(entry_points.SWITCH, "1")
    if options.log_dir is not None:
        os.environ[entry_points.LOG_DIR] = options.log_dir
    os.environ.setdefault(entry_points.LOG_DIR, OWN_FOLDER)
    sys.argv = program
    try:
        profiled.begin(switched_on=entry_points.is_on())
        _run(program[0], is_module=options.module)
    finally:
        profiled.end(sys.exc_info()[1])
    return None


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
