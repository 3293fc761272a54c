"""``lightning-flops skill``: where the page for coding agents is."""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning_flops
from lightning_flops.commands.common import command, print_whole


@command()
def skill(options: argparse.Namespace) -> None:
    """Print the path of the instructions for coding agents."""
    print_whole(f"{Path(lightning_flops.__file__).with_name('SKILL.md')}\n")
