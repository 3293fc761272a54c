"""Part 2: reported latencies are those of the same steps without marks, by events of the model's own.

As in ``phase_times``, steps come in groups of three in random order inside one fit: one with marks, whose latencies the
profiler reports, and two without, in which the model stamps its own parts. A pair is the one beside the other.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ..phase_times import (
    ABSOLUTE_LIMIT_SEC,
    PHASES,
    RELATIVE_LIMIT,
    Pairs,
    Phases,
    differences,
    paired,
    plan,
    recorders,
)
from .here import Check, Here
from .judge import at_most, holds, told, unjudged, within
from .results import Row
from .runs import SETTLES, Fit, Net, fit, forget, layers, profiler

_WARM_UP_STEPS = 10


class Stopwatch:
    """Stamps that cost little, and the seconds between two of them: events on the stream, on a CPU the host's clock."""

    def __init__(self, here: Here) -> None:
        """Takes the device's way."""
        self._here = here

    def stamp(self) -> Any:
        """Now, in the order in which the device sees it."""
        if not self._here.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two stamps, once the device has come to the later one."""
        if not self._here.on_gpu:
            return float(end - start)
        return float(start.elapsed_time(end)) / 1e3


class StampedOptimizer(torch.optim.AdamW):
    """AdamW that stamps its arithmetic, and dropping the gradients."""

    watch: Stopwatch
    stamps: list[tuple[Any, Any]]

    def step(self, closure: Any = None) -> Any:
        """The closure, which is forward and backward, and then the arithmetic."""
        loss = closure() if closure is not None else None
        begin = self.watch.stamp()
        super().step()
        self.stamps.append((begin, self.watch.stamp()))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        begin = self.watch.stamp()
        super().zero_grad(set_to_none)
        self.stamps.append((begin, self.watch.stamp()))


class StampedNet(Net):
    """Stamps its forward and its backward, and where its steps end."""

    def __init__(self, model: nn.Module, watch: Stopwatch) -> None:
        """Keeps *watch*."""
        super().__init__(model)
        self.watch = watch
        self.steps: list[tuple[tuple[Any, Any], tuple[Any, Any], list[tuple[Any, Any]]]] = []
        self.ends: list[Any] = []
        self._forward: tuple[Any, Any] = (None, None)
        self._backward: tuple[Any, Any] = (None, None)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A forward and a loss."""
        begin = self.watch.stamp()
        loss: Tensor = self.model(batch).float().square().mean()
        self._forward = (begin, self.watch.stamp())
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Autograd's."""
        begin = self.watch.stamp()
        super().backward(loss, *args, **kwargs)
        self._backward = (begin, self.watch.stamp())

    def on_train_batch_end(self, *args: Any) -> None:
        """The step is over."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.steps.append((self._forward, self._backward, list(optimizer.stamps)))
        optimizer.stamps.clear()
        self.ends.append(self.watch.stamp())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        # torch wraps the step of each class that is instantiated; a plain loop's step is the wrapped one of AdamW.
        torch.optim.AdamW(self.parameters())
        StampedOptimizer.step.hooked = True  # type: ignore[attr-defined]
        optimizer = StampedOptimizer(self.parameters(), lr=1e-4, fused=next(self.parameters()).is_cuda)
        optimizer.watch, optimizer.stamps = self.watch, []
        return optimizer

    def truth(self) -> tuple[list[Phases], list[float]]:
        """Seconds of the parts of each step, and from its predecessor's end to its own."""
        seconds = self.watch.seconds
        phases = [
            (seconds(*forward), seconds(*backward), sum(seconds(*one) for one in optimizer))
            for forward, backward, optimizer in self.steps
        ]
        walls = [0.0, *(seconds(before, after) for before, after in zip(self.ends, self.ends[1:], strict=False))]
        return phases, walls


@dataclass(frozen=True, slots=True, kw_only=True)
class _Size:
    name: str
    width: int
    layers: int
    batch: int
    pairs: int


_SIZES = (
    _Size(name="1 ms", width=1024, layers=4, batch=2048, pairs=150),
    _Size(name="20 ms", width=4096, layers=14, batch=8192, pairs=60),
    _Size(name="200 ms", width=4096, layers=34, batch=32768, pairs=14),
)
_SMALL_SIZES = (_Size(name="small", width=64, layers=2, batch=32, pairs=6),)


def _latencies(here: Here) -> Iterator[Row]:
    """Forward, backward, optimizer, and the whole step."""
    for size in _SMALL_SIZES if here.small else _SIZES:
        phases, steps = _measured(here, size)
        yield from unjudged([*_compared(size, phases), *_whole_steps(size, steps)], where=here.small)
        forget(here)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Steps:
    """Seconds of whole steps."""

    reported: list[float]
    """The sum of the parts of each marked one."""
    plain: list[float]
    """From end to end, of those behind another plain one: before them nothing was taken off the training loop."""


