"""What the commands say on a terminal, and to whom."""

from __future__ import annotations

import argparse
import enum
import io
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

from lightning_flops.sinks.console import PROGRAM as PROGRAM, say as say
from lightning_flops.units import printable

Act = Callable[[argparse.Namespace], int]
"""Does what a command's options ask for, and returns the exit status."""
Option = Callable[[Any], object]
"""Adds an option or argument, or several, to a parser or a group of one."""
COMMANDS: dict[str, tuple[Act, tuple[Option, ...], dict[str, Any]]] = {}
"""Every command that is imported, with its options and the other arguments of its parser."""


class Status(enum.IntEnum):
    """What every command ends with."""

    DONE = 0
    HOLDS = 1  # a condition of --fail-if; of ``peak``: the machine was too busy
    FAILED = 2  # wrong usage, or something cannot be read, written or compared, and standard error says which
    INCONCLUSIVE = 3  # a condition that a starved run leaves open
    INTERRUPTED = 130  # Ctrl-C, as shells have it: 128 and the signal's number


def complain(words: str, *, command: str = "") -> None:
    """Say on standard error what is wrong."""
    sys.stderr.write(f"{f'{PROGRAM} {command}'.rstrip()}: {printable(words)}\n")


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


def terminal_width() -> int | None:
    """Columns of the terminal; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def command(*options: Option, **settings: Any) -> Callable[[Act], Act]:
    """A decorator that makes a command of a function, with its name; its docstring is the command's help."""

    def add(act: Act) -> Act:
        COMMANDS[act.__name__] = act, options, settings
        return act

    return add


def option(*names: str, **settings: Any) -> Option:
    """An option, or an argument."""
    return lambda parser: parser.add_argument(*names, **settings)


def in_forms(what: str) -> Option:
    """The options for *what* the command prints in other forms."""

    def add(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help=f"print {what} as JSON")
        parser.add_argument("--html", metavar="FILE", help="write it also as a page, to a path or URL")

    return add
