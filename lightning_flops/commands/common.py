"""What the commands share: how one is made and speaks, settings as options, devices' figures, traces, the example."""

from __future__ import annotations

import argparse
import enum
import importlib.util
import inspect
import io
import os
import runpy
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from lightning_flops.config import SETTINGS, ProfilerConfig, rules
from lightning_flops.errors import ConfigError, LightningFlopsError
from lightning_flops.units import shown

if TYPE_CHECKING:
    from lightning_flops.analysis.trace_report import AnalyzedTrace
    from lightning_flops.trace.columns import RecordedInputs, RecordedWork

#: What ``show`` and ``report`` are given.
PATH = "a profile.json, or a folder of logs with such files below it; path or URL"

# ---- a command, and what it says on a terminal

#: Does what a command's options ask for, and returns the exit status, None if that is done.
Act = Callable[[argparse.Namespace], Any]
#: Adds an option or argument, or several, to a parser or a group of one.
Option = Callable[[Any], object]
#: Every command that is imported, with its options and the other arguments of its parser.
COMMANDS: dict[str, tuple[Act, tuple[Option, ...], dict[str, Any]]] = {}


class Status(enum.IntEnum):
    """What every command ends with."""

    DONE = 0
    HOLDS = 1  # a condition of --fail-if; of ``peak``: the machine was too busy
    FAILED = 2  # wrong usage, or something cannot be read, written or compared, and standard error says which
    INCONCLUSIVE = 3  # a condition that a starved run leaves open
    INTERRUPTED = 130  # Ctrl-C, as shells have it: 128 and the signal's number


def print_whole(text: str) -> None:
    """Print *text* as it is, as far as the other end reads."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a kernel's name must not fail for the terminal's encoding
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe (`| head`). At exit Python would flush into it and report the error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_report(report: Any, options: argparse.Namespace, **how: Any) -> None:
    """Print *report* as JSON, or as text that fits the terminal; *how* as for ``render_text``."""
    from lightning_flops.report.text import render_text

    print_whole(report.to_json() if options.json else render_text(report, width=terminal_width(), **how))


def terminal_width() -> int | None:
    """Columns of the terminal, or those that ``COLUMNS`` names; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() or "COLUMNS" in os.environ else None


def command(*options: Option, **settings: Any) -> Callable[[Act], Act]:
    """A decorator that makes a command of a function, with its name; its docstring is the command's help."""

    def add(act: Act) -> Act:
        COMMANDS[act.__name__] = act, options, settings
        return act

    return add


def option(*names: str, **settings: Any) -> Option:
    """An option, or an argument."""
    return lambda parser: parser.add_argument(*names, **settings)


def in_forms(what: str) -> tuple[Option, Option]:
    """The options ``--json`` and ``--html FILE``, by which a command prints *what*, its report, in other forms."""
    return (
        option("--json", action="store_true", help=f"print {what} as JSON"),
        option("--html", metavar="FILE", help="write it also as a page, to a path or URL"),
    )


def by_name(kind: Callable[[str], Any], example: str) -> Callable[[str], dict[str, Any]]:
    """Reads numbers by name, written as in *example*."""

    def read(text: str) -> dict[str, Any]:
        try:
            return {name: kind(value) for name, value in (part.split("=") for part in text.split(","))}
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be as {example}, got {shown(text)}") from None

    return read


# ---- settings as options: 20, true, 1,5 and active=3,repeat=2, wherever a setting is asked for

# By the rule of settings that have several values: how an option has them, and an example.
_FORMS = {
    rules.STEP_OR_STEPS: ("N,...", "1,5"),
    rules.PEAK_OR_NONE: ("DTYPE=FLOPS,...", "312e12 for all, or bfloat16=312e12,float32=67e12"),
    rules.TRACE_SCHEDULE_OR_NONE: ("NAME=N,...", "active=3,repeat=2"),
    rules.THRESHOLDS_OR_NONE: ("NAME=SHARE,...", "data_wait=0.1,idle=0.3"),
}
_TEXTS = (rules.PATH_OR_NONE, rules.TAG_PREFIX, rules.FULL_OR_HALF)


class _AllNames(argparse.Action):
    """Takes what has values by name once: a second time would drop names of the first."""

    def __call__(self, parser: Any, namespace: Any, value: Any, option: Any = None) -> None:
        before = getattr(namespace, self.dest)
        if before is not None and dict in (type(before), type(value)):
            raise argparse.ArgumentError(self, "must be given once, with all names: NAME=VALUE,NAME=VALUE")
        setattr(namespace, self.dest, value)


def option_name(setting: str) -> str:
    """How a command line writes a *setting*."""
    return f"--{setting.replace('_', '-')}"


