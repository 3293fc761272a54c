"""Part 4: the trace's times by module add up to what the device was busy, and the fallback where there is no trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_flops.schema.trace import TraceReport

from .gpt import Size, batches_of, gpt_on, next_token_loss, size_for
from .here import Check, Here
from .judge import at_least, at_most, exactly, holds, told, unjudged, within
from .results import Row
from .runs import FIRST_STEP, SETTLES, Fit, Net, fit, forget, layers, profiler

_STEPS = FIRST_STEP + 1 + SETTLES + 2 + 2 + 1
LOST_FORWARD, LOST_BACKWARD = 0.02, 0.03
_BUSY_SHARE = 0.02


def gpt_traced(here: Here, size: Size, **settings: Any) -> Fit:
    """A fit of a GPT of which one step is traced."""
    torch.manual_seed(0)
    done = fit(
        here,
        Net(gpt_on(here, size), next_token_loss),
        batches_of(size, here, _STEPS),
        profiler(here, timing_steps=2, trace=True, **settings),
        precision="bf16-mixed",
    )
    forget(here)
    return done


def tables_of(done: Fit) -> TraceReport:
    """The tables of the traced step.

    Raises:
        RuntimeError: none was traced.
    """
    found = done.profile
    if found.traced is None or found.traced.tables is None:
        raise RuntimeError(f"no step was traced: {found.notes}")
    return found.traced.tables


def _by_module(here: Here) -> Iterator[Row]:
    """Nothing of forward and backward is lost between modules, and they add up."""
    done = gpt_traced(here, size_for(here))
    tables = tables_of(done)
    modules = tables.modules
    if modules is None:
        raise RuntimeError(f"the trace has no times of modules: {tables.notes}")
    yield holds("the clock of the modules' times", modules.clock == here_clock(here), modules.clock)
    rows = [
        at_most(
            "forward that no module has, of the forward",
            modules.unattributed_forward_us / modules.forward_us,
            LOST_FORWARD,
            unit="%",
            scale=100,
        ),
        at_most(
            "backward that no module has, of the backward",
            modules.unattributed_backward_us / modules.backward_us,
            LOST_BACKWARD,
            unit="%",
            scale=100,
        ),
    ]
    yield from unjudged(rows, where=here.small)
    forward = sum(row.own_forward_us for row in modules.rows) + modules.unattributed_forward_us
    yield within(
        "modules' own forwards, added up, beside the forward", forward, modules.forward_us, share=1e-3, unit="µs"
    )
    backward = sum(row.own_backward_us for row in modules.rows) + modules.unattributed_backward_us
    backward += modules.gradient_accumulation_us + modules.backward_communication_us + modules.backward_outside_nodes_us
    yield within("the same of the backward", backward, modules.backward_us, share=1e-3, unit="µs")
    yield from _budget(done)
    if here.on_gpu:
        yield from _on_device(tables, modules.forward_us + modules.backward_us + modules.optimizer_us)


def _budget(done: Fit) -> Iterator[Row]:
    """Its rows, to be looked at: they add up to the step's wall time to the nanosecond."""
    budget = done.profile.budget
    if budget is None:
        raise RuntimeError("there is no budget")
    summed = sum(row.time_ns or 0 for row in budget.rows)
    yield exactly("rows of the budget, added up, in ns", summed, budget.wall_ns)
    for row in budget.rows:
        words = "n/a" if row.time_ns is None else f"{row.time_ns / 1e6:.3f} ms, {row.time_ns / budget.wall_ns:.1%}"
        yield told(f"breakdown: {row.key}", words)


def here_clock(here: Here) -> str:
    """Whose clock a module's times are by."""
    return "device" if here.on_gpu else "host"


