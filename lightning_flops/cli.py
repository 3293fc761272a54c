"""The command line: each command is a file in ``commands``."""

from __future__ import annotations

import argparse
import difflib
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import lightning_flops
from lightning_flops.commands import compare, formula, peak, report, run, trace
from lightning_flops.commands.terminal import PROGRAM, Act, add_command, complain, print_whole
from lightning_flops.config import ARGUMENTS
from lightning_flops.errors import LightningFlopsError
from lightning_flops.text.printable import printable

_FAILED = 2
_INTERRUPTED = 130  # after Ctrl-C, as shells have it: 128 and the signal's number


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that *arguments* (by default the program's) ask for; returns the exit status.

    0: done. 2: wrong usage, or something cannot be read, written or compared; standard error says which. 130: Ctrl-C.
    Of ``compare``, 1 means that a condition of ``--fail-if`` holds, and 3 that it is inconclusive; of ``peak``, 1 that
    the machine was too busy. What a program under ``run`` raises is raised here.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # DeepSpeed's launcher, and torch's old one, put this argument first. It is meant for the program.
    launcher = list(itertools.takewhile(re.compile(r"--local[-_]rank=\d+").fullmatch, arguments))
    runs = arguments[len(launcher) : len(launcher) + 1] == ["run"]
    options = parser().parse_args(arguments[len(launcher) :] if runs else arguments)
    act: Act = options.act
    if runs:
        options.program[1:1] = launcher
        return act(options)
    try:
        return act(options)
    except (LightningFlopsError, OSError) as error:
        complain(str(error))
        return _FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Says in printable text what is wrong with arguments."""

    def error(self, message: str) -> NoReturn:
        name = message.removeprefix("unrecognized arguments: --").partition(" ")[0].partition("=")[0]
        near = difflib.get_close_matches(name.replace("-", "_"), ARGUMENTS, n=1) if name != message else ()
        hint = f", did you mean --{near[0].replace('_', '-')}?" if near else ""
        super().error(printable(f"{message}{hint}"))


def parser() -> argparse.ArgumentParser:
    """What reads the command line."""
    whole = _Parser(prog=PROGRAM, description="What a PyTorch training run computes and waits for.", allow_abbrev=False)
    whole.add_argument("--version", action="version", version=f"{PROGRAM} {lightning_flops.__version__}")
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (run, formula, report, trace, compare, peak):
        command.add(commands)
    add_command(commands, skill)
    return whole


def skill(options: argparse.Namespace) -> int:
    """Print the path of the instructions for coding agents."""
    print_whole(f"{Path(__file__).with_name('SKILL.md')}\n")
    return 0
