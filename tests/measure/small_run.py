"""A training loop in miniature, whose work and whose clock are the test's, told to a ``Recorder``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.notes import Notes
from lightning_flops.measure.recorder import Recorder
from lightning_flops.measure.timing.clocks import WallClock
from lightning_flops.measure.tracing.step_tracer import StepTracer
from lightning_flops.measure.tracing.trace_cycles import TraceCycles
from lightning_flops.records import (
    FlopPhase,
    FlopRecord,
    OperatorCell,
    PhaseFlops,
    RunContext,
    StepSignature,
    TracedStepRecord,
    WindowRecord,
)
from tests.fake_clock import FakeNow

CONTEXT = RunContext(
    framework="test", framework_version="1", torch_version="2", device_type="cpu", device_name="cpu", precision="32"
)
SHAPES = ((4, 3), (4,))


class FakeCounter(FlopCounter):
    """Counts what the test tells it to, while it is entered and not paused."""

    def __init__(self) -> None:
        self.entered = self.paused = self.optimizers = 0
        self.flops: dict[FlopPhase, int] = {"forward": 0, "backward": 0, "recompute": 0, "optimizer": 0}

    def __enter__(self) -> FakeCounter:
        self.entered += 1
        return self

    def __exit__(self, *exc: object) -> None:
        self.entered -= 1

    def take_data_dependent(self) -> bool:
        return False

    def sweep(self) -> None:
        pass

    @contextmanager
    def pause(self) -> Iterator[None]:
        self.paused += 1
        yield
        self.paused -= 1

    @contextmanager
    def in_root(self) -> Iterator[None]:
        yield

    @contextmanager
    def in_optimizer(self) -> Iterator[None]:
        self.optimizers += 1
        yield
        self.optimizers -= 1

    def spend(self, phase: FlopPhase, flops: int) -> None:
        if self.entered and not self.paused:
            self.flops["optimizer" if self.optimizers else phase] += flops

    def total(self) -> PhaseFlops:
        return PhaseFlops(**self.flops)

    def record(self) -> FlopRecord:
        return FlopRecord(
            cells=tuple(
                OperatorCell(module="", phase=phase, operator="aten.mm", dtype="float32", calls=1, flops=flops)
                for phase, flops in self.flops.items()
            )
        )


class FakeTracer(StepTracer):
    """Records nothing, and says of which steps it would have."""

    def __init__(self) -> None:
        self.lost = None
        self.first: int | None = None

    def warm_up(self) -> None:
        pass

    def start(self, index: int) -> None:
        self.first = index if self.first is None else self.first

    def enter(self, part: str) -> None:
        pass

    def leave(self) -> None:
        pass

    def stop(self, *signatures: StepSignature) -> TracedStepRecord:
        assert self.first is not None
        index, self.first = self.first, None
        return TracedStepRecord(index=index, signatures=signatures, process=1, path="")

    def give_up(self) -> None:
        pass


class Run:
    """A training loop in miniature: each batch waits 1 s, runs forward 2 s, backward 4 s, and the optimizer 8 s."""

    def __init__(
        self,
        *,
        profile_step: int = 1,
        timing_steps: int = 3,
        settle_steps: int = 2,
        clock: bool = True,
        tracing: TraceCycles | None = None,
    ) -> None:
        self.now = FakeNow()
        self.profile_step = profile_step
        self.steps_done = 0
        self.counter = FakeCounter()
        self.notes = Notes()
        self.states: list[str] = []
        self.recorder = Recorder(
            nn.Linear(3, 2),
            timing_steps=timing_steps,
            settle_steps=settle_steps,
            clock=WallClock(self.now) if clock else None,
            new_counter=lambda root: self.counter,
            notes=self.notes,
            tracing=tracing,
        )
        self.open_if_due()

    def open_if_due(self) -> None:
        if self.steps_done == self.profile_step:
            self.recorder.open(steps_done=self.steps_done)

    def part(self, name: str, seconds: float, phase: FlopPhase | None = None, flops: int = 0) -> None:
        marking = self.recorder.marking
        if marking:
            self.recorder.enter(name)
        self.now.sleep(seconds)
        if phase is not None:
            self.counter.spend(phase, flops)
        if marking:
            self.recorder.leave()

    def batch(
        self, *, shapes: Any = SHAPES, samples: int | None = 4, ends_step: bool = True, slow: float = 0.0
    ) -> None:
        self.states.append(self.recorder.state.value)
        with self.recorder.batch_scope():
            self.part("data_wait", 1.0, "forward", 10**9)  # what a loader computes is not the model's work
            self.part("forward", 2.0 + slow, "forward", 100)
            self.part("backward", 4.0, "backward", 200)
            if ends_step:
                self.part("optimizer", 8.0, "optimizer", 7)
            self.recorder.end_batch(shapes=shapes, samples=samples, tokens=None, ends_step=ends_step)
        self.steps_done += ends_step
        self.open_if_due()

    def close(self) -> WindowRecord:
        window = self.recorder.close(context=CONTEXT)
        assert window is not None
        return window