def _on_device(tables: TraceReport, phases_us: float) -> Iterator[Row]:
    mean, summary = tables.step_times.mean, tables.kernel_summary
    steps = len(tables.step_times.steps)
    busy_us = steps * sum(part or 0.0 for part in (mean.kernel_us, mean.memcpy_us, mean.memset_us))
    yield within(
        "forward, backward and optimizer beside all that kept the device busy",
        phases_us,
        busy_us,
        share=_BUSY_SHARE,
        unit="µs",
    )
    if summary is None or not tables.device_metrics:
        raise RuntimeError("the trace has no kernels")
    yield told("kernels of the step", summary.calls)
    yield at_least(
        "time in kernels on tensor cores, of all kernels", summary.tensor_core_ratio, 0.3, unit="%", scale=100
    )
    (device, *_) = tables.device_metrics
    occupancy = device.occupancy_percent
    yield holds(
        "estimated achieved occupancy is known, and a share",
        occupancy is not None and 0 < occupancy <= 100,
        "n/a" if occupancy is None else f"{occupancy:.1f}%",
    )
    yield told("the device was busy with kernels", f"{device.utilization:.1%} of the step")


# ---- a second stream


class _Copies(Net):
    """Beside its forward, a stream of its own copies pinned memory to the device."""

    def __init__(self, model: nn.Module, host: Tensor, device: torch.device) -> None:
        """Keeps *host*, and makes the stream."""
        super().__init__(model)
        self.host = host
        self.there = torch.empty_like(host, device=device)
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Starts the copy, and computes."""
        self.side.wait_stream(torch.cuda.current_stream(batch.device))
        with torch.cuda.stream(self.side):
            self.there.copy_(self.host, non_blocking=True)
        loss = super().training_step(batch, batch_idx)
        torch.cuda.current_stream(batch.device).wait_stream(self.side)
        return loss


def _second_stream(here: Here) -> Iterator[Row]:
    """Copies that run beside kernels are not the step's time."""
    width, number = here.pick(4096, 64), here.pick(8, 2)
    batch = torch.randn(here.pick(8192, 32), width, device=here.device, dtype=torch.bfloat16)
    host = torch.empty(here.pick(64, 1) * 2**20, dtype=torch.uint8).pin_memory()
    net = _Copies(layers(here, width, number), host, here.device)
    callback = profiler(here, timing_steps=2, trace=True)
    tables = tables_of(fit(here, net, [batch] * _STEPS, callback, precision="bf16-true"))
    forget(here)
    copies = [row for row in tables.transfers or () if "Pinned -> Device" in row.name]
    total_us = sum(row.device.total_us for row in copies)
    yield holds(
        "copies from pinned memory are in the trace, with their bytes",
        sum(row.bytes or 0 for row in copies) >= host.numel(),
        ", ".join(f"{row.name}: {row.calls} × {row.bytes} bytes" for row in copies) or "none",
    )
    exposed_us = (tables.step_times.mean.memcpy_us or 0.0) * len(tables.step_times.steps)
    yield at_most(
        "copies of the second stream that no kernel hides, of all copies",
        exposed_us / total_us if total_us else None,
        0.2,
        unit="%",
        scale=100,
    )


# ---- somebody else's profiler


def _other_profiler(here: Here) -> Iterator[Row]:
    """While another profiler is on, modules are timed at their borders, and the report says why."""
    torch.manual_seed(0)
    batch = torch.randn(here.pick(1024, 32), here.pick(1024, 64), device=here.device)
    net = Net(layers(here, batch.shape[1], 2))
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * here.on_gpu):
        done = fit(here, net, [batch] * _STEPS, profiler(here, timing_steps=2, trace=True))
    traced = done.profile.traced
    yield holds(
        "another profiler is on: forwards of modules are timed at their borders",
        traced is not None and traced.tables is None and bool(traced.own_forward_sec),
        "nothing" if traced is None else f"{len(traced.own_forward_sec or ())} modules",
    )
    words = [note for note in done.profile.notes if "profiler" in note]
    yield holds("another profiler is on: the report says so", bool(words), "; ".join(words) or "it does not")


CHECKS = (
    Check(claim="times by module", look=_by_module),
    Check(claim="a second stream", look=_second_stream, needs_gpu="it has no streams"),
    Check(claim="another profiler", look=_other_profiler),
)
