"""Whether reported forward, backward and optimizer latencies are those of an unprofiled run.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.phase_times`` runs it alone.

The truth is a clock in the model itself, read around its forward, its backward and its optimizer's arithmetic in steps
without marks. Steps come in groups of three in random order inside one fit on one thread: one with marks, whose
latencies the profiler reports, and two without. A pair is the marked step's report beside one plain step's truth; the
two plain steps beside each other (A/A) show how large a difference of nothing is. Differences are reported less plain:
medians over pairs with 95% bootstrap intervals. Target: ≤ 2% or ≤ 60 µs.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from lightning_flops.measure.recorder import Recorder
from lightning_flops.records import WindowRecord
from lightning_flops.run import results as run_results
from lightning_flops.run import window as run_window

from .machine import RESULTS
from .page import described, met, table, write_section
from .ratios import difference
from .runner import start
from .workloads import encoder, quiet_trainer, sized

PHASES = ("forward", "backward", "optimizer")
RELATIVE_LIMIT = 0.02
ABSOLUTE_LIMIT_SEC = 60e-6
FIRST_STEPS = 10

Phases = tuple[float, float, float]  # Seconds of forward, backward and optimizer


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    make: Callable[[], nn.Module]
    batch: tuple[int, ...]
    pairs: int


MODELS: Mapping[str, _Model] = {
    "large": _Model(make=lambda: encoder(256, 2), batch=(4, 128, 256), pairs=200),
    "medium": _Model(make=lambda: sized(*[256] * 7), batch=(64, 256), pairs=400),
    "tiny": _Model(make=lambda: sized(16, 16, 16), batch=(8, 16), pairs=600),
}


@dataclass(slots=True, kw_only=True)
class Pairs:
    """What a tool reported beside the truth, and the truth beside itself."""

    reported: list[Phases] = field(default_factory=list)
    plain: list[Phases] = field(default_factory=list)
    plain_again: list[Phases] = field(default_factory=list)

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
    pairs = Pairs()
    generator = random.Random(1)  # which of the two plain steps is beside the marked one: not always the earlier
    for group in range(0, len(planned) - 2, 3):
        marked = next(step for step in range(group, group + 3) if planned[step])
        plain = generator.sample([step for step in range(group, group + 3) if not planned[step]], k=2)
        if marked in reported and max(plain) < len(truth):
            pairs.reported.append(reported[marked])
            pairs.plain.append(truth[plain[0]])
            pairs.plain_again.append(truth[plain[1]])
    return pairs


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


class _StampedAdamW(torch.optim.AdamW):
    """AdamW that stamps its arithmetic, and dropping the gradients."""

    watch: Stopwatch
    stamps: list[tuple[Any, Any]]

    def step(self, closure: Any = None) -> Any:
        loss = closure() if closure is not None else None  # forward and backward
        begin = self.watch.stamp()
        super().step()
        self.stamps.append((begin, self.watch.stamp()))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        begin = self.watch.stamp()
        super().zero_grad(set_to_none)
        self.stamps.append((begin, self.watch.stamp()))


class StampedNet(LightningModule):
    """A model that stamps its parts, and where its steps end."""

    def __init__(self, model: nn.Module, watch: Stopwatch) -> None:
        super().__init__()
        self.model = model
        self.watch = watch
        self.steps: list[list[list[tuple[Any, Any]]]] = []
        self.ends: list[Any] = []
        self._stamps: list[list[tuple[Any, Any]]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A forward and a loss."""
        begin = self.watch.stamp()
        loss: Tensor = self.model(batch).float().square().mean()
        self._stamps = [[(begin, self.watch.stamp())]]
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Autograd's."""
        begin = self.watch.stamp()
        super().backward(loss, *args, **kwargs)
        self._stamps.append([(begin, self.watch.stamp())])

    def on_train_batch_end(self, *args: Any) -> None:
        """The step is over."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.steps.append([*self._stamps, list(optimizer.stamps)])
        optimizer.stamps.clear()
        self.ends.append(self.watch.stamp())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        # torch wraps the step of each class that is instantiated; a plain loop's step is the wrapped one of AdamW.
        torch.optim.AdamW(self.parameters())
        _StampedAdamW.step.hooked = True  # type: ignore[attr-defined]
        optimizer = _StampedAdamW(self.parameters(), lr=1e-4, fused=next(self.parameters()).is_cuda)
        optimizer.watch, optimizer.stamps = self.watch, []
        return optimizer

    def truth(self) -> tuple[list[Phases], list[float]]:
        """Seconds of the parts of each step, and from its predecessor's end to its own."""
        seconds = self.watch.seconds
        parts = [[sum(seconds(*stamps) for stamps in part) for part in step] for step in self.steps]
        phases = [(forward, backward, optimizer) for forward, backward, optimizer in parts]
        return phases, [0.0, *(seconds(*ends) for ends in pairwise(self.ends))]


