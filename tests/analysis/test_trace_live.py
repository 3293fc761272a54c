"""Traces that torch.profiler takes here and now."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops.report.trace_text import render_traces
from lightning_flops.trace import analyze_trace, load_trace
from tests.analysis.in_memory import analyze_traces

STEPS = 3
BATCH = 16


@pytest.fixture(autouse=True)
def quiet_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "5")


def train(target: Path) -> None:
    """Train a small network for a few profiled steps, and keep the trace as *target*."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
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
    phases = {row.name: row for row in report.phases}
    for name, source in (
        ("data loader", "scopes"), ("forward", "operators"), ("backward", "operators"), ("optimizer", "scopes")
    ):  # fmt: skip
        assert (phases[name].calls, phases[name].source) == (STEPS, source)
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


def test_operators_that_call_themselves_have_the_times_that_torch_prints(tmp_path: Path) -> None:
    values = torch.randn(64, 64)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            torch.div(values.sum(), 2)
            values.mean(0)
    target = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(target))
    torchs = {row.key: row for row in profiler.key_averages()}
    ours = {row.name: row for row in analyze_trace(load_trace(target)).operators or ()}
    for name in ("aten::sum", "aten::mean", "aten::div"):
        assert ours[name].calls == torchs[name].count
        # Torch adds up microseconds in floats.
        assert abs(ours[name].host.total_us - torchs[name].cpu_time_total) < 0.01
