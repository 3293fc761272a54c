"""Traces that torch.profiler takes here and now."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops.report.trace_text import render_traces
from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.columns import Trace
from tests.analysis.in_memory import analyze_traces

STEPS = 3
BATCH = 16

_RANK_PROGRAM = """
import sys, time, torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile
rank, store, target = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
waiting = dist.FileStore(store + ".waiting", 2)
with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
    # Profilers start up at different speeds: whoever is first waits here, in a collective of another name.
    dist.barrier()
    if rank == 1:
        waiting.wait(["rank 0 is about to wait"])
        time.sleep(1.0)
    else:
        waiting.set("rank 0 is about to wait", "")
    dist.all_reduce(torch.ones(1000, dtype=torch.float64))
profiler.export_chrome_trace(target)
dist.destroy_process_group()
"""


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


@pytest.fixture(params=["trace.json", "trace.json.gz"])
def live(request: pytest.FixtureRequest, tmp_path: Path) -> Trace:
    target = tmp_path / request.param
    train(target)
    return load_trace(target)


def test_a_live_cpu_trace_is_analysed_and_rendered(live: Trace) -> None:
    report = analyze_trace(live)
    assert report.step_times.marked
    assert [step.number for step in report.step_times.steps] == [1, 2, 3]
    phases = {row.name: row for row in report.phases}
    for name, source in (
        ("data loader", "scopes"), ("forward", "operators"), ("backward", "operators"), ("optimizer", "scopes")
    ):  # fmt: skip
        assert (phases[name].calls, phases[name].source) == (STEPS, source)
        host = phases[name].host
        assert host is not None and 0 < host.min_us <= host.mean_us <= host.max_us
    operators = {row.name: row.calls for row in report.operators or ()}
    # Two linear layers forward; backward a product for each weight, and one for the second layer's input.
    assert operators["aten::addmm"] == 2 * STEPS
    assert operators["aten::mm"] == 3 * STEPS
    assert operators["aten::relu"] == STEPS
    (scope,) = report.user_scopes or ()
    assert (scope.name, scope.calls) == ("loss of a batch", STEPS)
    memory = {row.name: row for row in report.memory or ()}
    # A layer's output: 16 rows of 128 and of 10 floats.
    assert memory["aten::addmm"].self_allocation_bytes == STEPS * BATCH * (128 + 10) * 4
    for table in (report.device_metrics, report.kernels, report.idle, report.collectives, report.overlap):
        assert table is None
    text = render_traces(analyze_traces([live]))
    assert "loss of a batch" in text
    assert "GPU utilization, SM efficiency, occupancy:                              n/a (no device events)" in text


def test_parts_of_live_steps_add_up_to_their_wall_time_to_the_nanosecond(live: Trace) -> None:
    for step in analyze_trace(live).step_times.steps:
        parts = (step.data_loader_us, step.cpu_us, step.other_us)
        assert sum(round(part * 1000) for part in parts if part is not None) == round(step.wall_us * 1000)
        assert all(part is not None and part > 0 for part in parts)


def test_sequences_of_torch_show_what_runs_in_the_backward(live: Trace) -> None:
    backward = {live.names[live.name[row]] for row in live.links.operators.tolist() if live.links.is_backward[row]}
    assert "autograd::engine::evaluate_function: AddmmBackward0" in backward
    assert "aten::mm" in backward
    assert "aten::addmm" not in backward


@pytest.mark.slow
def test_two_live_ranks_show_that_one_waited_for_the_other_that_slept_a_second(tmp_path: Path) -> None:
    targets = [tmp_path / f"rank{rank}.json" for rank in (0, 1)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "5"}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK_PROGRAM, str(rank), str(tmp_path / "store"), str(target)], env=environment
        )
        for rank, target in enumerate(targets)
    ]
    assert [process.wait(timeout=240) for process in started] == [0, 0]
    found = analyze_traces([load_trace(target) for target in targets]).ranks
    assert found is not None
    rows = [{row.name: row for row in rank.collectives}["all_reduce"] for rank in found.ranks]
    assert [(row.calls, row.matched_calls, row.bytes) for row in rows] == [(1, 1, 1000 * 8)] * 2
    first, second = (row.wait_us for row in rows)
    assert first is not None
    # Rank 1 came last. Of the second rank 0 waited most: it set out before the sleep began.
    assert second == 0
    assert first > 500_000


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
    trace = load_trace(target)
    names = [trace.names[index] for index in trace.name.tolist()]
    assert names.count("aten::sum") > torchs["aten::sum"].count  # it does call itself
    for name in ("aten::sum", "aten::mean", "aten::div"):
        assert ours[name].calls == torchs[name].count
        # Torch adds up microseconds in floats.
        assert abs(ours[name].host.total_us - torchs[name].cpu_time_total) < 0.01
