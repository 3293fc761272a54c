"""``lightning-flops skill``: where the instructions for coding agents are."""

from __future__ import annotations

import argparse
from pathlib import Path

from lightning_flops.commands.terminal import Commands, print_whole

SKILL = Path(__file__).parents[1] / "SKILL.md"
"""The page; it is installed with the package."""


def add(commands: Commands) -> None:
    """Add the command to *commands*."""
    skill = commands.add_parser(
        "skill",
        help="print the path of the instructions for coding agents",
        description="Print the path of a page for coding agents: which command answers which question, and what "
        "profile.json says.",
    )
    skill.set_defaults(act=_print_path)


def _print_path(options: argparse.Namespace) -> int:
    print_whole(f"{SKILL}\n")
    return 0
