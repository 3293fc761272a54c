"""Part 3: the run does not notice: the same numbers, no waiting for the device, no memory, graphs as they were."""

from __future__ import annotations

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lightning_flops import FlopsProfilerCallback

from .. import step_cost
from .gpt import Size, batches_of, gpt_on, next_token_loss, size_for
from .here import Check, Here
from .judge import exactly, holds, told, unjudged
from .results import Row
from .runs import FIRST_STEP, SETTLES, Fit, Net, fit, forget, layers, profiler

_STEPS = FIRST_STEP + 1 + SETTLES + 3 + 2 + 4
"""Counted, settling, timed, warmed up and traced, and a few afterwards."""
_SYNCHRONIZED = "called a synchronizing CUDA operation"

MakeNet = Callable[[], Net]


def _watched(here: Here) -> FlopsProfilerCallback:
    """With all that it does."""
    return profiler(here, timing_steps=3, trace=True, monitor=True, profile_memory=True, record_shapes=True)


# ---- the same numbers


def _same_training(here: Here) -> Iterator[Row]:
    """With deterministic algorithms, every loss and every weight is the same to the last bit."""
    size = _medium(here)
    yield from _compared(
        here, "GPT", lambda: Net(_Dropped(gpt_on(here, size)), next_token_loss), batches_of(size, here, _STEPS)
    )


class _Dropped(nn.Module):
    """Dropout behind a model: random numbers that one more or one fewer would change."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.dropout = model, nn.Dropout(0.1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.model(batch))  # type: ignore[no-any-return]


def _medium(here: Here) -> Size:
    whole = Size(layers=4, width=512, heads=8, vocabulary=4096, batch=4, length=512)
    return size_for(here) if here.small else whole


def _compared(
    here: Here, what: str, make: MakeNet, batches: list[Any], *, precision: str = "bf16-mixed"
) -> Generator[Row, None, Fit]:
    """A fit without the profiler and one with it, which is returned."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        plain, watched = (
            _seeded(here, make, batches, callback, precision=precision) for callback in (None, _watched(here))
        )
    finally:
        torch.use_deterministic_algorithms(before)
    yield exactly(f"{what}: losses that are the same bit for bit", _alike(plain.net.losses, watched.net.losses), _STEPS)
    weights, others = list(plain.net.parameters()), list(watched.net.parameters())
    yield exactly(f"{what}: parameters that are the same bit for bit", _alike(weights, others), len(weights))
    yield exactly(f"{what}: what the profiler warned of", watched.log, [])
    yield holds(f"{what}: the profiler counted, timed and traced", *_did_it_all(watched))
    return watched


def _seeded(
    here: Here, make: MakeNet, batches: list[Any], callback: FlopsProfilerCallback | None, *, precision: str
) -> Fit:
    torch.manual_seed(0)
    net = make()
    torch.manual_seed(1)
    return fit(here, net, batches, callback, precision=precision)


