"""Operators, copies, scopes and memory; who encloses whom is held against a search through all that began before."""

from __future__ import annotations

from collections.abc import Callable
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
from lightning_flops.schema.trace_events import MemoryRow, OperatorRow
from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.memory import memory_table
from lightning_flops.trace.report import analyze_one
from lightning_flops.trace.tables import operator_table, transfer_table, user_scope_table
from tests.analysis.in_memory import analyze_traces, known
from tests.analysis.trace_events import Event, kernel, launch, launched, memory, on_device, operator, scope, step, trace


def rows(*events: Event) -> dict[str, OperatorRow]:
    return {row.name: row for row in operator_table(trace(*events)) or ()}


def test_self_time_is_what_called_operators_leave() -> None:
    found = rows(
        operator("aten::linear", 0, 50),
        operator("aten::t", 5, 10),
        operator("aten::transpose", 7, 4),
        operator("aten::addmm", 20, 25),
        operator("aten::linear", 60, 10),
        operator("aten::relu", 5, 30, thread=2),
    )
    linear = found["aten::linear"]
    assert (linear.calls, linear.host.total_us, linear.host_self.total_us) == (2, 60, 15 + 10)
    assert (linear.host.min_us, linear.host.mean_us, linear.host.max_us) == (10, 30, 50)
    assert (found["aten::t"].host.total_us, found["aten::t"].host_self.total_us) == (10, 6)
    # 50 and 10 of the first thread, 30 of the second: the self times of all.
    assert linear.host_self.ratio == 25 / 90
    assert linear.host.ratio == 60 / 90
    assert sum(row.host_self.ratio or 0 for row in found.values()) == 1
    assert linear.device is linear.device_self is None
    assert linear.tensor_cores_eligible
    assert not found["aten::t"].tensor_cores_eligible


def test_device_time_belongs_to_the_operator_that_launched_and_to_its_callers() -> None:
    found = rows(
        operator("aten::linear", 0, 50),
        operator("aten::addmm", 20, 25),
        *launched(1, 30, 100, 40),
        launch(2, 31),
        on_device("gpu_memset", 2, 140, 5, name="Memset (Device)"),
        *launched(3, 47, 150, 7),
        *launched(4, 55, 160, 3),  # outside any operator
    )
    addmm, linear = found["aten::addmm"], found["aten::linear"]
    assert (known(addmm.device).total_us, known(addmm.device_self).total_us) == (45, 45)
    assert (known(linear.device).total_us, known(linear.device_self).total_us) == (52, 7)
    assert known(linear.device_self).ratio == 7 / 52


def test_a_kernel_without_its_launch_goes_to_the_operator_with_its_external_id() -> None:
    orphan = kernel(77, 100, 40)
    orphan["args"]["External id"] = 5
    found = rows(operator("aten::mm", 0, 50, **{"External id": 5}), operator("aten::add", 60, 5), orphan)
    assert known(found["aten::mm"].device_self).total_us == 40


def test_memory_of_called_operators_is_the_callers_too_but_not_its_own() -> None:
    loaded = trace(
        operator("aten::linear", 0, 50),
        memory(2, 100),
        operator("aten::addmm", 10, 30),
        memory(15, 64),
        memory(20, -40),
        memory(45, -100),
        memory(60, 8),
        memory(61, -24),
        memory(25, 512, device=0),
    )
    assert memory_table(loaded) == tuple(
        MemoryRow(
            name=name,
            device=device,
            calls=calls,
            size_increase_bytes=change,
            self_size_increase_bytes=own_change,
            allocation_bytes=size,
            self_allocation_bytes=own,
        )
        for name, device, calls, change, own_change, size, own in (
            ("aten::addmm", 0, 1, 512, 512, 512, 512),
            ("aten::linear", 0, 1, 512, 0, 512, 0),
            ("aten::linear", -1, 1, 24, 0, 164, 100),
            ("aten::addmm", -1, 1, 24, 24, 64, 64),
            (None, -1, 2, -16, -16, 8, 8),
        )
    )


def test_a_scope_has_what_any_thread_launched_while_it_was_open() -> None:
    events: tuple[Event, ...] = (
        step(1, 0, 100),
        scope("loss", 10, 20),
        *launched(1, 15, 16, 5),
        scope("my backward", 40, 30),
        operator("autograd::engine::evaluate_function: MmBackward0", 45, 10, thread=2),
        *launched(2, 50, 51, 7, thread=2),
        *launched(3, 92, 95, 11, thread=3),
        scope("loss", 80, 10),
    )
    loss, backward = user_scope_table(trace(*events)) or ()
    assert (loss.name, loss.calls, known(loss.host).total_us, known(loss.host).ratio) == ("loss", 2, 30, 0.3)
    assert (backward.name, backward.calls, known(backward.host).total_us) == ("my backward", 1, 30)
    assert (known(loss.device).total_us, known(backward.device).total_us) == (5, 7)
    assert known(backward.device).ratio == 7 / 23


