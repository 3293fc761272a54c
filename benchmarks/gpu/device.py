"""Parts 0, 5 and 6: the device, its MFU beside that by hand, and memory.

MFU is the formula's FLOPs ÷ events around untimed steps ÷ the peak. Memory of each phase is what the allocator's
totals say of an unprofiled run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from lightning_flops.analysis.rates import peak_for

from ..machine import code_in_words, machine_in_words, versions
from ..memory import predicted, train
from ..memory_programs import programs
from ..phase_times import Stopwatch
from .checks import Check, Here, Row, at_least, at_most, exactly, holds, not_here, reported, unjudged, within
from .nets import (
    FIRST_STEP,
    LARGE,
    SETTLES,
    Net,
    batches_of,
    fit,
    forget,
    gpt_on,
    layers,
    next_token_loss,
    profiler,
    size_for,
)

# ---- what all the rest was seen on


def _host(here: Here) -> Iterator[Row]:
    yield reported("code", code_in_words())
    yield reported("host", machine_in_words())
    found = versions(("torch", "lightning", "pytorch-lightning", "triton", "transformers", "deepspeed", "nvidia-ml-py"))
    yield reported("versions", ", ".join(f"{name} {version}" for name, version in found.items()))


def _gpu(here: Here) -> Iterator[Row]:
    properties = torch.cuda.get_device_properties(here.device)
    yield reported("device", f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    yield reported("compute capability", f"{properties.major}.{properties.minor}")
    yield reported("multiprocessors", properties.multi_processor_count)
    yield reported("devices", torch.cuda.device_count())
    yield reported("CUDA, cuDNN", f"{torch.version.cuda}, {torch.backends.cudnn.version()}")  # type: ignore[no-untyped-call]
    peak = peak_for(properties.name, "bfloat16")
    yield reported("dense bfloat16 peak in the table", "n/a" if peak is None else f"{peak / 1e12:g} TFLOP/s")


def _driver(here: Here) -> Iterator[Row]:
    try:
        import pynvml
    except ImportError:
        yield reported("driver", "not known: nvidia-ml-py is not installed")
        return
    pynvml.nvmlInit()
    yield reported("driver", pynvml.nvmlSystemGetDriverVersion())
    pynvml.nvmlShutdown()


FACTS = (Check("host", _host), Check("device", _gpu, "it is the host"), Check("driver", _driver, "it has none"))

# ---- MFU

_GIVEN_PEAK = 1e12  # A CPU's, which no table has
_EDGE = 8192


def _mfu(here: Here) -> Iterator[Row]:
    """The formula's FLOPs ÷ events around untimed steps ÷ the peak, in the fit of which ours is."""
    size = size_for(here, replace(LARGE, batch=16))  # so long a step that it never waits for a slow host
    watch, timed = Stopwatch(on_gpu=here.on_gpu), here.pick(40, 3)
    peak = peak_for(torch.cuda.get_device_name(here.device), "bfloat16") if here.on_gpu else _GIVEN_PEAK
    if peak is None:
        yield not_here("MFU by hand", "the table has no peak for this device")
        return
    torch.manual_seed(0)
    net, ends = Net(gpt_on(here, size), next_token_loss), list[Any]()
    net.on_train_batch_end = lambda *_: ends.append(watch.stamp())  # type: ignore[method-assign]
    first_plain = FIRST_STEP + 1 + SETTLES + timed + 1
    callback = profiler(here, timing_steps=timed, peak_flops_per_sec=None if here.on_gpu else peak)
    done = fit(here, net, batches_of(size, here, first_plain + timed), callback, precision="bf16-mixed")
    plain_sec = watch.seconds(ends[first_plain - 1], ends[-1]) / (len(ends) - first_plain)
    by_hand, found = size.model_flops / plain_sec / peak, done.profile
    claim = "MFU of the GPT in bf16, ours beside by hand"
    yield from unjudged(here, within(claim, found.rates.mfu, by_hand, share=0.01, unit="%", scale=100))
    timing = found.timing
    yield reported("a step of the GPT", "n/a" if timing is None else f"{1e3 * timing.global_step_sec:.2f} ms")
    yield reported("HFU", "n/a" if found.rates.hfu is None else f"{found.rates.hfu:.2%}")
    if here.on_gpu and timing is not None:
        heated = "not known" if timing.heat_limited_share is None else f"{timing.heat_limited_share:.2%}"
        yield reported("share of the time in which heat held the clock down", heated)
    forget(here)


