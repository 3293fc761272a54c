"""Parts 4 and 8: times by module add up to what the device was busy; a trace file says what the live report said."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lightning_flops.schema.trace import TraceReport

from ..machine import ROOT
from . import nets
from .checks import Check, Here, Row, at_least, at_most, exactly, holds, reported, unjudged, within
from .nets import Fit, Net, fit, forget, profiler

_STEPS = nets.FIRST_STEP + 1 + nets.SETTLES + 2 + 2 + 1
LOST_FORWARD, LOST_BACKWARD = 0.02, 0.03
_BUSY_SHARE = 0.02
_at_most_share = partial(at_most, unit="%", scale=100)
_sum = partial(within, share=1e-3, unit="µs")


def gpt_traced(here: Here, size: nets.Size, **settings: Any) -> Fit:
    """A fit of a GPT of which one step is traced."""
    torch.manual_seed(0)
    one_step = {"wait": 0, "warmup": 1, "active": 1, "repeat": 1}  # medians over several steps do not add up
    callback = profiler(here, timing_steps=2, trace=True, trace_schedule=one_step, **settings)
    done = nets.gpt_fit(here, size, _STEPS, callback)
    forget(here)
    return done


def _tables_of(done: Fit) -> TraceReport:
    """The tables of the traced step; raises RuntimeError if none was traced."""
    found = done.profile
    if found.traced is None or found.traced.tables is None:
        raise RuntimeError(f"no step was traced: {found.notes}")
    return found.traced.tables


def _by_module(here: Here) -> Iterator[Row]:
    """Nothing of forward and backward is lost between modules, and they add up."""
    done = gpt_traced(here, nets.size_for(here))
    tables = _tables_of(done)
    modules = tables.modules
    if modules is None:
        raise RuntimeError(f"the trace has no times of modules: {tables.notes}")
    clock = "device" if here.on_gpu else "host"
    yield holds("the clock of the modules' times", modules.clock == clock, modules.clock)
    lost_forward, lost_backward = modules.unattributed_forward_us, modules.unattributed_backward_us
    yield from unjudged(
        here,
        _at_most_share("forward that no module has, of the forward", lost_forward / modules.forward_us, LOST_FORWARD),
        _at_most_share(
            "backward that no module has, of the backward", lost_backward / modules.backward_us, LOST_BACKWARD
        ),
    )
    forward = sum(row.own_forward_us for row in modules.rows) + lost_forward
    claim = "modules' own forwards, added up, beside the forward"
    yield _sum(claim, forward, modules.forward_us)
    backward = sum(row.own_backward_us for row in modules.rows) + lost_backward
    backward += modules.gradient_accumulation_us
    yield _sum("the same of the backward", backward, modules.backward_us)
    budget = done.profile.budget
    if budget is None:
        raise RuntimeError("there is no step time breakdown")
    summed = sum(row.time_ns or 0 for row in budget.rows)
    yield exactly("rows of the step time breakdown, added up, in ns", summed, budget.wall_ns)
    for line in budget.rows:
        seen = (
            f"{line.time_ns / 1e6:.3f} ms, {line.time_ns / budget.wall_ns:.1%}" if line.time_ns is not None else "n/a"
        )
        yield reported(f"step time breakdown: {line.key}", seen)
    if here.on_gpu:
        yield from _on_device(tables, modules.forward_us + modules.backward_us + modules.optimizer_us)


def _on_device(tables: TraceReport, phases_us: float) -> Iterator[Row]:
    mean, summary = tables.step_times.mean, tables.kernel_summary
    parts = (mean.kernel_us, mean.memcpy_us, mean.memset_us)
    busy_us = len(tables.step_times.steps) * sum(part or 0.0 for part in parts)
    claim = "forward, backward and optimizer beside all that kept the device busy"
    yield within(claim, phases_us, busy_us, share=_BUSY_SHARE, unit="µs")
    if summary is None or not tables.device_metrics:
        raise RuntimeError("the trace has no kernels")
    yield reported("kernels of the step", summary.calls)
    claim = "time in kernels on tensor cores, of all kernels"
    yield at_least(claim, summary.tensor_core_ratio, 0.3, unit="%", scale=100)
    (device, *_) = tables.device_metrics
    occupancy = device.occupancy_percent
    known = occupancy is not None and 0 < occupancy <= 100
    seen = "n/a" if occupancy is None else f"{occupancy:.1f}%"
    yield holds("estimated achieved occupancy is known, and a share", known, seen)
    yield reported("the device was busy with kernels", f"{device.utilization:.1%} of the step")


# ---- a second stream


class _Copies(Net):
    """Beside its forward, a stream of its own copies pinned memory to the device."""

    def __init__(self, model: nn.Module, host: Tensor, device: torch.device) -> None:
        super().__init__(model)
        self.host = host
        self.there = torch.empty_like(host, device=device)
        self.side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
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
    net = _Copies(nets.layers(here, width, number), host, here.device)
    callback = profiler(here, timing_steps=2, trace=True)
    tables = _tables_of(fit(here, net, [batch] * _STEPS, callback, precision="bf16-true"))
    forget(here)
    copies = [row for row in tables.transfers or () if "Pinned -> Device" in row.name]
    total_us = sum(row.device.total_us for row in copies if row.device is not None)
    yield holds(
        "copies from pinned memory are in the trace, with their bytes",
        sum(row.bytes or 0 for row in copies) >= host.numel(),
        ", ".join(f"{row.name}: {row.calls} × {row.bytes} bytes" for row in copies) or "none",
    )
    exposed_us = (tables.step_times.mean.memcpy_us or 0.0) * len(tables.step_times.steps)
    claim = "copies of the second stream that no kernel hides, of all copies"
    yield _at_most_share(claim, exposed_us / total_us if total_us else None, 0.2)


# ---- another profiler


def _other_profiler(here: Here) -> Iterator[Row]:
    """While another profiler is on, no step is traced, and the report says why."""
    torch.manual_seed(0)
    batch = torch.randn(here.pick(1024, 32), here.pick(1024, 64), device=here.device)
    net = Net(nets.layers(here, batch.shape[1], 2))
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * here.on_gpu):
        done = fit(here, net, [batch] * _STEPS, profiler(here, timing_steps=2, trace=True))
    words = [note for note in done.profile.notes if "profiler" in note]
    yield holds("another profiler is on: the report says so", bool(words), "; ".join(words) or "it does not")


CHECKS = (
    Check("times by module", _by_module),
    Check("a second stream", _second_stream, "it has no streams"),
    Check("another profiler", _other_profiler),
)


# ---- the command `lightning-flops trace` on the file that a run has written

_OF_THE_FILE = ("flops", "source", "rank", "overlap", "events", "notes", "device_summary")
"""What is the file's own, or what a live run of one rank leaves out."""
_SHARE = 1e-3  # On a CPU the live report has nanoseconds, a file microseconds with three digits
_SHOWN = 5
_LEAST_FIGURES = 50


