"""Operators, copies, scopes and memory; who encloses whom is held against a search through all that began before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_flops.schema.trace_events import OperatorRow
from lightning_flops.trace import load_trace
from lightning_flops.trace.memory import memory_table
from lightning_flops.trace.tables import operator_table, transfer_table, user_scope_table
from tests.analysis.trace_events import Event, kernel, launch, memory, node, on_device, operator, scope, step, trace


def rows(*events: Event) -> dict[str, OperatorRow]:
    return {row.name: row for row in operator_table(trace(*events)) or ()}


def test_self_time_is_what_called_operators_leave() -> None:
    found = rows(
        operator("aten::linear", 0, 50), operator("aten::t", 5, 10), operator("aten::transpose", 7, 4),
        operator("aten::addmm", 20, 25), operator("aten::linear", 60, 10), operator("aten::relu", 5, 30, thread=2),
    )  # fmt: skip
    linear, t = found["aten::linear"], found["aten::t"]
    assert (linear.calls, linear.host.total_us, linear.host_self.total_us) == (2, 60, 15 + 10)
    assert (linear.host.min_us, linear.host.mean_us, linear.host.max_us) == (10, 30, 50)
    assert (t.host.total_us, t.host_self.total_us) == (10, 6)
    # 50 and 10 of the first thread, 30 of the second: the self times of all.
    assert (linear.host_self.ratio, linear.host.ratio) == (25 / 90, 60 / 90)
    assert sum(row.host_self.ratio or 0 for row in found.values()) == 1
    assert linear.device is linear.device_self is None
    assert (linear.tensor_cores_eligible, t.tensor_cores_eligible) == (True, False)


def test_device_time_belongs_to_the_operator_that_launched_and_to_its_callers() -> None:
    found = rows(
        operator("aten::linear", 0, 50), operator("aten::addmm", 20, 25), launch(1, 30), kernel(1, 100, 40),
        launch(2, 31), on_device("gpu_memset", 2, 140, 5, name="Memset (Device)"),
        launch(3, 47), kernel(3, 150, 7),
        launch(4, 55), kernel(4, 160, 3),  # outside any operator
    )  # fmt: skip
    times = {name: (row.device, row.device_self) for name, row in found.items()}
    total = {name: [one and one.total_us for one in both] for name, both in times.items()}
    assert total == {"aten::addmm": [45, 45], "aten::linear": [52, 7]}
    assert [one and one.ratio for one in times["aten::linear"]] == [1, 7 / 52]


def test_a_kernel_without_its_launch_goes_to_the_operator_with_its_external_id() -> None:
    number: dict[str, Any] = {"External id": 5}
    found = rows(operator("aten::mm", 0, 50, **number), operator("aten::add", 60, 5), kernel(77, 100, 40, **number))
    assert (device := found["aten::mm"].device_self) is not None
    assert device.total_us == 40


def test_memory_of_called_operators_is_the_callers_too_but_not_its_own() -> None:
    loaded = trace(
        operator("aten::linear", 0, 50), memory(2, 100),
        operator("aten::addmm", 10, 30), memory(15, 64), memory(20, -40),
        memory(45, -100), memory(60, 8), memory(61, -24), memory(25, 512, device=0),
    )  # fmt: skip
    found = [
        (
            row.name, row.device, row.calls, row.size_increase_bytes, row.self_size_increase_bytes,
            row.allocation_bytes, row.self_allocation_bytes,
        )
        for row in memory_table(loaded) or ()
    ]  # fmt: skip
    assert found == [
        ("aten::addmm", 0, 1, 512, 512, 512, 512),
        ("aten::linear", 0, 1, 512, 0, 512, 0),
        ("aten::linear", -1, 1, 24, 0, 164, 100),
        ("aten::addmm", -1, 1, 24, 24, 64, 64),
        (None, -1, 2, -16, -16, 8, 8),
    ]


def test_a_scope_has_what_any_thread_launched_while_it_was_open() -> None:
    found = trace(
        step(1, 0, 100),
        scope("loss", 10, 20), launch(1, 15), kernel(1, 16, 5),
        scope("my backward", 40, 30), node(1, 45, 10, thread=2), launch(2, 50, thread=2), kernel(2, 51, 7),
        launch(3, 92, thread=3), kernel(3, 95, 11),
        scope("loss", 80, 10),
    )  # fmt: skip
    loss, backward = user_scope_table(found) or ()
    assert loss.host is not None and backward.host is not None and loss.device is not None
    assert backward.device is not None
    assert (loss.name, loss.calls, loss.host.total_us, loss.host.ratio) == ("loss", 2, 30, 0.3)
    assert (backward.name, backward.calls, backward.host.total_us) == ("my backward", 1, 30)
    assert (loss.device.total_us, backward.device.total_us, backward.device.ratio) == (5, 7, 7 / 23)


def test_scopes_that_torch_opens_are_not_the_users() -> None:
    names = ("ProfilerStep#1", "enumerate(DataLoader)#x.__next__", "Optimizer.step#Adam.step", "gloo:all_reduce")
    assert user_scope_table(trace(*(scope(name, 0, 10) for name in names))) is None


def test_copies_are_listed_with_their_launches_and_bytes() -> None:
    kind = "Memcpy HtoD (Pageable -> Device)"
    loaded = trace(
        step(1, 0, 100),
        launch(1, 0, 4), on_device("gpu_memcpy", 1, 10, 6, name=kind, bytes=1000),
        launch(2, 20, 6), on_device("gpu_memcpy", 2, 30, 2, name=kind, bytes=24),
        on_device("gpu_memset", 3, 40, 1, name="Memset (Device)"),  # no launch, no bytes
        launch(4, 41), kernel(4, 50, 11),
    )  # fmt: skip
    copy, memset = transfer_table(loaded) or ()
    assert copy.device is not None and copy.host is not None
    assert (copy.calls, copy.bytes, copy.device.total_us, copy.device.ratio) == (2, 1024, 8, 8 / 20)
    assert (copy.host.total_us, copy.host.mean_us, copy.host.ratio) == (10, 5, 0.1)
    assert (memset.calls, memset.bytes, memset.host) == (1, None, None)


def test_an_operator_that_calls_only_itself_is_one_call() -> None:
    # 10 us with 6 of itself inside, of which 4 are a product's; a second call of 5 by another operator.
    found = rows(
        operator("aten::sum", 0, 10), operator("aten::sum", 2, 6), operator("aten::mm", 3, 4),
        operator("aten::mean", 20, 9), operator("aten::sum", 22, 5), operator("aten::sum", 23, 3),
        operator("aten::sum", 23, 2),
    )  # fmt: skip
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
