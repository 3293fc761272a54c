"""``lightning-flops peak``: what this machine's devices reach, for reports on devices without a vendor's figure."""

from __future__ import annotations

import argparse
import json
import platform

from lightning_flops.commands.common import Status, command, print_whole
from lightning_flops.sinks.console import say
from lightning_flops.units import plural, si

# Share of the time that this process waits for processors: what it measures is too low.
_STARVED = 0.05


@command()
def peak(options: argparse.Namespace) -> Status | None:
    """Measure what this machine's devices reach, for MFU where no vendor's peak is known.

    That is the fastest matrix product of each dtype, and a copy, on the processor and the first GPU,
    while nothing else runs. Later runs on this machine use the figures, and say so. They are kept in
    the cache folder of the user (XDG_CACHE_HOME, or ~/.cache).
    """
    import torch

    from lightning_flops.analysis.devices import name_of_chip
    from lightning_flops.analysis.rates import COPY, measured_file, read_measured
    from lightning_flops.measure.peaks import measure
    from lightning_flops.measure.timing.processor_wait import ProcessorWatch
    from lightning_flops.sinks.file import write_text_file

    host, watch = platform.node(), ProcessorWatch()
    watch.follow(timed=True)
    devices = {platform.machine(): torch.device("cpu")}
    if torch.cuda.is_available():
        devices[name_of_chip(torch.cuda.get_device_properties("cuda"))] = torch.device("cuda")
    found = read_measured(host)
    for name, device in devices.items():
        products, copy = measure(device)
        found[name] = {**products, COPY: copy}
        count = torch.get_num_threads()
        threads = f", {count} {plural('thread', count)}" if device.type == "cpu" else ""
        print_whole(f"{name}{threads}, measured:\n")
        for what, rate in found[name].items():
            print_whole(f"  {what:<10}{si(rate, 'B/s' if what == COPY else 'FLOP/s'):>16}\n")
    loss = watch.loss()
    waited = 0.0 if loss is None else loss.waited_share or 0.0
    if waited > _STARVED:
        say(
            f"for {waited:.0%} of the time it waited for processors, so the figures are too low, and not kept: run it "
            "again while nothing else runs.",
            command="peak",
        )
        return Status.HOLDS  # against the machine: it was too busy
    write_text_file(measured_file(host), json.dumps(found, indent=2) + "\n")
    print_whole(
        "Later runs use this where no vendor's peak is known; show earlier ones with --peak. It is kept in "
        f"{measured_file(host)}.\n"
    )
    return None