def _command(here: Here) -> Iterator[Row]:
    traced = gpt_traced(
        here, nets.size_for(here, nets.MEDIUM), trace_dir=str(here.folder / "traces"), record_shapes=True
    )
    profile = json.loads(traced.profile.to_json())
    (path,) = profile["traced"]["files"]
    command = [sys.executable, "-m", "lightning_flops", "trace", path, "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    yield exactly("status of the command", run.returncode, 0)
    if run.returncode:
        yield reported("what it wrote", run.stderr[-500:])
        return
    (read,) = json.loads(run.stdout)["traces"]
    # A table that a live run on a CPU has nothing for, because it keeps no shapes, may stand in the file.
    live = profile["traced"]["tables"].items()
    tables = dict(_leaves({name: rows for name, rows in live if rows is not None and name not in _OF_THE_FILE}))
    others = dict(_leaves(read))
    apart = [
        f"{path}: {one} live, {others.get(path)} read"
        for path, one in tables.items()
        if not _same(one, others.get(path))
    ]
    yield holds(
        f"figures of the live report that the command has, too, of {len(tables)}",
        not apart and len(tables) > _LEAST_FIGURES,
        "; ".join([str(len(tables) - len(apart)), *apart[:_SHOWN]]),
    )
    # Counted from the shapes in the trace, beside what the counter saw in its own step.
    (step,) = read["flops"]["steps"]
    for phase in ("forward", "backward", "recompute"):
        claim = f"{phase} FLOPs from the trace's shapes, beside the counted step's"
        seen, truth = step[phase], profile["flops"][phase]
        if step["lower_bound"]:
            yield holds(f"{claim}: a lower bound", seen <= truth, f"{seen:,} of {truth:,}")
        else:
            yield exactly(claim, seen, truth)


def _leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """The values in a tree of JSON, and how long its lists are, each with where it stands."""
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _leaves(value, f"{path}.{name}")
    elif isinstance(tree, list):
        yield f"{path} has", len(tree)
        for index, value in enumerate(tree):
            yield from _leaves(value, f"{path}[{index}]")
    else:
        yield path, tree


def _same(live: Any, read: Any) -> bool:
    """Whether two values differ by no more than a rounding."""
    if isinstance(live, float) and isinstance(read, (int, float)):
        return abs(live - read) <= _SHARE * max(abs(live), abs(read), 1.0)
    return bool(live == read)


COMMAND_CHECKS = (Check("the command beside the live report", _command),)