def setting(name: str, *options: str, help: str = "", metavar: str = "") -> Option:
    """The option for the setting *name*, by which its value is checked; its own name and help if it has no others."""
    rule, words = SETTINGS[name].rule, SETTINGS[name].help.replace("``", "")
    form, example = _FORMS.get(rule, ("VALUE", ""))
    written = f", written {example}" if example else ""

    def read(text: str) -> object:
        value = text if rule in _TEXTS else _value(text)
        try:
            ProfilerConfig.from_block({name: value})
        except ConfigError:
            must = f"must be {rule.words.removesuffix(', or None')}{written}"
            raise argparse.ArgumentTypeError(f"{must}, got {text}") from None
        return value

    shown = f"{help or words.replace('%', '%%')}{f' As {example}.' if example else ''}"
    names, form = options or (option_name(name),), metavar or form
    return lambda parser: parser.add_argument(*names, type=read, action=_AllNames, metavar=form, help=shown)


def _value(text: str) -> object:
    """A number, true or false, several of them, or several by name; what is none of these stays text."""
    if "=" in text:
        return {name.strip(): _one(value) for name, _, value in (part.partition("=") for part in text.split(","))}
    values = [_one(part) for part in text.split(",")]
    return values if len(values) > 1 else values[0]


def _one(text: str) -> object:
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return {"true": True, "false": False}.get(text.lower(), text)


# ---- a device's own figures


DEVICE_FIGURES = (
    setting(
        "peak_flops_per_sec",
        "--peak",
        help="dense peak of one device in FLOP/s, for all dtypes or by dtype; wins over the table of devices.",
    ),
    setting(
        "memory_bytes_per_sec",
        "--bandwidth",
        help="bandwidth of one device's memory in bytes/s: 2.0e12",
        metavar="BYTES",
    ),
)


def given_figures(options: argparse.Namespace) -> ProfilerConfig:
    """The figures that were given, as settings."""
    return ProfilerConfig(peak_flops_per_sec=options.peak, memory_bytes_per_sec=options.bandwidth)


def held_against(options: argparse.Namespace, report: Any) -> Any:
    """A profile with the figures that were given, if any were."""
    from lightning_flops.analysis.rates import with_given_peaks
    from lightning_flops.schema.profile import Profile

    given = given_figures(options)
    if not isinstance(report, Profile) or given == ProfilerConfig():
        return report
    return with_given_peaks(
        report, flops_per_sec=given.peak_flops_per_sec, memory_bytes_per_sec=given.memory_bytes_per_sec
    )


# ---- traces


def analyzed(files: Sequence[str], options: argparse.Namespace, **settings: Any) -> list[AnalyzedTrace]:
    """What trace *files* say, one after the other, with the figures that were given."""
    from lightning_flops.analysis.trace_report import analyze_one
    from lightning_flops.trace.read import load_trace
    from lightning_flops.trace.structure import by_process

    formulas = recorded_work if importlib.util.find_spec("torch") else None
    traces = (trace for file in files for trace in by_process(load_trace(file)))
    return [analyze_one(trace, formulas=formulas, given=given_figures(options), **settings) for trace in traces]


def recorded_work(operator: str, inputs: RecordedInputs) -> RecordedWork:
    """FLOPs of a call in a trace, by the counter's formulas: the first call imports torch."""
    from lightning_flops.measure.counting.recorded_calls import recorded_work

    return recorded_work(operator, inputs)


# ---- the user's own function that makes a model


def example(where: str, *, most: int = 2) -> tuple[Any, ...]:
    """The model and the batch that the function named by *where* returns, and what may follow them, *most* in all."""
    answer = function_named(where)()
    if not isinstance(answer, tuple) or not 2 <= len(answer) <= most:
        raise LightningFlopsError(f"{where} must return a model and a batch, got {shown(answer)}")
    return answer


def function_named(where: str) -> Callable[..., Any]:
    """The user's function that *where* names."""
    source, _, name = where.rpartition(":")
    if not source:
        raise LightningFlopsError(f"the example must be FILE.py:FUNCTION or MODULE:FUNCTION, got {shown(where)}")
    try:
        sys.path.insert(0, os.getcwd())
        found = runpy.run_path(source) if source.endswith(".py") else vars(importlib.import_module(source))
    except Exception as error:  # of the user's program
        raise LightningFlopsError(f"{source} cannot be run: {type(error).__name__}: {error}") from error
    function: Any = found.get(name)
    if not callable(function):
        there = [one for one, value in found.items() if inspect.isfunction(value) and not one.startswith("_")]
        raise LightningFlopsError(f"{source} has no function {name}, but {', '.join(there) or 'none'}")
    return function  # type: ignore[no-any-return]
