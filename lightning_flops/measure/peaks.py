"""What a device reaches: the fastest matrix product of each dtype, and a copy."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import torch
from torch.utils.benchmark import Timer

from lightning_flops import host_clock

_SEC_EACH = 0.1  # how long each size is measured, and the copy
_LEAST_SEC = 0.01  # a product that takes less is tried in twice the size: starting it would be a share of its time
_SIZES = (256, 512, 1024, 2048, 4096, 8192)
_COPIED_BYTES = 1 << 26  # more than caches hold


def measure(device: torch.device) -> tuple[dict[str, float], float]:
    """FLOP/s of the fastest product in each dtype on *device*, by the counter's names; and bytes/s of a copy."""
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
    return found, 2 * _COPIED_BYTES / _fastest(lambda: target.copy_(source), device)


def _products(dtype: torch.dtype, device: torch.device) -> Iterator[float]:
    """FLOP/s of square products, the size rising until the fastest takes long enough."""
    for size in _SIZES:
        a = torch.randn(size, size, device=device).to(dtype)  # ones would draw less power
        seconds = _fastest(functools.partial(torch.mm, a, a, out=torch.empty_like(a)), device)
        yield 2 * size**3 / seconds
        if seconds >= _LEAST_SEC:
            break


def _fastest(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of several runs, after some to warm up."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        return host_clock.now()

    timer = Timer("run()", timer=now, globals={"run": run}, num_threads=torch.get_num_threads())
    return float(min(timer.blocked_autorange(min_run_time=_SEC_EACH).times))
