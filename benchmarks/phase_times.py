"""Whether reported forward, backward and optimizer latencies are those of a run that nobody profiles.

``make bench-time`` runs this with the other benchmarks of time; ``python -m benchmarks.phase_times`` runs it alone.

The truth is a clock in the model itself, read around its forward, its backward and its optimizer's arithmetic in steps
without marks. Steps come in groups of three in random order inside one fit: one with marks, whose latencies the
profiler reports, and two without. A pair is the marked step's report beside one plain step's truth; the two plain steps
beside each other (A/A) tell what a difference of nothing looks like. DeepSpeed's profiler, driven by its own engine on
the same models, reports its profiled steps beside plain steps of the same engine.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from lightning_flops.instrument.recorder import Recorder
from lightning_flops.instrument.timing.clocks import WallClock
from lightning_flops.records import WindowRecord
from lightning_flops.run import results as run_results
from lightning_flops.run import window as run_window

from .machine import restart_in_one_thread_environment
from .ratios import Estimate, median_with_interval
from .time_report import RESULT, write_section

logger = logging.getLogger("benchmarks.phase_times")

MODULE = "benchmarks.phase_times"
PHASES = ("forward", "backward", "optimizer")
RELATIVE_LIMIT = 0.02
ABSOLUTE_LIMIT_SEC = 60e-6
FIRST_STEPS = 10
OURS, NOTHING, DEEPSPEED = "lightning_flops", "A/A: plain beside plain", "DeepSpeed's profiler"

Phases = tuple[float, float, float]
"""Seconds of forward, backward and optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained."""

    name: str
    make: Callable[[], nn.Module]
    batch: tuple[int, ...]
    pairs: int
    deepspeed_pairs: int


def encoder() -> nn.Module:
    """Two layers of a transformer's encoder."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def layers(width: int, number: int) -> nn.Module:
    """Linear layers of one width, with tanh between them."""
    return nn.Sequential(*(part for _ in range(number) for part in (nn.Linear(width, width), nn.Tanh())))


MODELS = (
    Model(name="large", make=encoder, batch=(4, 128, 256), pairs=200, deepspeed_pairs=50),
    Model(name="medium", make=lambda: layers(256, 6), batch=(64, 256), pairs=400, deepspeed_pairs=200),
    Model(name="tiny", make=lambda: layers(16, 2), batch=(8, 16), pairs=600, deepspeed_pairs=200),
)


@dataclass(slots=True, kw_only=True)
class Pairs:
    """What a tool reported beside the truth, and the truth beside itself."""

    reported: list[Phases] = field(default_factory=list)
    plain: list[Phases] = field(default_factory=list)
    plain_again: list[Phases] = field(default_factory=list)


def plan(groups: int) -> list[bool]:
    """For each step whether it is marked: one of every three, in random order."""
    generator = random.Random(0)
    return [marked for _ in range(groups) for marked in generator.sample([True, False, False], k=3)]


# ---- this project


class StampedAdamW(torch.optim.AdamW):
    """AdamW that keeps how long its arithmetic took, and dropping the gradients."""

    seconds: float = 0.0
    zero_grad_sec: float = 0.0
    now: Callable[[], float] = staticmethod(time.perf_counter)

    def step(self, closure: Any = None) -> Any:
        """The closure, which is forward and backward, and then the arithmetic."""
        loss = closure() if closure is not None else None
        begin = self.now()
        super().step()
        self.seconds = self.now() - begin + self.zero_grad_sec
        self.zero_grad_sec = 0.0
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        begin = self.now()
        super().zero_grad(set_to_none)
        self.zero_grad_sec += self.now() - begin


class StampedNet(LightningModule):
    """A model with a clock of its own around what it does."""

    def __init__(self, model: nn.Module, now: Callable[[], float]) -> None:
        """Keeps *model*."""
        super().__init__()
        self.model = model
        self.now = now
        self.truth: list[Phases] = []
        self._forward_sec = self._backward_sec = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """A forward and a loss."""
        begin = self.now()
        loss: Tensor = self.model(batch).square().mean()
        self._forward_sec = self.now() - begin
        return loss

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Autograd's."""
        begin = self.now()
        super().backward(loss, *args, **kwargs)
        self._backward_sec = self.now() - begin

    def on_train_batch_end(self, *args: Any) -> None:
        """The step is over."""
        optimizer: Any = self.optimizers(use_pl_optimizer=False)
        self.truth.append((self._forward_sec, self._backward_sec, optimizer.seconds))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        # torch wraps the step of each class that is instantiated; a plain loop's step is the wrapped one of AdamW.
        torch.optim.AdamW(self.parameters())
        StampedAdamW.step.hooked = True  # type: ignore[attr-defined]
        optimizer = StampedAdamW(self.parameters(), lr=1e-4)
        optimizer.now = self.now
        return optimizer


