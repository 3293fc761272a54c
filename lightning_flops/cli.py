"""The command line: its commands are in ``commands``."""

from __future__ import annotations

import argparse
import inspect
import itertools
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

import lightning_flops
from lightning_flops.commands import compare, formula, memory, peak, plan, report, run, show, skill, trace
from lightning_flops.commands.common import COMMANDS, Act, Status
from lightning_flops.errors import LightningFlopsError
from lightning_flops.sinks.console import PROGRAM, say
from lightning_flops.units import printable

# The files of the commands, as the help lists them; each has the command of its name.
_IN_ORDER = (run, show, report, trace, compare, formula, memory, plan, peak, skill)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that *arguments* (by default the program's) ask for; returns the exit status.

    What a program under ``run`` raises is raised here.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    # DeepSpeed's launcher, and torch's old one, put this argument first. It is meant for the program.
    launcher = list(itertools.takewhile(re.compile(r"--local[-_]rank=\d+").fullmatch, arguments))
    runs = arguments[len(launcher) : len(launcher) + 1] == ["run"]
    if arguments[:1] == ["compare"]:
        arguments = [compare.AGAINST if one == "--" else one for one in arguments]
    options = parser().parse_args(arguments[len(launcher) :] if runs else arguments)
    act: Act = options.act
    if runs:
        options.program[1:1] = launcher
        return act(options) or Status.DONE
    try:
        return act(options) or Status.DONE
    except (LightningFlopsError, OSError) as error:
        say(str(error))
        return Status.FAILED
    except KeyboardInterrupt:
        return Status.INTERRUPTED


class _Parser(argparse.ArgumentParser):
    """Says in printable text what is wrong with arguments."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def parser() -> argparse.ArgumentParser:
    """What reads the command line."""
    whole = _Parser(prog=PROGRAM, description="What a PyTorch training run computes and waits for.", allow_abbrev=False)
    whole.add_argument("--version", action="version", version=f"{PROGRAM} {lightning_flops.__version__}")
    commands = whole.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in (module.__name__.rpartition(".")[2] for module in _IN_ORDER):
        act, options, settings = COMMANDS[name]
        words = inspect.getdoc(act) or ""  # none under python -OO
        does = words.partition("\n")[0].rstrip(".")
        settings = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False, **settings}
        added = commands.add_parser(name, help=f"{does[:1].lower()}{does[1:]}", description=words, **settings)
        added.set_defaults(act=act)
        for option in options:
            option(added)
    return whole
