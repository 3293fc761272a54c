"""``lightning-flops show``: a profile, or the throughput of a run without one, as text or JSON."""

from __future__ import annotations

import argparse

from lightning_flops.commands.common import (
    DEVICE_FIGURES,
    PATH,
    command,
    held_against,
    option,
    print_report,
)


@command(
    option("path", metavar="PATH", help=f"{PATH}: the latest; or a throughput.json"),
    option("--detailed", action="store_true", help="append everything else that was measured"),
    option("--json", action="store_true", help="print it as JSON"),
    *DEVICE_FIGURES,
)
def show(options: argparse.Namespace) -> None:
    """Print a profile, or the throughput of a run that was only timed."""
    from lightning_flops.sinks.profile_files import KINDS, read_report

    print_report(held_against(options, read_report(options.path, *KINDS)[0]), options, detailed=options.detailed)