class RandomlyMarked(Recorder):
    """A recorder that has only the planned ones of its timed steps marked."""

    planned: Sequence[bool] = ()
    watched = 0

    @property
    def marking(self) -> bool:
        """Whether the running step is marked."""
        if self.timer is not None:
            return self.planned[min(self.watched, len(self.planned) - 1)]
        return super().marking

    def end_batch(self, *, ends_step: bool, **batch: Any) -> None:
        """A batch went through the loop."""
        timed = self.timer is not None
        super().end_batch(ends_step=ends_step, **batch)
        self.watched += timed and ends_step


@contextmanager
def recorders(planned: Sequence[bool], now: Callable[[], float] | None) -> Iterator[list[WindowRecord]]:
    """Inside, windows are marked by plan and by this clock, None being the device's own; they are kept."""
    windows: list[WindowRecord] = []
    replaced: Any = run_window
    closing: Any = run_results
    build_profile = closing.build_profile

    def keep(window: WindowRecord, **kwargs: Any) -> Any:
        windows.append(window)
        return build_profile(window, **kwargs)

    before = (replaced.Recorder, replaced.clock_for)
    replaced.Recorder = type("Planned", (RandomlyMarked,), {"planned": planned})
    if now is not None:
        replaced.clock_for = lambda device: WallClock(now)
    closing.build_profile = keep
    try:
        yield windows
    finally:
        replaced.Recorder, replaced.clock_for = before
        closing.build_profile = build_profile


def ours(model: Model, now: Callable[[], float]) -> Pairs:
    """One fit of *model* under this project's profiler."""
    torch.manual_seed(0)
    net = StampedNet(model.make(), now)
    planned = plan(model.pairs)
    batches = [torch.randn(*model.batch)] * (FIRST_STEPS + 10 + len(planned))
    callback = FlopsProfilerCallback(profile_step=FIRST_STEPS, timing_steps=model.pairs, trace=False, monitor=False)
    with tempfile.TemporaryDirectory() as folder, recorders(planned, now) as windows:
        trainer = Trainer(
            accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, callbacks=[callback],
        )  # fmt: skip
        trainer.fit(net, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    (window,) = windows
    reported = {
        step.index: (step.seconds.forward, step.seconds.backward, step.seconds.optimizer)
        for step in window.timed_steps
        if step.seconds is not None
    }
    first = window.counted_steps[0].index + 1 + window.settle_steps
    return paired(
        planned, reported={index - first: phases for index, phases in reported.items()}, truth=net.truth[first:]
    )


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


# ---- DeepSpeed's profiler


def deepspeeds(model: Model) -> Pairs:
    """Steps of a DeepSpeed engine, of which the planned ones are profiled."""
    import deepspeed
    from deepspeed.utils.timer import BACKWARD_GLOBAL_TIMER, FORWARD_GLOBAL_TIMER, STEP_GLOBAL_TIMER

    torch.manual_seed(0)
    net = model.make()
    engine = deepspeed.initialize(
        model=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=1e-4),
        config={
            "train_micro_batch_size_per_gpu": model.batch[0],
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
            "flops_profiler": {"enabled": True, "profile_step": 10**9, "detailed": False, "output_file": os.devnull},
        },
    )[0]
    reported: dict[int, Phases] = {}
    truth: list[Phases] = []
    planned = plan(model.deepspeed_pairs)

    def keep(**_: Any) -> None:
        # What its report takes from the engine's timers, in milliseconds.
        names = (FORWARD_GLOBAL_TIMER, BACKWARD_GLOBAL_TIMER, STEP_GLOBAL_TIMER)
        forward, backward, optimizer = (engine.timers(name).elapsed(False) / 1e3 for name in names)
        reported[len(truth) - FIRST_STEPS] = (forward, backward, optimizer)

    print_model_profile = engine.flops_profiler.print_model_profile

    def print_and_keep(**kwargs: Any) -> None:
        keep()
        print_model_profile(**kwargs)

    engine.flops_profiler.print_model_profile = print_and_keep
    batch, now = torch.randn(*model.batch), time.perf_counter
    for profiled in [False] * FIRST_STEPS + planned:
        engine._config.flops_profiler_config.profile_step = engine.global_steps if profiled else 10**9
        begin = now()
        loss = engine(batch).square().mean()
        forward = now()
        engine.backward(loss)
        backward = now()
        engine.step()
        truth.append((forward - begin, backward - forward, now() - backward))
    engine.destroy()
    return paired(planned, reported=reported, truth=truth[FIRST_STEPS:])


