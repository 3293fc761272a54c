"""Part 2: reported latencies are those of the same steps without marks, by events of the model's own.

As in ``phase_times``, steps come in groups of three in random order inside one fit: one with marks, whose latencies the
profiler reports, and two without, in which the model stamps its own parts. A pair is the one beside the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from .. import phase_times
from ..phase_times import ABSOLUTE_LIMIT_SEC, PHASES, RELATIVE_LIMIT, StampedNet, Stopwatch
from .checks import Check, Here, Row, reported, unjudged, within
from .nets import SETTLES, fit, forget, layers, profiler

_WARM_UP_STEPS = 10


@dataclass(frozen=True, slots=True)
class _Size:
    name: str
    width: int
    layers: int
    batch: int
    pairs: int


_SIZES = (
    _Size("1 ms", width=1024, layers=4, batch=2048, pairs=150),
    _Size("20 ms", width=4096, layers=14, batch=8192, pairs=60),
    _Size("200 ms", width=4096, layers=34, batch=32768, pairs=14),
)
_SMALL = _Size("small", width=64, layers=2, batch=32, pairs=6)
_as_close = partial(within, share=RELATIVE_LIMIT, least=ABSOLUTE_LIMIT_SEC, unit="ms", scale=1e3)


def _latencies(here: Here) -> Iterator[Row]:
    """Forward, backward, optimizer, and the whole step."""
    for size in (_SMALL,) if here.small else _SIZES:
        yield from unjudged(here, *_measured(here, size))
        forget(here)


def _measured(here: Here, size: _Size) -> Iterator[Row]:
    torch.manual_seed(0)
    planned = phase_times.plan(size.pairs)
    net = StampedNet(layers(here, size.width, size.layers), Stopwatch(on_gpu=here.on_gpu))
    dtype = torch.bfloat16 if here.on_gpu else torch.float32
    batch = torch.randn(size.batch, size.width, device=here.device, dtype=dtype)
    batches = [batch] * (_WARM_UP_STEPS + 1 + SETTLES + len(planned) + 1)
    callback = profiler(here, profile_step=_WARM_UP_STEPS, timing_steps=size.pairs)
    with phase_times.recorders(planned) as windows:
        fit(here, net, batches, callback, precision="bf16-true" if here.on_gpu else "32-true")
    pairs, first, totals = phase_times.measured(net, planned, *windows)
    walls = net.truth()[1]
    for index, name in enumerate(PHASES):
        plain = median(one[index] for one in pairs.plain)
        claim = f"{size.name}: {name}, as reported beside steps without marks, {len(pairs.plain)} pairs"
        yield _as_close(claim, plain + pairs.excess(index).value, plain)
        noise = pairs.excess(index, plain=True).value
        yield reported(f"{size.name}: {name}, plain steps beside plain ones", f"{1e6 * noise:+.0f} µs")
    # From end to end, of those behind another plain one: before them nothing was taken off the training loop.
    behind_plain = [index for index in range(1, len(planned)) if not planned[index] and not planned[index - 1]]
    walls = [walls[first + index] for index in behind_plain if first + index < len(walls)]
    claim = f"{size.name}: the whole step, the sum of its parts beside plain steps from end to end"
    yield _as_close(claim, median(totals), median(walls))
    halves = median(walls[::2]) - median(walls[1::2])
    yield reported(f"{size.name}: the whole step, every other plain one beside the rest", f"{1e6 * halves:+.0f} µs")


CHECKS = (Check("latencies beside steps without marks", _latencies),)
