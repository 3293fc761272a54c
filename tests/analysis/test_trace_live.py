"""Traces that torch.profiler takes here and now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.report.trace_text import render_traces
from lightning_flops.schema.trace import TraceReport
from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.report import analyze_one
from tests.analysis.in_memory import analyze_traces, known

STEPS = 3
BATCH = 16


@pytest.fixture(autouse=True)
def quiet_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "5")


def train(target: Path) -> None:
    """Train a small network for a few profiled steps, and keep the trace as *target*."""
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn((STEPS + 1) * BATCH, 64), torch.zeros((STEPS + 1) * BATCH, dtype=torch.long))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=STEPS, repeat=1),
        profile_memory=True,
        record_shapes=True,
        acc_events=True,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(target)),
    ) as profiler:
        for inputs, labels in DataLoader(data, batch_size=BATCH):
            with record_function("loss of a batch"):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()


def test_a_live_cpu_trace_is_analysed_and_rendered(tmp_path: Path) -> None:
    target = tmp_path / "trace.json.gz"
    train(target)
    live = load_trace(target)
    report = analyze_trace(live)
    assert report.step_times.marked
    assert [step.number for step in report.step_times.steps] == [1, 2, 3]
    for step in report.step_times.steps:
        parts = (step.data_loader_us, step.cpu_us, step.other_us)
        assert all(part is not None and part > 0 for part in parts)
        assert sum(round(1000 * (part or 0)) for part in parts) == round(step.wall_us * 1000)
    phases = {row.name: row.calls for row in report.phases or ()}
    assert phases == dict.fromkeys(
        ("step", "data loader", "forward (by operators)", "backward (by operators)", "optimizer", "others"), STEPS
    )
    operators = {row.name: row.calls for row in report.operators or ()}
    # Two linear layers forward; backward a product for each weight, and one for the second layer's input.
    assert (operators["aten::addmm"], operators["aten::mm"], operators["aten::relu"]) == (2 * STEPS, 3 * STEPS, STEPS)
    (scope,) = report.user_scopes or ()
    assert (scope.name, scope.calls) == ("loss of a batch", STEPS)
    memory = {row.name: row for row in report.memory or ()}
    # A layer's output: 16 rows of 128 and of 10 floats.
    assert memory["aten::addmm"].self_allocation_bytes == STEPS * BATCH * (128 + 10) * 4
    for table in (report.device_metrics, report.kernels, report.idle, report.collectives, report.overlap):
        assert table is None
    text = render_traces(analyze_traces([live]))
    assert "GPU utilization, SM efficiency, occupancy:                              n/a (no device events)" in text


def traced(folder: Path, *, with_stack: bool) -> TraceReport:
    """What a trace of three steps says of a batch of 32 through 8 x 16, and 16 x 4 inside a container."""
    net = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.ReLU(), nn.Linear(16, 4)))
    recorded: dict[str, Any] = {"record_shapes": True, "with_modules": True, "with_stack": with_stack}
    with profile(activities=[ProfilerActivity.CPU], **recorded) as profiler:
        for _ in range(3):
            net(torch.ones(32, 8)).sum().backward()
            profiler.step()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    return analyze_one(load_trace(folder / "trace.json"), formulas=recorded_work).report


FIRST, SECOND = 2 * 32 * 8 * 16, 2 * 32 * 16 * 4
"""FLOPs of a forward. The backward of the first has no gradient of its input."""


def test_modules_with_stacks_have_their_time_and_their_flops(tmp_path: Path) -> None:
    alone, report = (traced(tmp_path, with_stack=with_stack) for with_stack in (False, True))
    assert alone.modules is None
    assert any(note.startswith("Modules are n/a: with_modules=True alone") for note in alone.notes)
    assert not any(note.startswith("Modules") for note in report.notes)
    for one in (alone, report):
        assert {row.name: (row.calls, row.forward, row.backward) for row in known(one.flops).operators} == {
            "aten.addmm": (6, 3 * (FIRST + SECOND), 0),
            "aten.mm": (9, 0, 3 * (FIRST + 2 * SECOND)),
        }
    rows = {row.name: row for row in known(report.modules).rows}
    for name in ("Sequential_0.Linear_0", "Sequential_0.Sequential_1.Linear_1"):
        assert rows[name].calls == 3
        assert 0 < rows[name].own_forward_us <= rows["Sequential_0"].forward_us
        assert rows[name].backward_us > 0
    both, second = (3 * (FIRST + SECOND), 3 * (FIRST + 2 * SECOND)), (3 * SECOND, 6 * SECOND)
    assert {name: (row.flops.forward, row.flops.backward) for name, row in rows.items() if row.flops is not None} == {
        "": both,
        "Sequential_0": both,
        "Sequential_0.Linear_0": (3 * FIRST, 3 * FIRST),
        "Sequential_0.Sequential_1": second,
        "Sequential_0.Sequential_1.Linear_1": second,
    }
