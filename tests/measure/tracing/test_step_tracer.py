"""A step under torch.profiler: what is recorded of it, and that training does not change."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.autograd.profiler as autograd_profiler
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

from benchmarks.runner import answer_of
from lightning_flops.measure.tracing.step_tracer import StepTracer
from lightning_flops.records import StepSignature, TracedStepRecord
from lightning_flops.schema.tables import ModuleRow, ModuleTable
from lightning_flops.trace.modules import module_table
from lightning_flops.trace.read import load_trace
from tests.left_on_torch import torch_state

CPU = torch.device("cpu")
SIGNATURE = StepSignature(batches=("2x4",), forwards=1, backwards=1, updates=1)


def new_net() -> nn.Sequential:
    second = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    return nn.Sequential(OrderedDict(first=nn.Linear(4, 3), second=second))


def train_step(tracer: StepTracer, model: nn.Module) -> None:
    tracer.enter("forward")
    loss = model(torch.ones(2, 4)).sum()
    tracer.leave()
    tracer.enter("backward")
    if loss.requires_grad:
        loss.backward()
    tracer.leave()


def traced(model: nn.Module, *, device: torch.device = CPU) -> tuple[StepTracer, TracedStepRecord]:
    """One step of *model*, traced."""
    tracer = StepTracer(model, device=device)
    tracer.warm_up()
    train_step(tracer, model)
    tracer.start(6)
    train_step(tracer, model)
    record = tracer.stop(SIGNATURE)
    assert record is not None
    return tracer, record


def table_of(record: TracedStepRecord | None) -> tuple[ModuleTable, dict[str, ModuleRow]]:
    table = None if record is None else module_table(load_trace(record.path))
    assert table is not None
    return table, {row.name: row for row in table.rows}


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing of torch's that a tracer touches is another one afterwards."""
    monkeypatch.setenv("KINETO_LOG_LEVEL", "6")

    def state() -> list[Any]:
        profiler = autograd_profiler
        setting_up = [profiler._prepare_profiler, profiler._enable_profiler]  # type: ignore[attr-defined]
        return [torch_state(), *setting_up, os.environ.get("KINETO_LOG_LEVEL")]

    before = state()
    yield
    assert state() == before


def events_of(profiler: Any) -> list[str]:
    return [event.key for event in profiler.key_averages()]


def test_a_profiler_that_waits_for_its_turn_is_left_alone() -> None:
    model = new_net()
    tracer = StepTracer(model, device=CPU)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=1, repeat=1), acc_events=True
    ) as users:
        for _ in range(3):
            tracer.warm_up()
            tracer.start(0)
            train_step(tracer, model)
            tracer.stop(SIGNATURE)
            users.step()
        tracer.give_up()
    assert "aten::addmm" in events_of(users)
    assert tracer.lost is not None and "a torch.profiler.profile is set up in this run" in tracer.lost


@pytest.mark.parametrize("moment", ["warming", "recording"])
@pytest.mark.parametrize(
    "users_profiler",
    [lambda: profile(activities=[ProfilerActivity.CPU]), lambda: autograd_profiler.profile(use_kineto=True)],
    ids=["torch.profiler", "autograd.profiler"],
)
def test_a_profiler_that_is_set_up_meanwhile_takes_over(users_profiler: Callable[[], Any], moment: str) -> None:
    model = new_net()
    tracer = StepTracer(model, device=CPU)
    tracer.warm_up()
    if moment == "recording":
        tracer.start(0)
    with users_profiler() as users:
        train_step(tracer, model)
    tracer.start(1)
    train_step(tracer, model)
    assert tracer.stop(SIGNATURE) is None
    names = events_of(users)
    assert "aten::addmm" in names
    assert not any(name.startswith("module: ") for name in names)
    assert tracer.lost is not None and "another profiler was set up meanwhile" in tracer.lost


def test_a_failure_of_torchs_profiler_is_said_and_reaches_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("CUPTI_ERROR_INSUFFICIENT_PRIVILEGES")

    monkeypatch.setattr(torch.profiler.profiler._KinetoProfile, "start_trace", broken)
    tracer = StepTracer(new_net(), device=CPU)
    tracer.warm_up()
    tracer.start(0)
    assert tracer.stop(SIGNATURE) is None
    assert tracer.lost == (
        "No step was traced: torch.profiler failed (RuntimeError: CUPTI_ERROR_INSUFFICIENT_PRIVILEGES)."
    )


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("function", ["_prepare_profiler", "_enable_profiler", "_disable_profiler"])
def test_what_a_signal_raises_at_torchs_profiler_passes_and_it_ends_once(function: str, moment: str) -> None:
    """Torch itself answers: a recording that is ended twice has no result, and to write that kills the process."""
    answer = answer_of(lambda: _interrupted(function, moment), timeout_sec=60.0)
    assert answer.words == ""
    assert answer.value == ["KeyboardInterrupt", None, True]


def _interrupted(function: str, moment: str) -> list[Any]:
    """What came out, what a second end has recorded, and whether torch is as it was and can record again."""
    original, moments = getattr(autograd_profiler, function), list[str]()

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if moments or moment == "after":
            result = original(*args, **kwargs)
        if not moments:
            moments.append(moment)
            raise KeyboardInterrupt
        return result

    before = torch_state()
    tracer, raised = StepTracer(new_net(), device=CPU), ""
    with patch.object(autograd_profiler, function, interrupted):
        try:
            tracer.start(0)
            tracer.stop(SIGNATURE)
        except KeyboardInterrupt as error:
            raised = type(error).__name__
        again = tracer.stop(SIGNATURE)
        tracer.give_up()
    as_it_was = torch_state() == before
    with torch.no_grad():  # a fork of a process whose autograd has threads of devices may run no backward
        _, record = traced(new_net())
    return [raised, again, as_it_was and table_of(record)[1]["first"].calls > 0]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
@pytest.mark.skipif(torch.cuda.is_available(), reason="shows what is said where the device does not take part")
def test_a_device_that_leaves_no_events_is_said_and_the_hosts_are_kept() -> None:
    tracer, record = traced(new_net(), device=torch.device("cuda"))
    assert tracer.lost == (
        "The trace has no event of the cuda device (it may not be permitted here): kernels and device times of modules "
        "are n/a."
    )
    assert Path(record.path).exists()
    del tracer  # the file goes with it
    assert not Path(record.path).exists()
