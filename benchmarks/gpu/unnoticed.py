"""Part 3: the run does not notice: the same numbers, no waiting for the device, no memory, graphs as they were."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback
from torch import nn

from lightning_flops import FlopsProfilerCallback

from . import nets
from .checks import Check, Here, Row, exactly, holds, reported
from .nets import Fit, Net, fit, profiler

# Counted, settling, timed, warmed up and traced, and a few afterwards.
_STEPS = nets.FIRST_STEP + 1 + nets.SETTLES + 3 + 2 + 4
_SYNCHRONIZED = "called a synchronizing CUDA operation"


def _watched(here: Here) -> FlopsProfilerCallback:
    """The profiler with all that it does."""
    return profiler(here, timing_steps=3, trace=True, monitor=True, profile_memory=True, record_shapes=True)


def _gpt_fit(here: Here, callback: FlopsProfilerCallback | None, *callbacks: Callback, **settings: Any) -> Fit:
    return nets.gpt_fit(here, nets.size_for(here, nets.MEDIUM), _STEPS, callback, *callbacks, **settings)


# ---- the same numbers


def _same_training(here: Here) -> Iterator[Row]:
    """With deterministic algorithms, every loss and every weight is the same to the last bit.

    One random number more or one fewer would change the dropout.
    """
    size = nets.size_for(here, nets.MEDIUM)

    def make() -> Net:
        return Net(nn.Sequential(nets.gpt_on(here, size), nn.Dropout(0.1)), nets.next_token_loss)

    yield from _compared(here, "GPT", make, nets.batches_of(size, here, _STEPS), "bf16-mixed")


def _compared(
    here: Here, what: str, make: Callable[[], Net], batches: list[Any], precision: str
) -> Generator[Row, None, Fit]:
    """A fit without the profiler and one with it, which is returned."""

    def seeded(callback: FlopsProfilerCallback | None) -> Fit:
        torch.manual_seed(0)
        net = make()
        torch.manual_seed(1)
        return fit(here, net, batches, callback, precision=precision)

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        plain, watched = seeded(None), seeded(_watched(here))
    finally:
        torch.use_deterministic_algorithms(before)
    yield exactly(f"{what}: losses that are the same bit for bit", _alike(plain.net.losses, watched.net.losses), _STEPS)
    weights, others = list(plain.net.parameters()), list(watched.net.parameters())
    yield exactly(f"{what}: parameters that are the same bit for bit", _alike(weights, others), len(weights))
    yield exactly(f"{what}: what the profiler warned of", watched.log, [])
    yield holds(f"{what}: the profiler counted, timed and traced", *_did_it_all(watched))
    return watched


def _alike(ones: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> int:
    """How many are equal; NaN is the same only as the same bits."""
    return sum(torch.equal(_bits(one), _bits(other)) for one, other in zip(ones, others, strict=True))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()


def _did_it_all(done: Fit) -> tuple[bool, str]:
    found = done.profile
    traced = found.traced is not None and found.traced.tables is not None
    text = f"{len(found.counted_steps)} counted, {len(found.timed_steps)} timed, {'one' if traced else 'none'} traced"
    return bool(found.counted_steps) and len(found.timed_steps) == 3 and traced, text


# ---- no waiting for the device


class _SyncMode(Callback):
    """Has torch warn or raise at synchronizations in the training alone: then Lightning moves the model to the host."""

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
    yield reported("synchronizations of a bare Trainer, by batch", dict(plain))
    yield exactly("synchronizations by the profiler outside of the window's end, by batch", outside, {})
    yield reported("synchronizations in the batch at whose end the window closes", watched[closes])


def _waits(here: Here, callback: FlopsProfilerCallback | None) -> Counter[int]:
    mode, found = _SyncMode("warn"), Counter[int]()

    def hear(message: str) -> None:
        found[mode.batch] += _SYNCHRONIZED in message

    def counted(original: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any, **kwargs: Any) -> Any:
            found[mode.batch] += 1
            return original(*args, **kwargs)

        return wait

    with ExitStack() as undo:
        for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda):
            undo.enter_context(patch.object(owner, "synchronize", counted(owner.synchronize)))
        undo.callback(torch.cuda.set_sync_debug_mode, "default")
        _gpt_fit(here, callback, mode, hear=hear)
    return Counter({index: number for index, number in found.items() if 0 <= index < _STEPS - 1})


# ---- memory


def _memory(here: Here) -> Iterator[Row]:
    """What the device's allocator holds when the fit is over, its objects are gone, and the profile is there."""
    left, profiles = [], []
    for watched in (False, False, True):  # the first one leaves what libraries keep for themselves
        before = torch.cuda.memory_allocated(here.device)
        done = _gpt_fit(here, _watched(here) if watched else None)
        profiles.append(done.profile if watched else None)
        del done  # with the callback: Lightning gives every callback the model's method `log`, and so the model
        gc.collect()
        left.append(torch.cuda.memory_allocated(here.device) - before)
    yield exactly("bytes on the device that are left when the objects of a fit are gone", left[2], left[1])


# ---- graphs


def _captured_graph(here: Here) -> Iterator[Row]:
    """A captured graph of forward and backward, replayed in every step."""
    sample = torch.randn(64, 256, device=here.device)

    def make() -> Net:
        graphed: Any = torch.cuda.make_graphed_callables(nets.layers(here, 256, 3), (sample,))
        return Net(graphed)

    watched = yield from _compared(here, "captured CUDA graph", make, [sample] * _STEPS, "32-true")
    hidden = sorted(watched.profile.uncounted)
    yield holds("captured CUDA graph: its FLOPs are said to be a lower bound", watched.profile.lower_bound, str(hidden))


def _compiled(here: Here) -> Iterator[Row]:
    """torch.compile, with graphs of its own on a GPU: the same numbers, and nothing compiled anew."""
    how: dict[str, Any] = {"mode": "reduce-overhead"} if here.on_gpu else {"backend": "aot_eager"}
    batch, graphs = torch.randn(64, here.pick(512, 32), device=here.device), list[int]()

    class Counted(Net):
        def on_fit_end(self) -> None:
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])

    def make() -> Net:
        torch.compiler.reset()
        torch._dynamo.utils.counters.clear()
        model = nets.layers(here, batch.shape[1], 2)
        model.compile(**how)
        return Counted(model)

    words = "torch.compile(" + ", ".join(f'{key}="{value}"' for key, value in how.items()) + ")"
    yield from _compared(here, words, make, [batch] * _STEPS, "32-true")
    yield holds(f"{words}: something was compiled", graphs[0] > 0, str(graphs[0]))
    yield exactly(f"{words}: graphs that were compiled, with the profiler", graphs[1], graphs[0])


CHECKS = (
    Check("the same training", _same_training),
    Check("synchronizations", _synchronizations, "it is never waited for"),
    Check("memory afterwards", _memory, "it has no allocator with totals"),
    Check("captured CUDA graph", _captured_graph, "it has no graphs"),
    Check("torch.compile", _compiled),
)
