"""Whether reported steps and their parts are those of an unprofiled run.

The truth is a clock in the program itself, read around its forward, its backward and its optimizer's arithmetic, and
where a step ends, in trainings without the profiler. Each has a twin with the profiler, which has the same clock, in
the same process, in a new order in every round. A round compares the typical step of the twin's report, the mean of the
middle half by length, with that of as many steps of the other. Differences are reported less true: medians over the
rounds with 95% bootstrap intervals. A second training without the profiler shows how large a difference of nothing is,
and in Lightning a third one, with a callback that does nothing, what the Trainer itself takes to call any.
Target: a step ≤ 2% or 15 µs, a part ≤ 5% or 30 µs.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback, Profile, profile_training
from lightning_flops.analysis.timing import middle_half
from tests.lightning.nets import ROOT, new_trainer

from .advice_parts import perceptron
from .page import described, table
from .ratios import Estimate, Target, difference
from .runner import in_rounds

PHASES = ("forward", "backward", "optimizer")
STEP_SHARE, STEP_SEC = 0.02, 15e-6
PART_SHARE, PART_SEC = 0.05, 30e-6
FIRST_STEPS, TIMED_STEPS = 20, 40


class Size(NamedTuple):
    """A network, and its batch."""

    width: int
    layers: int
    batch: int

    def model(self) -> nn.Module:
        """The network."""
        return perceptron(nn.Tanh, width=self.width, layers=self.layers)


SIZES: Mapping[str, Size] = {
    "0.5 ms": Size(width=32, layers=2, batch=32),
    "2 ms": Size(width=256, layers=4, batch=64),
    "20 ms": Size(width=512, layers=10, batch=256),
}


class Taken(NamedTuple):
    """Seconds of the typical step."""

    step: float
    forward: float
    backward: float
    optimizer: float


# ---- a program with a clock of its own


class Stopwatch:
    """Stamps that cost little, and the seconds between two: events on the stream, on a CPU the host's clock."""

    def __init__(self, *, on_gpu: bool = False) -> None:
        self._on_gpu = on_gpu

    def stamp(self) -> Any:
        """Now, in the order in which the device sees it."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Between two stamps, once the device has come to the later one."""
        return float(start.elapsed_time(end)) / 1e3 if self._on_gpu else float(end - start)


