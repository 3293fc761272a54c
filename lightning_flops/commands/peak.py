"""``lightning-flops peak``: what this machine's devices reach, for reports on devices without a vendor's figure."""

from __future__ import annotations

import argparse
import functools
import json
import platform
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from lightning_flops.commands.terminal import Commands, complain, print_whole
from lightning_flops.units import si

if TYPE_CHECKING:
    import torch

_SEC_EACH = 0.1
"""How long each size is measured, and the copy."""
_LEAST_SEC = 0.01
"""A product that takes less is tried in twice the size: starting it would be a share of its time."""
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_STARVED = 0.05
_USELESS = 0.5
"""Shares of the time that this process waits for processors: what it measures is too low, or far too low."""
_COPIED_BYTES = 1 << 26
"""More than caches hold."""


def add(commands: Commands) -> None:
    """Add the command to *commands*."""
    peak = commands.add_parser(
        "peak",
        help="measure what this machine's devices reach, for MFU where no vendor's peak is known",
        description=(
            "Measure the fastest matrix product of each dtype, and a copy, on the processor and on the first GPU: two "
            "seconds for each. The figures are kept in the cache folder of the user (XDG_CACHE_HOME, or ~/.cache). "
            "Reports of runs on this machine use them, and say so, where no vendor's peak is known. Run it while "
            "nothing else runs."
        ),
    )
    peak.set_defaults(act=_measure)


def _measure(options: argparse.Namespace) -> int:
    try:
        import torch
    except ImportError:
        complain("peak needs torch")
        return 2
    from lightning_flops.analysis.measured_peaks import measured_file, read_measured
    from lightning_flops.instrument.timing.processor_wait import ProcessorWatch
    from lightning_flops.sinks.file import write_text_file

    host, watch = platform.node(), ProcessorWatch()
    watch.follow(timed=True)
    devices = {platform.machine(): torch.device("cpu")}
    if torch.cuda.is_available():
        devices[torch.cuda.get_device_name()] = torch.device("cuda")
    found, lines = read_measured(host), []
    for name, device in devices.items():
        found[name] = measure(device)
        threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
        lines.append(f"{name}{threads}, measured:\n")
        for what, rate in found[name].items():
            lines.append(f"  {what:<10}{si(rate, 'B/s' if what == 'copy' else 'FLOP/s'):>16}\n")
    print_whole("".join(lines))
    loss = watch.loss()
    waited = 0.0 if loss is None else loss.waited_share or 0.0
    if waited > _STARVED:
        kept = "They are not kept: run" if waited > _USELESS else "Run"
        words = f"for {waited:.0%} of the time it waited for processors, so the figures are too low. {kept} it again"
        complain(f"{words} while nothing else runs.", command="peak")
    if waited > _USELESS:
        return 1
    try:
        write_text_file(measured_file(host), json.dumps(found, indent=2) + "\n")
    except OSError as error:
        complain(str(error))
        return 2
    print_whole(f"Reports use this where no vendor's peak is known. It is kept in {measured_file(host)}.\n")
    return 0


def measure(device: torch.device) -> dict[str, float]:
    """FLOP/s of the fastest product in each dtype on *device*, by the counter's names, and bytes/s of a copy."""
    import torch

    from lightning_flops.analysis.measured_peaks import COPY

    cuda, before = device.type == "cuda", torch.get_float32_matmul_precision()
    found: dict[str, float] = {}
    try:
        for name in ("float32", *(("tf32",) if cuda else ()), "bfloat16", "float16", "float64"):
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            dtype = torch.float32 if name == "tf32" else getattr(torch, name)
            try:
                found[name] = max(_products(dtype, device))
            except RuntimeError:  # this device, or this torch, has no such product
                continue
    finally:
        torch.set_float32_matmul_precision(before)
    source = torch.ones(_COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return {**found, COPY: 2 * _COPIED_BYTES / _fastest(lambda: target.copy_(source), device)}


def _products(dtype: torch.dtype, device: torch.device) -> Iterator[float]:
    """FLOP/s of square products, the size rising until the fastest takes long enough."""
    import torch

    for size in _SIZES:
        a = torch.randn(size, size, device=device).to(dtype)  # ones would draw less power
        seconds = _fastest(functools.partial(torch.mm, a, a, out=torch.empty_like(a)), device)
        yield 2 * size**3 / seconds
        if seconds >= _LEAST_SEC:
            break


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of at least two runs, after one to warm up."""
    import torch

    def timed() -> float:
        began = time.perf_counter()
        run()
        wait()
        return time.perf_counter() - began

    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    run()
    wait()
    until = time.perf_counter() + _SEC_EACH
    best = min(timed(), timed())
    while time.perf_counter() < until:
        best = min(best, timed())
    return best