def _product(here: Here) -> Iterator[Row]:
    """A matrix product of 8192³ in bf16: no more than the peak, and not far below it."""
    name = torch.cuda.get_device_name(here.device)
    peak = peak_for(name, "bfloat16")
    yield holds("the device's name is in the table", peak is not None, name)
    if peak is None:
        return
    watch, rounds = Stopwatch(on_gpu=True), 20
    a, b = (torch.randn(_EDGE, _EDGE, device=here.device, dtype=torch.bfloat16) for _ in range(2))
    out, begin = torch.empty_like(a), None
    for place in range(5 + rounds):
        begin = watch.stamp() if place == 5 else begin
        torch.mm(a, b, out=out)
    end = watch.stamp()
    here.settle()
    reached = rounds * 2 * _EDGE**3 / watch.seconds(begin, end) / peak
    yield at_most("an 8192³ bf16 product, of the table's peak", reached, 1.0, unit="%", scale=100)
    yield at_least("the same: the peak is this device's", reached, 0.5, unit="%", scale=100)


MFU = (Check("matrix product", _product, "the table has no CPU"), Check("MFU", _mfu))

# ---- memory

_STEPS = FIRST_STEP + 1 + SETTLES + 2 + 1
_RESETS = ("reset_peak_memory_stats", "reset_accumulated_memory_stats", "reset_max_memory_allocated")


class _Read(Net):
    """Reads the allocator's totals where its phases end; its activations outweigh a rounding.

    Its forward ends before Lightning drops the gradients, and its optimizer's step after the batch.
    """

    def __init__(self, here: Here) -> None:
        super().__init__(layers(here, here.pick(2048, 64), here.pick(8, 2)))
        self.seen: dict[str, list[int]] = {"forward": [], "backward": [], "optimizer": []}
        for hook, held in (("on_after_backward", "backward"), ("on_train_batch_end", "optimizer")):
            setattr(self, hook, partial(self._look, self.seen[held]))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """As any other's."""
        loss = super().training_step(batch, batch_idx)
        self._look(self.seen["forward"])
        return loss

    def _look(self, held: list[int], *_: Any) -> None:
        held.append(int(torch.cuda.memory_stats(self.device)["allocated_bytes.all.current"]))


def _phases(here: Here) -> Iterator[Row]:
    """Held at the end of each phase of the counted step; an unprofiled run is the truth."""
    resets = list[str]()
    for _ in range(2):  # in the first one libraries take what they keep for themselves
        plain = _trained(here, None)
        forget(here)
    with ExitStack() as undo:
        for name in _RESETS:
            if hasattr(torch.cuda, name):
                undo.enter_context(patch.object(torch.cuda, name, lambda *_, name=name, **__: resets.append(name)))
        callback = profiler(here, timing_steps=2)
        _trained(here, callback)
    record = None if callback.profile is None else callback.profile.memory
    if record is None:
        raise RuntimeError("the profile has no memory")
    yield exactly("whose memory it is", record.kind, "allocated")
    found = record.held_bytes
    mebibytes: dict[str, Any] = {"share": 0.01, "least": 2**20, "unit": "MiB", "scale": 2**-20}
    for phase, seen in plain.seen.items():
        claim = f"held at the end of the {phase}, beside an unprofiled run"
        yield within(claim, found.get(phase), seen[FIRST_STEP], **mebibytes)
    yield exactly("resets of the allocator's peaks", resets, [])
    peak = int(torch.cuda.memory_stats(here.device)["allocated_bytes.all.peak"])
    yield at_most("the peak that is reported is not above the allocator's own", record.run_peak_bytes, peak)


def _trained(here: Here, callback: Any) -> _Read:
    torch.manual_seed(0)
    net = _Read(here)
    batch = torch.randn(here.pick(4096, 32), here.pick(2048, 64), device=here.device)
    fit(here, net, [batch] * _STEPS, callback)
    return net


_PREDICTED = ("MLP, AdamW foreach", "MLP, momentum", "encoder, AdamW", "decoder, AdamW", "checkpointed, AdamW")
_WITH_SCRATCH = ("CNN, momentum", "LSTM, AdamW")  # cuDNN's kernels take more, which is not predicted


def _peaks(here: Here) -> Iterator[Row]:
    """The peak of two steps of whole programs, above what was held before, beside what is predicted."""
    for program in programs():
        if program.name not in (*_PREDICTED, *_WITH_SCRATCH):
            continue
        larger = replace(program, size=here.pick(16, 1) * program.size)
        with here.device:
            for _ in range(2):  # in the first one libraries take what they keep for themselves
                forget(here)
                before = torch.cuda.memory_allocated(here.device)
                torch.cuda.reset_peak_memory_stats(here.device)
                train(larger)
            peak, found = torch.cuda.max_memory_allocated(here.device) - before, predicted(larger).peak_bytes
        claim = f"predicted peak of {program.name}, beside max_memory_allocated"
        if program.name in _PREDICTED:
            yield within(claim, found, peak, share=0.02, unit="MiB", scale=2**-20)
        else:
            yield reported(claim, f"{found / 2**20:,.1f} beside {peak / 2**20:,.1f} MiB ({found / peak - 1:+.2%})")


MEMORY = (
    Check("phases on the device", _phases, "it has no allocator with totals"),
    Check("predicted peaks", _peaks, "it has no allocator with totals"),
)