@contextmanager
def process_group() -> Iterator[None]:
    """A group of this process alone, which a DeepSpeed engine needs."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # or it compiles one
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29731")
    deepspeed.init_distributed("gloo")
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


# ---- the report


def differences(one: Sequence[Phases], other: Sequence[Phases], phase: int) -> Estimate:
    """Seconds that *one* has more than *other* in a phase: median over pairs and its interval."""
    return median_with_interval([a[phase] - b[phase] for a, b in zip(one, other, strict=True)])


def row(model: str, who: str, one: Sequence[Phases], other: Sequence[Phases], *, judged: bool) -> list[str]:
    """A line for each phase."""
    lines = []
    for index, phase in enumerate(PHASES):
        latency = median(phases[index] for phases in other)
        difference = differences(one, other, index)
        limit = max(RELATIVE_LIMIT * latency, ABSOLUTE_LIMIT_SEC)
        verdict = ""
        if judged:
            verdict = "met" if abs(difference.value) <= limit else "**missed**"
            if min(abs(difference.low), abs(difference.high)) <= limit < max(abs(difference.low), abs(difference.high)):
                verdict += ", the limit is inside the interval"
            verdict = f"≤ {1e6 * limit:.0f} µs: {verdict}"
        interval = f"{1e6 * difference.value:+.0f} [{1e6 * difference.low:+.0f} to {1e6 * difference.high:+.0f}]"
        lines.append(
            f"| {model} | {who} | {len(one)} | {phase} | {1e3 * latency:.3f} | {interval} | "
            f"{difference.value / latency:+.1%} | {verdict} |"
        )
    return lines


def report(results: Sequence[tuple[Model, Pairs, Pairs | None]], *, clock: str) -> list[str]:
    """The section of the results."""
    lines = [
        "## Reported latencies beside those of an uninstrumented run",
        "",
        "One fit for each model, on one thread; steps with and without marks in random order. The plain latency is by "
        "a clock in the model itself (DeepSpeed's: around the engine's calls), the difference is reported less plain: "
        f"medians over pairs with 95% bootstrap intervals. This project's clock and the model's: {clock} time; "
        f"DeepSpeed's is wall time always. Target: ≤ {RELATIVE_LIMIT:.0%} or ≤ {1e6 * ABSOLUTE_LIMIT_SEC:.0f} µs.",
        "",
        "| model | whose | pairs | phase | plain, ms | difference, µs | relative | target |",
        "|---|---|---:|---|---:|---:|---:|---|",
    ]
    for model, mine, theirs in results:
        lines += row(model.name, OURS, mine.reported, mine.plain, judged=True)
        lines += row(model.name, NOTHING, mine.plain_again, mine.plain, judged=False)
        if theirs is not None:
            lines += row(model.name, DEEPSPEED, theirs.reported, theirs.plain, judged=False)
    return [*lines, ""]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, writes its section of the results, and returns 0."""
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine others use too")
    parser.add_argument("--models", nargs="*", default=[model.name for model in MODELS])
    parser.add_argument("--without-deepspeed", action="store_true")
    parser.add_argument("--output", type=Path, default=RESULT)
    options = parser.parse_args(arguments)
    restart_in_one_thread_environment(MODULE)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning_flops", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.set_num_threads(1)
    now = time.perf_counter if options.clock == "wall" else time.thread_time
    chosen = [model for model in MODELS if model.name in options.models]
    mine = [ours(model, now) for model in chosen]
    logger.info("this project measured")
    theirs: list[Pairs | None] = [None] * len(chosen)
    if not options.without_deepspeed:
        with process_group():
            logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
            theirs = [deepspeeds(model) for model in chosen]
    results = list(zip(chosen, mine, theirs, strict=True))
    write_section(options.output, "phase_times", report(results, clock=options.clock))
    logger.info("wrote %s", options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