def test_scopes_that_torch_opens_are_not_the_users() -> None:
    names = ("ProfilerStep#1", "enumerate(DataLoader)#x.__next__", "Optimizer.step#Adam.step", "gloo:all_reduce")
    assert user_scope_table(trace(*(scope(name, 0, 10) for name in names))) is None


def test_copies_are_listed_with_their_launches_and_bytes() -> None:
    loaded = trace(
        step(1, 0, 100),
        launch(1, 0, 4),
        on_device("gpu_memcpy", 1, 10, 6, name="Memcpy HtoD (Pageable -> Device)", bytes=1000),
        launch(2, 20, 6),
        on_device("gpu_memcpy", 2, 30, 2, name="Memcpy HtoD (Pageable -> Device)", bytes=24),
        on_device("gpu_memset", 3, 40, 1, name="Memset (Device)"),  # no launch, no bytes
        *launched(4, 41, 50, 11),
    )
    copy, memset = transfer_table(loaded) or ()
    device, host = known(copy.device), known(copy.host)
    assert (copy.calls, copy.bytes, device.total_us, device.ratio) == (2, 1024, 8, 8 / 20)
    assert (host.total_us, host.mean_us, host.ratio) == (10, 5, 0.1)
    assert (memset.calls, memset.bytes, memset.host) == (1, None, None)


def test_an_operator_that_calls_only_itself_is_one_call() -> None:
    # 10 us with 6 of itself inside, of which 4 are a product's; a second call of 5 by another operator.
    found = rows(
        operator("aten::sum", 0, 10),
        operator("aten::sum", 2, 6),
        operator("aten::mm", 3, 4),
        operator("aten::mean", 20, 9),
        operator("aten::sum", 22, 5),
        operator("aten::sum", 23, 3),
        operator("aten::sum", 23, 2),
    )
    one = found["aten::sum"]
    assert (one.calls, one.host.total_us, one.host.max_us, one.host.min_us) == (2, 15, 10, 5)
    # 10 - 6 + (6 - 4), and all of the 5.
    assert (one.host_self.total_us, one.host_self.max_us, one.host_self.min_us) == (11, 6, 5)
    mean = found["aten::mean"]
    assert (mean.calls, mean.host.total_us, mean.host_self.total_us) == (1, 9, 4)
    assert sum(row.host_self.total_us for row in found.values()) == 10 + 9


def test_calls_of_an_operator_by_itself_are_counted_as_in_torchs_own_tables(tmp_path: Path) -> None:
    """The first passes its arguments on to itself, the second calls another beside, the third itself by way of one."""
    library = torch.library.Library("itself", "FRAGMENT")  # type: ignore[no-untyped-call]
    ops, calls = torch.ops.itself, dict[str, Callable[[torch.Tensor, int], torch.Tensor]]()
    calls["alone"] = lambda x, n: ops.alone(x, n - 1) if n else x @ x
    calls["beside"] = lambda x, n: ops.beside(x @ x, n - 1) if n else x @ x
    calls["by_way"] = lambda x, n: ops.of(x, n - 1) if n else x @ x
    calls["of"] = lambda x, n: ops.by_way(x, n)
    for name, function in calls.items():
        library.define(f"{name}(Tensor x, int n) -> Tensor")  # type: ignore[no-untyped-call]
        library.impl(name, function, "CPU")  # type: ignore[no-untyped-call]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for name in ("alone", "beside", "by_way"):
            getattr(ops, name)(torch.ones(8, 8), 1)
        torch.arange(3)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    ours = {row.name: row for row in operator_table(load_trace(tmp_path / "trace.json")) or ()}
    torchs = {one.key: one for one in profiler.key_averages() if one.key in ours}
    assert {name: row.calls for name, row in ours.items()} == {name: one.count for name, one in torchs.items()}
    assert [ours[f"itself::{name}"].calls for name in calls] == [1, 2, 2, 1]
    for name, row in ours.items():
        assert row.host.total_us == pytest.approx(torchs[name].cpu_time_total, abs=0.1)
        assert row.host_self.total_us == pytest.approx(torchs[name].self_cpu_time_total, abs=0.1)


# ---- traces that torch.profiler takes here and now

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
    assert [one.number for one in report.step_times.steps] == [1, 2, 3]
    for found in report.step_times.steps:
        parts = (found.data_loader_us, found.cpu_us, found.other_us)
        assert all(part is not None and part > 0 for part in parts)
        assert sum(round(1000 * (part or 0)) for part in parts) == round(found.wall_us * 1000)
    phases = {row.name: row.calls for row in report.phases or ()}
    assert phases == dict.fromkeys(("step", "data loader", "optimizer", "others"), STEPS)
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