def _measured(here: Here, size: _Size) -> tuple[Pairs, _Steps]:
    """Pairs of the parts of a step, and whole steps."""
    torch.manual_seed(0)
    planned = plan(size.pairs)
    net = StampedNet(layers(here, size.width, size.layers), Stopwatch(here))
    dtype = torch.bfloat16 if here.on_gpu else torch.float32
    batch = torch.randn(size.batch, size.width, device=here.device, dtype=dtype)
    batches = [batch] * (_WARM_UP_STEPS + 1 + SETTLES + len(planned) + 1)
    callback = profiler(here, profile_step=_WARM_UP_STEPS, timing_steps=size.pairs)
    with recorders(planned, None) as windows:
        fit(here, net, batches, callback, precision="bf16-true" if here.on_gpu else "32-true")
    (window,) = windows
    first = window.counted_steps[0].index + 1 + window.settle_steps
    timed = {step.index - first: step.seconds for step in window.timed_steps if step.seconds is not None}
    truth, walls = net.truth()
    phases = paired(
        planned,
        reported={index: (one.forward, one.backward, one.optimizer) for index, one in timed.items()},
        truth=truth[first:],
    )
    behind_plain = [index for index in range(1, len(planned)) if not planned[index] and not planned[index - 1]]
    walls = [walls[first + index] for index in behind_plain if first + index < len(walls)]
    return phases, _Steps(reported=[seconds.total for seconds in timed.values()], plain=walls)


def _whole_steps(size: _Size, steps: _Steps) -> Iterator[Row]:
    claim = f"{size.name}: the whole step, the sum of its parts beside plain steps from end to end"
    yield _as_close(claim, median(steps.reported), median(steps.plain))
    halves = median(steps.plain[::2]) - median(steps.plain[1::2])
    yield told(f"{size.name}: the whole step, every other plain one beside the rest", f"{1e6 * halves:+.0f} µs")


def _compared(size: _Size, pairs: Pairs) -> Iterator[Row]:
    for index, name in enumerate(PHASES):
        plain = median(one[index] for one in pairs.plain)
        excess = differences(pairs.reported, pairs.plain, index).value
        noise = differences(pairs.plain_again, pairs.plain, index).value
        claim = f"{size.name}: {name}, as reported beside steps without marks, {len(pairs.plain)} pairs"
        yield _as_close(claim, plain + excess, plain)
        yield told(f"{size.name}: {name}, plain steps beside plain ones", f"{1e6 * noise:+.0f} µs")


def _as_close(claim: str, seen: float, truth: float) -> Row:
    least = ABSOLUTE_LIMIT_SEC
    return within(claim, seen, truth, share=RELATIVE_LIMIT, least=least, unit="ms", scale=1e3)


# ---- waiting for data


class _Slow(Dataset[Tensor]):
    """Rows of which each takes the host so long to make."""

    def __init__(self, row: Tensor, *, number: int, seconds: float) -> None:
        """Keeps them."""
        self.row, self.number, self.seconds = row, number, seconds

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return self.row


def _data_wait(here: Here) -> Iterator[Row]:
    """A loader that is slower than the device is waited for; one that is faster is hidden behind it, on a GPU."""
    size = _SMALL_SIZES[0] if here.small else _SIZES[1]
    step_sec = _slow_fit(here, size, 0.0).profile.timing
    assert step_sec is not None
    device_sec = step_sec.global_step_sec
    for name, reader_sec in (("slow", 3 * device_sec + 0.01), ("fast", device_sec / 4)):
        timing = _slow_fit(here, size, reader_sec).profile.timing
        assert timing is not None
        yield from unjudged(
            [
                within(
                    f"{name} loader: the host's seconds in it",
                    timing.reader_sec,
                    reader_sec,
                    share=0.05,
                    least=500e-6,  # a sleep is never shorter, and often a little longer
                    unit="ms",
                    scale=1e3,
                )
            ],
            where=here.small,
        )
        exposed = timing.data_wait_sec
        if name == "slow":
            # What of the wait the device does not work through: all but the step that still runs when it begins.
            yield from unjudged(
                [
                    holds(
                        "slow loader: the exposed wait lies between its time less a step, and its time",
                        exposed is not None and reader_sec - 1.1 * device_sec <= exposed <= 1.05 * reader_sec + 1e-3,
                        f"{_ms(exposed)} of {_ms(reader_sec)} ms, beside a step of {_ms(device_sec)} ms",
                    )
                ],
                where=here.small,
            )
        elif here.on_gpu:
            yield at_most(
                "fast loader: of its wait, what is exposed",
                exposed,
                max(0.1 * reader_sec, ABSOLUTE_LIMIT_SEC),
                unit="ms",
                scale=1e3,
            )


def _slow_fit(here: Here, size: _Size, reader_sec: float) -> Fit:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if here.on_gpu else torch.float32
    row = torch.randn(size.batch, size.width, device=here.device, dtype=dtype)
    steps = 3 + 1 + SETTLES + here.pick(20, 4) + 1
    loader: Any = DataLoader(_Slow(row, number=steps, seconds=reader_sec), batch_size=None)
    callback = profiler(here, timing_steps=here.pick(20, 4))
    precision = "bf16-true" if here.on_gpu else "32-true"
    done = fit(here, Net(layers(here, size.width, size.layers)), (), callback, loader=loader, precision=precision)
    forget(here)
    return done


def _ms(seconds: float | None) -> str:
    return "n/a" if seconds is None else f"{1e3 * seconds:.2f}"


CHECKS = (
    Check(claim="latencies beside steps without marks", look=_latencies),
    Check(claim="waiting for data", look=_data_wait),
)