class StampedNet(LightningModule):
    """A model that stamps its parts, and where its steps end."""

    def __init__(self, model: nn.Module, watch: Stopwatch) -> None:
        super().__init__()
        self.model, self.watch = model, watch
        self.stamps: list[tuple[str, Any, Any]] = []  # Of the step that runs: a phase, its begin and its end
        self.steps: list[list[tuple[str, Any, Any]]] = []
        self.ends: list[Any] = []

    @contextmanager
    def stamped(self, phase: str) -> Iterator[None]:
        """Inside, time is that of *phase*."""
        begin = self.watch.stamp()
        yield
        self.stamps.append((phase, begin, self.watch.stamp()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A forward and a loss."""
        with self.stamped("forward"):
            loss: Tensor = self.model(batch).float().square().mean()
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Autograd's."""
        with self.stamped("backward"):
            super().backward(loss, *args, **kwargs)

    def on_train_batch_end(self, *args: Any) -> None:
        """The step is over."""
        self.steps.append(list(self.stamps))
        self.stamps.clear()
        self.ends.append(self.watch.stamp())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW that stamps its arithmetic, and dropping the gradients."""
        stamped = self.stamped

        class StampedAdamW(torch.optim.AdamW):
            def step(self, closure: Any = None) -> Any:
                loss = closure() if closure is not None else None  # forward and backward
                with stamped("optimizer"):
                    super().step()
                return loss

            def zero_grad(self, set_to_none: bool = True) -> None:
                with stamped("optimizer"):
                    super().zero_grad(set_to_none)

        # torch wraps the step of each class that is instantiated; a plain loop's step is the wrapped one of AdamW.
        torch.optim.AdamW(self.parameters())
        StampedAdamW.step.hooked = True  # type: ignore[attr-defined]
        return StampedAdamW(self.parameters(), lr=1e-4, fused=next(self.parameters()).is_cuda)

    def truth(self, first: int, last: int) -> Taken:
        """Seconds of the typical one of these steps; a step goes from its predecessor's end to its own."""
        walls = [self.watch.seconds(*ends) for ends in pairwise(self.ends[first - 1 : last])]
        middle = middle_half(walls)
        steps = [self.steps[first + place] for place in middle]
        parts = [
            [sum(self.watch.seconds(*ends) for name, *ends in step if name == phase) for step in steps]
            for phase in PHASES
        ]
        return Taken(fmean(walls[place] for place in middle), *map(fmean, parts))


Settings = dict[str, Any] | None


def own_loop(net: StampedNet, batches: Any, settings: Settings, *_: Any) -> Sequence[Profile]:
    """A loop of one's own; returns the profiles."""
    optimizer = net.configure_optimizers()
    watched = None if settings is None else profile_training(net.model, optimizer, **settings)
    with nullcontext() if watched is None else watched:
        for rows in DataLoader(batches, batch_size=None):
            loss = net.training_step(rows, 0)
            with net.stamped("backward"):
                loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            net.on_train_batch_end()
    return () if watched is None else watched.profiles


def lightning(net: StampedNet, batches: Any, settings: Settings, *others: Any) -> Sequence[Profile]:
    """A fit of Lightning's, with *others* among its callbacks."""
    callbacks = [] if settings is None else [FlopsProfilerCallback(**settings)]
    with tempfile.TemporaryDirectory() as folder:
        new_trainer(ROOT, folder, *callbacks, *others).fit(net, DataLoader(batches, batch_size=None))
    return callbacks[0].profiles if callbacks else ()


TRAININGS: Mapping[str, Callable[..., Sequence[Profile]]] = {
    "own loop": own_loop,
    "Lightning": lightning,
}


def taken(name: str, size: Size, *others: Any, profiled: bool = False) -> Taken:
    """What the profiler reports of one training, or what the program's own clock says, with *others* as callbacks."""
    torch.manual_seed(0)
    net = StampedNet(size.model(), Stopwatch())
    batches = [torch.randn(size.batch, size.width)] * (FIRST_STEPS + 2 * TIMED_STEPS)
    settings = {"profile_step": FIRST_STEPS, "timing_steps": TIMED_STEPS, "trace": False}
    profiles = TRAININGS[name](net, batches, settings if profiled else None, *others)
    if not profiled:
        return net.truth(FIRST_STEPS + 3, FIRST_STEPS + 3 + TIMED_STEPS)
    return reported_by(profiles[0])


def reported_by(profile: Profile) -> Taken:
    """What *profile* says of the typical step."""
    timing = profile.timing
    assert timing is not None
    parts = {one.name: one.typical_sec for one in timing.parts}
    return Taken(timing.global_step.typical_sec, *(parts[phase] for phase in PHASES))


def section(sizes: Sequence[str], rounds: int) -> list[str]:
    """The section of the page on reported times: of *sizes*, in so many rounds."""
    rows: list[list[object]] = []
    for training in TRAININGS:
        for name in sizes:
            one = partial(taken, training, SIZES[name])
            arms = {arm: partial(one, profiled=arm == "reported") for arm in ("true", "reported", "true again")}
            if training == "Lightning":
                arms["empty callback"] = partial(one, Callback())
            found = in_rounds(arms, rounds)
            if more := found.get("empty callback"):
                over = difference([each.step for each in more], [each.step for each in found["true"]])
                rows.append([training, name, "step, beside an empty callback", None, _in_us(over), None, None, None])
            for index, part in enumerate(Taken._fields):
                true, said, again = ([each[index] for each in found[arm]] for arm in ("true", "reported", "true again"))
                rows.append([training, name, part, *_cells(true, said, again, is_step=part == "step")])
    columns = ["training", "size", "", ">true, ms", ">reported less true, µs", ">relative", ">of nothing, µs", "target"]
    return [*described(__doc__, "torch", "lightning", level="##"), *table(columns, rows), ""]


def _cells(true: Sequence[float], said: Sequence[float], again: Sequence[float], *, is_step: bool) -> list[object]:
    share, least = (STEP_SHARE, STEP_SEC) if is_step else (PART_SHARE, PART_SEC)
    excess, nothing, latency = difference(said, true), difference(again, true), median(true)
    target = Target(limit=round(1e6 * max(share * latency, least), 1), unit="µs")
    low, high = sorted([abs(excess.low), abs(excess.high)])
    size = Estimate(value=1e6 * abs(excess.value), low=1e6 * low, high=1e6 * high)
    of_nothing, relative = _in_us(nothing), f"{excess.value / latency:+.1%}"
    return [f"{1e3 * latency:.3f}", _in_us(excess), relative, of_nothing, target.verdict(size)]


def _in_us(one: Estimate) -> str:
    return f"{1e6 * one.value:+.0f} [{1e6 * one.low:+.0f} to {1e6 * one.high:+.0f}]"
