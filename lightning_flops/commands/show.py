"""``lightning-flops show``: a profile as text."""

from __future__ import annotations

import argparse

from lightning_flops.commands.common import PATH, add_peaks, held_against
from lightning_flops.commands.terminal import Status, command, option, print_whole


@command(
    option("path", metavar="PATH", help=f"{PATH}: the latest"),
    option("--detailed", action="store_true", help="append everything else that was measured"),
    add_peaks,
)
def show(options: argparse.Namespace) -> int:
    """Print a profile."""
    from lightning_flops.report.text import render_text
    from lightning_flops.sinks.profile_files import read_profile

    profile, _ = read_profile(options.path)
    print_whole(render_text(held_against(options, profile), detailed=options.detailed))
    return Status.DONE
