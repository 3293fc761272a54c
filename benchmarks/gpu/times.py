"""Part 2: a reported step and its parts are those of an unprofiled fit, by events of the model's own.

As in ``phase_times``, fits with the profiler and without take turns. A step of 4 ms in some hundred small kernels is
bound by the host: whatever the profiler does there lengthens it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from ..phase_times import PART_SEC, PART_SHARE, STEP_SEC, StampedNet, Stopwatch, Taken, reported_by
from .checks import Check, Here, Row, reported, unjudged, within
from .nets import SETTLES, fit, forget, layers, profiler

_WARM_UP_STEPS = 10
_OF_STEP = 0.03


@dataclass(frozen=True, slots=True)
class _Size:
    name: str
    width: int
    layers: int
    batch: int
    steps: int
    rounds: int


_SIZES = (
    _Size("4 ms, bound by the host", width=512, layers=40, batch=64, steps=80, rounds=7),
    _Size("20 ms", width=4096, layers=14, batch=8192, steps=40, rounds=3),
    _Size("200 ms", width=4096, layers=34, batch=32768, steps=16, rounds=1),
)
_SMALL = _Size("small", width=64, layers=2, batch=32, steps=16, rounds=1)
_in_ms = partial(within, unit="ms", scale=1e3)


def _latencies(here: Here) -> Iterator[Row]:
    """Forward, backward, optimizer, and the whole step."""
    for size in (_SMALL,) if here.small else _SIZES:
        yield from unjudged(here, *_measured(here, size))
        forget(here)


def _fit(here: Here, size: _Size, *, profiled: bool) -> Taken:
    torch.manual_seed(0)
    net = StampedNet(layers(here, size.width, size.layers), Stopwatch(on_gpu=here.on_gpu))
    dtype = torch.bfloat16 if here.on_gpu else torch.float32
    batch = torch.randn(size.batch, size.width, device=here.device, dtype=dtype)
    first = _WARM_UP_STEPS + 1 + SETTLES
    callback = profiler(here, profile_step=_WARM_UP_STEPS, timing_steps=size.steps) if profiled else None
    done = fit(
        here, net, [batch] * (first + 2 * size.steps), callback, precision="bf16-true" if here.on_gpu else "32-true"
    )
    return reported_by(done.profile) if profiled else net.truth(first, first + size.steps)


def _measured(here: Here, size: _Size) -> Iterator[Row]:
    true, said, again = list[Taken](), list[Taken](), list[Taken]()
    for _ in range(size.rounds):
        for found, profiled in ((true, False), (said, True), (again, False)):
            found.append(_fit(here, size, profiled=profiled))
    for index, part in enumerate(Taken._fields):
        plain, ours, same = (median(one[index] for one in found) for found in (true, said, again))
        share, least = (_OF_STEP, STEP_SEC) if part == "step" else (PART_SHARE, PART_SEC)
        claim = f"{size.name}: {part}, as reported beside {size.rounds} unprofiled fits"
        yield _in_ms(claim, ours, plain, share=share, least=least)
        yield reported(f"{size.name}: {part}, unprofiled fits beside others", f"{1e6 * (same - plain):+.0f} µs")


CHECKS = (Check("latencies beside an unprofiled fit", _latencies),)
