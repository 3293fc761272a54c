"""What the commands say on a terminal, and to whom."""

from __future__ import annotations

import argparse
import inspect
import io
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

from lightning_flops.sinks.console import PROGRAM as PROGRAM
from lightning_flops.sinks.console import say as say
from lightning_flops.text.printable import printable

Commands = Any
"""What ``add_subparsers`` returns; argparse has no public name for its class."""
Act = Callable[[argparse.Namespace], int]
"""Does what a command's options ask for, and returns the exit status."""


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


def add_command(commands: Commands, act: Act, **settings: Any) -> argparse.ArgumentParser:
    """Add the command that *act* does: it has the function's name, and its docstring is the command's help."""
    words = inspect.getdoc(act) or ""  # none under python -OO
    does = words.partition("\n")[0].rstrip(".")
    settings |= {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    added: argparse.ArgumentParser = commands.add_parser(
        act.__name__, help=f"{does[:1].lower()}{does[1:]}", description=words, **settings
    )
    added.set_defaults(act=act)
    return added


def add_forms(command: argparse.ArgumentParser, what: str) -> None:
    """Add the options for *what* the command prints in other forms."""
    command.add_argument("--json", action="store_true", help=f"print {what} as JSON")
    command.add_argument("--html", metavar="FILE", help="write it also as a page, to a path or URL")