def _alike(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> int:
    """How many are equal; NaN is the same only as the same bits."""
    pairs = zip(ones, others, strict=True)
    return sum(torch.equal(_bits(one), _bits(other)) for one, other in pairs)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()


def _did_it_all(done: Fit) -> tuple[bool, str]:
    found = done.profile
    traced = found.traced is not None and found.traced.tables is not None
    text = f"{len(found.counted_steps)} counted, {len(found.timed_steps)} timed, {'one' if traced else 'none'} traced"
    return bool(found.counted_steps) and len(found.timed_steps) == 3 and traced, text


# ---- no waiting for the device


class _SyncMode(Callback):
    """Has torch watch for synchronizations during the training alone: behind it Lightning moves the model to the host.

    Args:
        mode: ``warn`` or ``error``.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.batch = -1
        """The one that runs."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        torch.cuda.set_sync_debug_mode(self.mode)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.batch = batch_idx

    def on_train_end(self, trainer: Any, module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")


def _synchronizations(here: Here) -> Iterator[Row]:
    """None but at the window's end: by torch's own watch, and by its functions that wait."""
    plain, watched = _waits(here, None), _waits(here, _watched(here))
    closes = _STEPS - 1 - 4  # the traced step, at whose end the report comes out
    outside = {batch: number for batch, number in (watched - plain).items() if batch != closes}
    yield told("synchronizations of a bare Trainer, by batch", dict(plain))
    yield exactly("synchronizations by the profiler outside of the window's end, by batch", outside, {})
    yield told("synchronizations in the batch at whose end the window closes", watched[closes])


def _waits(here: Here, callback: FlopsProfilerCallback | None) -> Counter[int]:
    size, mode, found = _medium(here), _SyncMode("warn"), Counter[int]()

    def heard(message: str) -> None:
        if _SYNCHRONIZED in message:
            found[mode.batch] += 1

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            found[mode.batch] += 1
            return original(*args, **kwargs)

        return wait

    with contextlib.ExitStack() as undo:
        for owner in (torch.cuda.Event, torch.cuda.Stream):
            undo.enter_context(patch.object(owner, "synchronize", counted(owner.synchronize)))
        undo.enter_context(patch.object(torch.cuda, "synchronize", counted(torch.cuda.synchronize)))
        undo.callback(torch.cuda.set_sync_debug_mode, "default")
        net = Net(gpt_on(here, size), next_token_loss)
        batches = batches_of(size, here, _STEPS)
        fit(here, net, batches, callback, mode, hear=heard, precision="bf16-mixed")
    return Counter({index: number for index, number in found.items() if 0 <= index < _STEPS - 1})


def _error_mode(here: Here) -> Iterator[Row]:
    """Where torch raises at a synchronization, the training and the profiler both come to their end."""
    size = _medium(here)
    net, batches = Net(gpt_on(here, size), next_token_loss), batches_of(size, here, _STEPS)
    try:
        done = fit(here, net, batches, _watched(here), _SyncMode("error"), precision="bf16-mixed")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    yield holds('set_sync_debug_mode("error"): counted, timed and traced', *_did_it_all(done))
    yield exactly('set_sync_debug_mode("error"): what the profiler warned of', done.log, [])


# ---- cost


def _cost_outside(here: Here) -> Iterator[Row]:
    """Host time of a step when the window has closed, over a bare Trainer; and that the same work runs."""
    rounds = here.pick(12, 1)
    (by_arm,) = step_cost.measure(
        {"Lightning": step_cost.lightning},
        rounds=rounds,
        folder=here.folder,
        accelerator="gpu" if here.on_gpu else "cpu",
        arms={arm: step_cost.ARMS[arm] for arm in (step_cost.BARE, step_cost.BARE_AGAIN, step_cost.MONITOR)},
    ).values()
    over, noise = (step_cost.over_bare(by_arm, arm) for arm in (step_cost.MONITOR, step_cost.BARE_AGAIN))
    bare = median(one.cpu for one in by_arm[step_cost.BARE])
    row = holds(
        f"host time of a step outside of the window over a bare Trainer, {rounds} rounds",
        over.value <= step_cost.OVER_BARE.limit,
        f"{over.text(1)} µs of {bare:.0f}; a bare one over another: {noise.text(1)} µs",
    )
    yield from unjudged([row], where=here.small)
    plain, watched = _work(here, None), _work(here, profiler(here, profile_step=0, timing_steps=1, monitor=True))
    extra, missing = watched - plain, plain - watched
    yield told("operators and kernels of three steps of a bare Trainer", sum(plain.values()))
    yield exactly("three steps outside of the window: operators and kernels that they have more", dict(extra), {})
    yield exactly("three steps outside of the window: operators and kernels that they lack", dict(missing), {})


class _Recorded(Callback):
    """What runs in three steps, long after the window has closed."""

    FIRST, LAST = 12, 14

    def __init__(self, here: Here) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * here.on_gpu
        self.profiler = profile(activities=activities)
        self.names: Counter[str] = Counter()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.FIRST:
            self.profiler.__enter__()  # type: ignore[no-untyped-call]  # a profiler that is only started stays set up

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.LAST:
            self.profiler.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            for event in self.profiler.events() or ():  # type: ignore[no-untyped-call]
                # What runs on the device or for it; how often the driver is asked whether an event is over varies.
                if event.name.startswith("aten::") or "cuda" in str(event.device_type).lower():
                    self.names[event.name] += 1


def _work(here: Here, callback: FlopsProfilerCallback | None) -> Counter[str]:
    torch.manual_seed(0)
    batch = torch.randn(16, 64, device=here.device)
    seen = _Recorded(here)
    fit(here, Net(layers(here, 64, 2)), [batch] * 16, callback, seen)
    return seen.names


def _cost_inside(here: Here) -> Iterator[Row]:
    """What the counted and the traced step take, waiting for the device at each step's end."""
    size = size_for(here)

    class Walls(Callback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_train_batch_end(self, *args: Any) -> None:
            here.settle()
            self.ends.append(time.perf_counter())

    walls = Walls()
    done = fit(
        here,
        Net(gpt_on(here, size), next_token_loss),
        batches_of(size, here, _STEPS),
        profiler(here, timing_steps=3, trace=True),
        walls,
        precision="bf16-mixed",
    )
    seconds = [after - before for before, after in zip(walls.ends, walls.ends[1:], strict=False)]
    plain = median(seconds[-3:])  # batch i ends at seconds[i - 1]
    traced = None if done.profile.traced is None else done.profile.traced.index
    yield told("a plain step of the GPT", f"{1e3 * plain:.2f} ms")
    yield told("its counted step", f"{seconds[FIRST_STEP - 1] / plain:.2f} × a plain one")
    if traced is not None:
        yield told(
            "its traced step, with starting and reading the trace", f"{seconds[traced - 1] / plain:.2f} × a plain one"
        )
    forget(here)


def _memory(here: Here) -> Iterator[Row]:
    """What the device's allocator holds when the fit is over and its objects are gone."""
    size = _medium(here)
    left = []
    for callback in (None, None, _watched(here)):  # the first one leaves what libraries keep for themselves
        before = torch.cuda.memory_allocated(here.device)
        net, batches = Net(gpt_on(here, size), next_token_loss), batches_of(size, here, _STEPS)
        done = fit(here, net, batches, callback, precision="bf16-mixed")
        if callback is not None:
            _ = done.profile  # it is kept, and holds no tensor
        del done, net, batches
        gc.collect()
        left.append(torch.cuda.memory_allocated(here.device) - before)
    _, plain, watched = left
    yield exactly("bytes on the device that are left when the objects of a fit are gone", watched, plain)


# ---- graphs


def _captured_graph(here: Here) -> Iterator[Row]:
    """A captured graph of forward and backward, replayed in every step."""
    sample = torch.randn(64, 256, device=here.device)

    def make() -> Net:
        model = layers(here, 256, 3)
        graphed: Any = torch.cuda.make_graphed_callables(model, (sample,))
        return Net(graphed)

    watched = yield from _compared(here, "captured CUDA graph", make, [sample] * _STEPS, precision="32-true")
    hidden = sorted(watched.profile.uncounted)
    yield holds("captured CUDA graph: its FLOPs are said to be a lower bound", watched.profile.lower_bound, str(hidden))


def _compiled(here: Here) -> Iterator[Row]:
    """torch.compile, with graphs of its own on a GPU: the same numbers, and nothing compiled anew."""
    how: dict[str, Any] = {"mode": "reduce-overhead"} if here.on_gpu else {"backend": "aot_eager"}
    batch = torch.randn(64, here.pick(512, 32), device=here.device)
    graphs: list[int] = []

    def make() -> Net:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model = layers(here, batch.shape[1], 2)
        model.compile(**how)
        return _Counted(model, graphs)

    words = "torch.compile(" + ", ".join(f'{key}="{value}"' for key, value in how.items()) + ")"
    yield from _compared(here, words, make, [batch] * _STEPS, precision="32-true")
    yield holds(f"{words}: something was compiled", graphs[0] > 0, str(graphs[0]))
    yield exactly(f"{words}: graphs that were compiled, with the profiler", graphs[1], graphs[0])


class _Counted(Net):
    """Writes down how many graphs were compiled in its fit."""

    def __init__(self, model: nn.Module, graphs: list[int]) -> None:
        super().__init__(model)
        self.graphs = graphs

    def on_fit_end(self) -> None:
        self.graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])


CHECKS = (
    Check(claim="the same training", look=_same_training),
    Check(claim="synchronizations", look=_synchronizations, needs_gpu="it is never waited for"),
    Check(claim='set_sync_debug_mode("error")', look=_error_mode, needs_gpu="it is never waited for"),
    Check(claim="cost outside of the window", look=_cost_outside),
    Check(claim="cost of counting and tracing", look=_cost_inside),
    Check(claim="memory afterwards", look=_memory, needs_gpu="it has no allocator with books"),
    Check(claim="captured CUDA graph", look=_captured_graph, needs_gpu="it has no graphs"),
    Check(claim="torch.compile", look=_compiled),
)
