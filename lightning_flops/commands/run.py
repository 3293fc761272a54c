"""``lightning-flops run PROGRAM…``: a program runs unchanged, and its training is profiled."""

from __future__ import annotations

import argparse
import functools
import json
import os
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING

from lightning_flops.commands.terminal import AS_WRITTEN, PROGRAM, Commands, complain, say
from lightning_flops.errors import ConfigError
from lightning_flops.session.border import guarded
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.doors.find_loop import LoopFinder
    from lightning_flops.session.outcomes import Outcomes

logger = package_logger(__name__)

_SETTING = "setting:"

_RANKS_OF_LAUNCHERS = ("LOCAL_RANK", "NODE_RANK", "SLURM_PROCID")
"""Environment variables by which launchers that set no RANK tell processes apart: each is 0 in the first one."""


_SOME_WORK_SEC = 1.0
"""A process that imports torch takes longer; one that looks for a compiler does not."""

_NOT_FOLLOWED = (
    ", and programs that it started are not followed: the command goes before each of them, as in "
    "torchrun --nproc-per-node 2 -m lightning_flops run train.py"
)


def add(commands: Commands) -> None:
    """Add the command to *commands*."""
    run = commands.add_parser(
        "run",
        help="run a training program unchanged, profiled",
        usage="%(prog)s [-h] [--profile-step N] [--log-dir DIR] [...] [-m] PROGRAM [ARGUMENT ...]",
        description=(
            "Run a Python program unchanged, and profile its training: every Trainer of Lightning and of transformers, "
            "every DeepSpeed engine whose config has an enabled flops_profiler block, and every other loop of torch, "
            "accelerate or Fabric whose optimizers take steps (the first eight). A profiler that the program has "
            "itself goes before. LIGHTNING_FLOPS=0 in the environment leaves all but DeepSpeed alone."
        ),
        epilog=(
            "examples:\n"
            f"  {PROGRAM} run train.py --epochs 3\n"
            f"  {PROGRAM} run --profile-step 20 --log-dir logs train.py\n"
            f"  torchrun --nproc-per-node 2 -m lightning_flops run --tokens-per-sample 2048 -m my_package.train"
        ),
        formatter_class=AS_WRITTEN,
        allow_abbrev=False,
    )
    run.add_argument("-m", dest="module", action="store_true", help="PROGRAM is a module's name, as after python -m")
    run.add_argument(
        "--log-dir", metavar="DIR", help="folder for TensorBoard and files, if the loggers of a framework have none"
    )
    _add_settings(run)
    run.add_argument(
        "program",
        nargs=argparse.PARSER,
        metavar="PROGRAM",
        help="a script, or a directory or zip file with a __main__.py; what follows it is its own",
    )


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting that can be written on a command line."""
    from lightning_flops.config import ARGUMENTS
    from lightning_flops.config import SETTINGS as KNOWN

    group = parser.add_argument_group("settings")
    for name in ARGUMENTS:
        option = f"--{name.replace('_', '-')}"
        group.add_argument(
            option, dest=f"{_SETTING}{name}", metavar="VALUE", type=_value, help=_plain(KNOWN[name].help)
        )


def _plain(text: str) -> str:
    """*text* of a docstring as a terminal shows it."""
    return text.replace("``", "").replace("%", "%%")


def _value(text: str) -> object:
    """A setting's value: JSON, as 20, true or {"wait": 1}; any other text is text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False}.get(text, text)


def _settings_in(options: argparse.Namespace) -> dict[str, object]:
    """The settings among *options*.

    Raises:
        ConfigError: one breaks its rule.
    """
    from lightning_flops.config import BLOCK, config_from

    given = {
        name.removeprefix(_SETTING): value
        for name, value in vars(options).items()
        if name.startswith(_SETTING) and value is not None
    }
    try:
        config_from(given, owner="run")
    except ConfigError as error:
        words = str(error)
        for name in given:
            words = words.replace(f"{BLOCK}.{name} ", f"--{name.replace('_', '-')} ", 1)
        raise ConfigError(words) from None
    return given


def profile_program(options: argparse.Namespace, program: Sequence[str]) -> int:
    """Run *program*, which is its name and its arguments; returns the exit status. What it raises is raised here."""
    from lightning_flops.doors.run_program import ProgramNotFoundError, run

    try:
        doors = Doors(_settings_in(options), log_dir=options.log_dir)
    except ConfigError as wrong:
        complain(f"error: {wrong}", command="run")
        return 2
    error: BaseException | None = None
    try:
        doors.begin()
        run(program[0], program[1:], as_module=options.module)
    except ProgramNotFoundError as missing:
        doors.silent = True
        complain(str(missing))
        return missing.exit_status
    except BaseException as raised:
        error = raised
        raise
    finally:
        doors.end(error)
    return 0


