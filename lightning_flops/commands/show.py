"""``lightning-flops show``: a profile, or the throughput of a run without one, as text or JSON."""

from __future__ import annotations

import argparse

from lightning_flops.commands.common import PATH, add_peaks, held_against
from lightning_flops.commands.terminal import Status, command, option, print_whole


@command(
    option("path", metavar="PATH", help=f"{PATH}: the latest; or a throughput.json"),
    option("--detailed", action="store_true", help="append everything else that was measured"),
    option("--json", action="store_true", help="print it as JSON"),
    add_peaks,
)
def show(options: argparse.Namespace) -> int:
    """Print a profile, or the throughput of a run that was only timed."""
    from lightning_flops.report.text import render_text
    from lightning_flops.schema.profile import Profile
    from lightning_flops.sinks.profile_files import KINDS, read_report

    report, _ = read_report(options.path, *KINDS)
    if isinstance(report, Profile):
        report = held_against(options, report)
    print_whole(report.to_json() if options.json else render_text(report, detailed=options.detailed))
    return Status.DONE