class _RandomlyMarked(Recorder):
    """A recorder that has only the planned ones of its timed steps marked."""

    planned: Sequence[bool] = ()
    watched = 0

    @property
    def marking(self) -> bool:
        if self.timer is not None:
            return self.planned[min(self.watched, len(self.planned) - 1)]
        return super().marking

    def end_batch(self, *, ends_step: bool, **batch: Any) -> None:
        timed = self.timer is not None
        super().end_batch(ends_step=ends_step, **batch)
        self.watched += timed and ends_step


@contextmanager
def recorders(planned: Sequence[bool]) -> Iterator[list[WindowRecord]]:
    """Inside, windows are marked by plan, and kept."""
    windows: list[WindowRecord] = []
    results: Any = run_results
    build_profile = results.build_profile

    def keep(window: WindowRecord, **kwargs: Any) -> Any:
        windows.append(window)
        return build_profile(window, **kwargs)

    recorder = type("Planned", (_RandomlyMarked,), {"planned": planned})
    with patch.object(run_window, "Recorder", recorder), patch.object(run_results, "build_profile", keep):
        yield windows


def reported_in(window: WindowRecord) -> tuple[int, dict[int, Any]]:
    """The first step that may be timed, and the seconds that were reported, by steps from there on."""
    first = window.counted_steps[0].index + 1 + window.settle_steps
    timed = {step.index - first: step.seconds for step in window.timed_steps if step.seconds is not None}
    return first, timed


def phases_of(timed: dict[int, Any]) -> dict[int, Phases]:
    """The seconds of each phase that were reported."""
    return {index: (one.forward, one.backward, one.optimizer) for index, one in timed.items()}


def ours(model: _Model) -> Pairs:
    """One fit of *model* under this project's profiler."""
    torch.manual_seed(0)
    net, planned = StampedNet(model.make(), Stopwatch()), plan(model.pairs)
    batches: Any = [torch.randn(*model.batch)] * (FIRST_STEPS + 10 + len(planned))
    callback = FlopsProfilerCallback(profile_step=FIRST_STEPS, timing_steps=model.pairs, trace=False, monitor=False)
    with tempfile.TemporaryDirectory() as folder, recorders(planned) as windows:
        quiet_trainer(folder, callback).fit(net, DataLoader(batches, batch_size=None))
    first, timed = reported_in(*windows)
    return paired(planned, reported=phases_of(timed), truth=net.truth()[0][first:])


# ---- the report


def _rows(model: str, who: str, pairs: Pairs, *, plain: bool = False) -> Iterator[list[object]]:
    for index, phase in enumerate(PHASES):
        latency, excess = median(phases[index] for phases in pairs.plain), pairs.excess(index, plain=plain)
        limit = max(RELATIVE_LIMIT * latency, ABSOLUTE_LIMIT_SEC)
        low, high = sorted([abs(excess.low), abs(excess.high)])
        inside = ", the limit is inside the interval" if low <= limit < high else ""
        verdict = f"≤ {1e6 * limit:.0f} µs: {met(abs(excess.value) <= limit)}{inside}"
        interval = f"{1e6 * excess.value:+.0f} [{1e6 * excess.low:+.0f} to {1e6 * excess.high:+.0f}]"
        relative = f"{excess.value / latency:+.1%}"
        yield [
            model,
            who,
            len(pairs.plain),
            phase,
            f"{1e3 * latency:.3f}",
            interval,
            relative,
            None if plain else verdict,
        ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    options = start(__file__, __doc__, RESULTS / "time.md", arguments, models=list(MODELS))
    rows: list[list[object]] = []
    for name in options.models:
        pairs = ours(MODELS[name])
        rows += _rows(name, "lightning_flops", pairs)
        rows += _rows(name, "A/A: plain beside plain", pairs, plain=True)
    columns = ["model", "whose", ">pairs", "phase", ">plain, ms", ">difference, µs", ">relative", "target"]
    lines = [*described(__doc__, "torch", "lightning", level="##"), *table(columns, rows)]
    write_section(options.output, "phase_times", lines)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
