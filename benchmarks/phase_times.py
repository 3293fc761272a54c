"""Whether reported forward, backward and optimizer latencies are those of an unprofiled run.

The truth is a clock in the model itself, read around its forward, its backward and its optimizer's arithmetic in steps
without marks. Steps come in groups of three in random order inside one fit on one thread: one with marks, whose
latencies the profiler reports, and two without. A pair is the marked step's report beside one plain step's truth; the
two plain steps beside each other (A/A) show how large a difference of nothing is. Differences are reported less plain:
medians over pairs with 95% bootstrap intervals. Target: ≤ 2% or ≤ 60 µs.
Reported parts are the Trainer's own actions, so that ``zero_grad`` and what Lightning does around each are in them, and
not in the model's clock: a fixed cost of a step, which is why the optimizer misses the target.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from lightning_flops.measure.recorder import Recorder
from lightning_flops.records import WindowRecord
from lightning_flops.run import delivery as run_delivery
from lightning_flops.run import window as run_window
from tests.lightning.nets import ROOT, new_trainer

from .advice_parts import perceptron
from .advice_programs import encoder
from .page import described, table
from .ratios import Estimate, Target, difference

PHASES = ("forward", "backward", "optimizer")
RELATIVE_LIMIT = 0.02
ABSOLUTE_LIMIT_SEC = 60e-6
FIRST_STEPS = 10

Phases = tuple[float, float, float]  # Seconds of forward, backward and optimizer


MODELS: Mapping[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "large": (lambda: encoder(256, 1024), (4, 128, 256), 200),
    "medium": (lambda: perceptron(nn.Tanh, width=256, layers=6), (64, 256), 400),
    "tiny": (lambda: perceptron(nn.Tanh, width=16, layers=2), (8, 16), 600),
}
"""Each model, the shape of its batches, and how many pairs are taken."""


class Pairs(NamedTuple):
    """What a tool reported beside the truth, and the truth beside itself."""

    reported: Sequence[Phases]
    plain: Sequence[Phases]
    plain_again: Sequence[Phases]

    def excess(self, phase: int, *, plain: bool = False) -> Any:
        """Seconds that are reported more than they took: median over pairs and its interval; *plain*: of nothing."""
        ones = self.plain_again if plain else self.reported
        return difference([one[phase] for one in ones], [one[phase] for one in self.plain])


def plan(groups: int) -> list[bool]:
    """For each step whether it is marked: one of every three, in random order."""
    generator = random.Random(0)
    return [marked for _ in range(groups) for marked in generator.sample([True, False, False], k=3)]


def paired(planned: Sequence[bool], *, reported: dict[int, Phases], truth: Sequence[Phases]) -> Pairs:
    """Groups of three steps as pairs; a group whose marked step was not reported is left out."""
    pairs = list[tuple[Phases, Phases, Phases]]()
    generator = random.Random(1)  # which of the two plain steps is beside the marked one: not always the earlier
    for group in range(0, len(planned) - 2, 3):
        marked = next(step for step in range(group, group + 3) if planned[step])
        plain = generator.sample([step for step in range(group, group + 3) if not planned[step]], k=2)
        if marked in reported and max(plain) < len(truth):
            pairs.append((reported[marked], truth[plain[0]], truth[plain[1]]))
    return Pairs(*zip(*pairs, strict=True))


# ---- a model with a clock of its own


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

    def truth(self) -> tuple[list[Phases], list[float]]:
        """Seconds of the parts of each step, and from its predecessor's end to its own."""
        seconds = self.watch.seconds
        steps = [[(phase, seconds(*ends)) for phase, *ends in step] for step in self.steps]
        phases = [[sum(time for name, time in step if name == phase) for phase in PHASES] for step in steps]
        return [(one[0], one[1], one[2]) for one in phases], [0.0, *(seconds(*ends) for ends in pairwise(self.ends))]


