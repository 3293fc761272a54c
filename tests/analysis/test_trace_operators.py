"""Operators, copies, scopes and memory; who encloses whom is held against a search through all that began before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_flops.schema.trace_events import MemoryRow, OperatorRow
from lightning_flops.trace import load_trace
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.memory import memory_table
from lightning_flops.trace.tables import (
    operator_table,
    transfer_table,
    user_scope_table,
)
from tests.analysis.trace_events import Event, kernel, launch, launched, memory, on_device, operator, scope, step, trace


def rows(loaded: Trace) -> dict[str, OperatorRow]:
    return {row.name: row for row in operator_table(loaded) or ()}


def test_self_time_is_what_called_operators_leave() -> None:
    found = rows(
        trace(
            operator("aten::linear", 0, 50),
            operator("aten::t", 5, 10),
            operator("aten::transpose", 7, 4),
            operator("aten::addmm", 20, 25),
            operator("aten::linear", 60, 10),
            operator("aten::relu", 5, 30, thread=2),
        )
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
        trace(
            operator("aten::linear", 0, 50),
            operator("aten::addmm", 20, 25),
            *launched(1, 30, 100, 40),
            launch(2, 31),
            on_device("gpu_memset", 2, 140, 5, name="Memset (Device)"),
            *launched(3, 47, 150, 7),
            *launched(4, 55, 160, 3),  # outside any operator
        )
    )
    addmm, linear = found["aten::addmm"], found["aten::linear"]
    assert addmm.device is not None
    assert linear.device is not None
    assert addmm.device_self is not None
    assert linear.device_self is not None
    assert (addmm.device.total_us, addmm.device_self.total_us) == (45, 45)
    assert (linear.device.total_us, linear.device_self.total_us) == (52, 7)
    assert linear.device_self.ratio == 7 / 52


def test_a_kernel_without_its_launch_goes_to_the_operator_with_its_external_id() -> None:
    orphan = kernel(77, 100, 40)
    orphan["args"]["External id"] = 5
    found = rows(trace(operator("aten::mm", 0, 50, **{"External id": 5}), operator("aten::add", 60, 5), orphan))
    device = found["aten::mm"].device_self
    assert device is not None
    assert device.total_us == 40


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
    assert loss.host is not None and backward.host is not None
    assert (loss.name, loss.calls, loss.host.total_us, loss.host.ratio) == ("loss", 2, 30, 0.3)
    assert (backward.name, backward.calls, backward.host.total_us) == ("my backward", 1, 30)
    assert loss.device is not None
    assert backward.device is not None
    assert (loss.device.total_us, backward.device.total_us) == (5, 7)
    assert backward.device.ratio == 7 / 23


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
    assert copy.device is not None
    assert (copy.calls, copy.bytes, copy.device.total_us, copy.device.ratio) == (2, 1024, 8, 8 / 20)
    assert copy.host is not None
    assert (copy.host.total_us, copy.host.mean_us, copy.host.ratio) == (10, 5, 0.1)
    assert (memset.calls, memset.bytes, memset.host) == (1, None, None)


def test_an_operator_that_calls_only_itself_is_one_call() -> None:
    # 10 us with 6 of itself inside, of which 4 are a product's; a second call of 5 by another operator.
    found = rows(
        trace(
            operator("aten::sum", 0, 10),
            operator("aten::sum", 2, 6),
            operator("aten::mm", 3, 4),
            operator("aten::mean", 20, 9),
            operator("aten::sum", 22, 5),
            operator("aten::sum", 23, 3),
            operator("aten::sum", 23, 2),
        )
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
    ours = rows(load_trace(tmp_path / "trace.json"))
    torchs = {one.key: one for one in profiler.key_averages() if one.key in ours}
    assert {name: row.calls for name, row in ours.items()} == {name: one.count for name, one in torchs.items()}
    assert [ours[f"itself::{name}"].calls for name in calls] == [1, 2, 2, 1]
    for name, row in ours.items():
        assert row.host.total_us == pytest.approx(torchs[name].cpu_time_total, abs=0.1)
        assert row.host_self.total_us == pytest.approx(torchs[name].self_cpu_time_total, abs=0.1)