def _follow(log_dir: str | None, word: str) -> None:
    """A process begins that the program has started anew by multiprocessing; *word* is where it tells the first one."""
    doors = Doors({}, log_dir=log_dir, word=word)
    doors.begin()
    doors.begin_in_child()


class Doors:
    """Has the program's training profiled. No framework is loaded before the program loads it.

    If our code fails, what we have put up is removed, and that is said once; the program goes on.

    Args:
        settings: those that the user has given.
        log_dir: a folder for the reports of a training whose framework has none for them.
        word: where this process tells the first one that it has profiled something; empty in the first one.

    Raises:
        ConfigError: the environment has settings that break their rules.
    """

    def __init__(self, settings: Mapping[str, object], *, log_dir: str | None, word: str = "") -> None:
        from lightning_flops import entry_points
        from lightning_flops.doors import processes
        from lightning_flops.instrument.border import UndoLedger
        from lightning_flops.session.border import Border

        self._ledger = UndoLedger()
        self.border = Border(take_off=self._take_off, tell=self._tell_failure)
        """Catches what our code raises."""
        self.silent = False
        """Say nothing at the end."""
        self._given = settings
        self._settings = {**entry_points.settings(), **settings}
        self._log_dir = log_dir
        self._finder: LoopFinder | None = None
        self._is_main = True
        """The command has started this process itself."""
        self._process = os.getpid()
        """The one that this was made in; one that it is forked into is another."""
        self._word = processes.Word(word)

    @guarded
    def begin(self) -> None:
        """The program begins."""
        from lightning_flops import entry_points
        from lightning_flops.config import OWN_FOLDER
        from lightning_flops.doors import fabric_launch, processes
        from lightning_flops.doors.when_imported import when_imported

        # The program and what it starts see our environment; in the end it is again as it was before.
        for name in (entry_points.SWITCH, entry_points.SETTINGS, entry_points.LOG_DIR):
            self._ledger.add(functools.partial(_set_variable, name, os.environ.get(name)))
        if self._given:
            os.environ[entry_points.SETTINGS] = json.dumps(self._settings)
        os.environ.setdefault(entry_points.SWITCH, "1")  # a value that is there is the user's
        log_dir = self._log_dir
        if log_dir is not None:
            os.environ[entry_points.LOG_DIR] = log_dir
        os.environ.setdefault(entry_points.LOG_DIR, OWN_FOLDER)
        when_imported("deepspeed", self._install)
        if entry_points.is_on():
            processes.follow(
                self, Doors._is_forked, undo=self._ledger, then=_follow, log_dir=log_dir, word=self._word.path
            )
            for launcher in fabric_launch.LAUNCHERS:
                when_imported(launcher, self._tap_launcher)
            when_imported("transformers.trainer", self._give_callback)
            when_imported("torch", self._find_loop)

    def _take_off(self) -> None:
        if self._finder is not None:
            self._ledger.add(self._finder.border.close)
        self._ledger.close()

    def _tell_failure(self, error: Exception) -> None:
        logger.warning("the FLOPs profiler failed; the program goes on: %s: %s", type(error).__name__, error)

    # ---- what is told of imports and of processes

    @guarded
    def _install(self, deepspeed: ModuleType) -> None:
        from lightning_flops.deepspeed import install

        install()

    @guarded
    def _tap_launcher(self, launcher: ModuleType) -> None:
        from lightning_flops.doors import fabric_launch

        fabric_launch.tap(launcher, log_dir=self._log_dir)

    @guarded
    def _give_callback(self, trainer: ModuleType) -> None:
        """Have every Trainer of transformers add a callback of ours to those that it adds itself."""
        from lightning_flops.transformers import CallbackOfAnyTrainer

        trainer.DEFAULT_CALLBACKS.append(CallbackOfAnyTrainer(**self._settings))

    @guarded
    def _find_loop(self, *_: ModuleType) -> None:
        from lightning_flops.config import config_from
        from lightning_flops.doors.find_loop import LoopFinder

        config = config_from(self._settings, owner="run")
        self._finder = LoopFinder(config, log_dir=self._log_dir, announce=self._says, before=self._finder)
        self._finder.begin()

    def _says(self, sentence: str) -> None:
        say(sentence)
        if os.getpid() != self._process:  # a daemon that was forked says nothing at its end
            self._word.tell()

    @guarded
    def _is_forked(self) -> None:
        """This process was forked by multiprocessing, and does not come back to the command."""
        from lightning_flops.session.outcomes import OUTCOMES

        OUTCOMES.begin_anew()
        if self._finder is not None:
            self._find_loop()
        self.begin_in_child()

    @guarded
    def begin_in_child(self) -> None:
        """This process is one that the program has started by multiprocessing: report when it ends."""
        from lightning_flops.doors import processes

        self._is_main = False
        processes.at_end(lambda: self.end(None))

    # ---- the end

    @guarded
    def end(self, error: BaseException | None) -> None:
        """The program is over, or *error* ends it: report what was measured, and say if nothing was."""
        from lightning_flops.doors import processes

        if self._finder is not None:
            self._finder.end(error)
        if self._is_main:
            processes.after_children(self._say_last)
        else:
            self._tell_first_process()

    @guarded
    def _tell_first_process(self) -> None:
        """This process, which the program has started, is over; the first one says what else there was."""
        from lightning_flops.session.outcomes import OUTCOMES

        if not self.silent and self._is_first_rank():
            if OUTCOMES.profiles:
                self._word.tell()
            if self._finder is not None and self._finder.has_nothing_of_its_loops:
                say(f"nothing was profiled in process {os.getpid()}: {self._reason(OUTCOMES)}")
        self.border.close()

    @guarded
    def _say_last(self) -> None:
        """The program is over, with all processes that it has started: say what was profiled, or why nothing was."""
        from lightning_flops.session.outcomes import OUTCOMES
        from lightning_flops.units import plural

        elsewhere = self._word.hear()
        if self.silent or not self._is_first_rank():
            pass
        elif OUTCOMES.profiles:
            if not OUTCOMES.told:  # of a profiler that the program has itself, or in another process
                say(f"FLOPs of {OUTCOMES.latest} The report went where the profiler of that training has it.")
            self._tell_of_several(OUTCOMES)
        elif elsewhere:
            say(
                f"what was profiled ran in {plural('process', len(elsewhere))} {', '.join(elsewhere)}, which the "
                "program started; the lines above say where the reports are"
            )
        else:
            say(f"nothing was profiled: {self._reason(OUTCOMES)}")
        self.border.close()

    def _is_first_rank(self) -> bool:
        """Whether this is the process of the program that speaks for all of them, as far as that is known."""
        told = (os.environ.get("RANK"),) if "RANK" in os.environ else map(os.environ.get, _RANKS_OF_LAUNCHERS)
        return all(rank in (None, "0") for rank in told) and (self._finder is None or self._finder.rank == 0)

    def _tell_of_several(self, outcomes: Outcomes) -> None:
        """If the program had several trainings, say in one last line what became of each."""
        found = () if self._finder is None else self._finder.loops
        of_found = frozenset[str]() if self._finder is None else self._finder.said
        frameworks = [one.line.rstrip(".") for one in outcomes.told if one.line not in of_found]
        if len(runs := [*frameworks, *found]) > 1:
            say(f"trainings of this program: {'; '.join(f'({n}) {run}' for n, run in enumerate(runs, 1))}.")

    def _reason(self, outcomes: Outcomes) -> str:
        """Why nothing was profiled; without a full stop."""
        if outcomes.sessions and self._settings.get("timer_only"):
            return "timer_only was asked for; throughput is where the run's logs are"
        if outcomes.sessions:
            return "; ".join(dict.fromkeys(outcomes.reasons)) or "training ended before its step was counted to the end"
        if (switch := os.environ.get("LIGHTNING_FLOPS")) != "1":
            return f"LIGHTNING_FLOPS is {switch} in the environment"
        reason = "the program did not import torch" if self._finder is None else self._finder.reason
        trains = self._finder is not None and not self._finder.is_idle
        return reason if trains or not _has_started_programs() else f"{reason}{_NOT_FOLLOWED}"


def _has_started_programs() -> bool:
    """Whether processes that this one has started have done some work, and none of them is multiprocessing's."""
    try:
        import resource
    except ImportError:  # Windows
        return False
    from multiprocessing import Process

    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime > _SOME_WORK_SEC and Process().name == "Process-1"


def _set_variable(name: str, value: str | None) -> None:
    """Give the environment's variable *name* this value; None: there is none."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value