class _RandomlyMarked(Recorder):
    """A recorder that has only the planned ones of its timed steps marked, and watches no other."""

    planned: Sequence[bool] = ()
    steps = 0  # That could be timed

    @property
    def marking(self) -> bool:
        if self.timer is not None:
            return self.planned[min(self.steps, len(self.planned) - 1)]
        return super().marking

    def end_batch(self, *, ends_step: bool, **batch: Any) -> None:
        timed, marked = self.timer is not None and ends_step, self.marking
        super().end_batch(ends_step=ends_step, **batch)
        self.steps += timed
        if timed and not marked and self._measured is not None:
            self._measured.watched.pop()


@contextmanager
def recorders(planned: Sequence[bool]) -> Iterator[list[WindowRecord]]:
    """Inside, windows are marked by plan, and kept."""
    windows: list[WindowRecord] = []
    delivery: Any = run_delivery
    build_profile = delivery.build_profile

    def keep(window: WindowRecord, **kwargs: Any) -> Any:
        windows.append(window)
        return build_profile(window, **kwargs)

    recorder = type("Planned", (_RandomlyMarked,), {"planned": planned})
    with patch.object(run_window, "Recorder", recorder), patch.object(run_delivery, "build_profile", keep):
        yield windows


def measured(net: StampedNet, planned: Sequence[bool], window: WindowRecord) -> tuple[Pairs, int, list[float]]:
    """Pairs of *window*, the first step that could be timed, and the seconds of reported whole steps."""
    first = window.counted_steps[0].index + 1 + window.settle_steps
    timed = {step.index - first: step.seconds for step in window.timed_steps if step.seconds is not None}
    phases = {index: (one.forward, one.backward, one.optimizer) for index, one in timed.items()}
    pairs = paired(planned, reported=phases, truth=net.truth()[0][first:])
    return pairs, first, [one.total for one in timed.values()]


def section(models: Sequence[str], groups: int) -> list[str]:
    """The section of the page on reported latencies: of *models*, by so many pairs, or as many as each model has."""
    rows: list[list[object]] = []
    for name in models:
        make, shape, number = MODELS[name]
        pairs = _of_one_fit(make(), shape, groups or number)
        rows += [[name, "lightning_flops", *_cells(pairs, phase)] for phase in PHASES]
        rows += [[name, "A/A: plain beside plain", *_cells(pairs, phase, plain=True)] for phase in PHASES]
    columns = ["model", "whose", ">pairs", "phase", ">plain, ms", ">difference, µs", ">relative", "target"]
    return [*described(__doc__, "torch", "lightning", level="##"), *table(columns, rows), ""]


def _of_one_fit(model: nn.Module, shape: Sequence[int], number: int) -> Pairs:
    torch.manual_seed(0)
    net, planned = StampedNet(model, Stopwatch()), plan(number)
    batches: Any = [torch.randn(*shape)] * (FIRST_STEPS + 10 + len(planned))
    callback = FlopsProfilerCallback(profile_step=FIRST_STEPS, timing_steps=number, trace=False, monitor=False)
    with tempfile.TemporaryDirectory() as folder, recorders(planned) as windows:
        new_trainer(ROOT, folder, callback).fit(net, DataLoader(batches, batch_size=None))
    return measured(net, planned, *windows)[0]


def _cells(pairs: Pairs, phase: str, *, plain: bool = False) -> list[object]:
    index = PHASES.index(phase)
    latency, excess = median(phases[index] for phases in pairs.plain), pairs.excess(index, plain=plain)
    target = Target(limit=1e6 * max(RELATIVE_LIMIT * latency, ABSOLUTE_LIMIT_SEC), unit="µs")
    low, high = sorted([abs(excess.low), abs(excess.high)])
    size = Estimate(value=1e6 * abs(excess.value), low=1e6 * low, high=1e6 * high)
    interval = f"{1e6 * excess.value:+.0f} [{1e6 * excess.low:+.0f} to {1e6 * excess.high:+.0f}]"
    cells = [len(pairs.plain), phase, f"{1e3 * latency:.3f}", interval, f"{excess.value / latency:+.1%}"]
    return [*cells, None if plain else target.verdict(size)]
