"""What takes long and computes no products, in traced steps with round numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_flops.analysis.without_flops import WithoutFlops, longest_without_flops, what_helps
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import ModuleRecord, WindowRecord
from lightning_flops.schema.modules import ModuleTimes
from lightning_flops.schema.trace import TracedStep
from lightning_flops.schema.trace_steps import Durations
from tests.report.traced_windows import mlp_traced
from tests.report.windows import build_profile, cell


def of(window: WindowRecord, traced: TracedStep) -> tuple[str, str, float] | None:
    times = {
        module.name: module.times for module in build_profile(window, config=ProfilerConfig(), traced=traced).modules
    }
    found = longest_without_flops(
        cells=window.flops.cells,
        modules=window.modules,
        times={name: one for name, one in times.items() if one is not None},
        traced=traced,
    )
    return None if found is None else (found.kind, found.name, round(22 * found.share, 6))


def test_the_longest_operator_without_flops_is_found() -> None:
    window, traced = mlp_traced()
    # The optimizer's _foreach_add_ takes 2.5 ms, the activation 0.5 + 1, relu itself 0.3; aten::mm has FLOPs.
    assert of(window, traced) == ("operator", "aten::_foreach_add_", 2.5)


def test_a_class_is_all_its_modules_without_those_inside() -> None:
    window, traced = mlp_traced()
    loud = replace(window.modules[2], name="act", type_name="Loud")
    modules = (*window.modules[:2], loud, *window.modules[3:])
    times = {"act": _times(0.0005, 0.001), "drop": _times(0.002, 0.002)}
    found = longest_without_flops(cells=window.flops.cells, modules=modules, times=times, traced=traced)
    assert found is not None
    assert (found.kind, found.name) == ("class", "Dropout")
    assert round(found.share * 22, 6) == 4.0
    # Operators without FLOPs fill 0.3 ms of the forward and 2.5 of the optimizer: no more is at stake.
    assert round(found.stake * 22, 6) == 2.8


def test_a_class_of_which_one_module_has_flops_is_none_of_these() -> None:
    window, traced = mlp_traced()
    modules = (*window.modules, ModuleRecord(name="idle", type_name="Linear"))
    found = longest_without_flops(
        cells=window.flops.cells, modules=modules, times={"idle": _times(0.02, 0.0)}, traced=traced
    )
    assert found is not None
    assert found.name == "aten::_foreach_add_"


def test_an_operator_whose_flops_were_counted_computes_products() -> None:
    window, traced = mlp_traced()
    counted = replace(
        window.flops, cells=(*window.flops.cells, cell("", "optimizer", 9, operator="aten._foreach_add_"))
    )
    assert of(replace(window, flops=counted), traced) == ("class", "ReLU", 1.5)


def test_without_a_trace_nothing_is_found() -> None:
    window, traced = mlp_traced()
    assert longest_without_flops(cells=(), modules=window.modules, times={}, traced=None) is None
    assert of(window, replace(traced, tables=None)) is None


def test_of_a_device_its_own_time_counts_and_not_the_hosts() -> None:
    window, traced = mlp_traced()
    assert traced.tables is not None and traced.tables.operators is not None
    row = next(one for one in traced.tables.operators if one.name == "aten::relu")
    eleven = Durations(total_us=11_000.0, mean_us=11_000.0, max_us=11_000.0, min_us=11_000.0, ratio=None)
    tables = replace(traced.tables, operators=(replace(row, device_self=eleven, device=eleven),))
    assert of(window, replace(traced, tables=tables)) == ("operator", "aten::relu", 11.0)


@pytest.mark.parametrize("name", ["aten::empty", "aten::empty_like", "aten::new_empty", "aten::resize_"])
def test_nobody_is_told_to_fuse_what_only_allocates(name: str) -> None:
    one = WithoutFlops(kind="operator", name=name, share=0.3, stake=0.3)
    for compiles in (True, False):
        helps = what_helps(one, compiles=compiles)
        assert helps.startswith("It allocates memory") and "fuse" not in helps


def _times(forward_sec: float, backward_sec: float) -> ModuleTimes:
    return ModuleTimes(
        clock="host",
        forward_sec=forward_sec,
        own_forward_sec=forward_sec,
        backward_sec=backward_sec,
        own_backward_sec=backward_sec,
        forward_kernels=None,
        backward_kernels=None,
        forward_flops_per_sec=None,
        backward_flops_per_sec=None,
        forward_utilization=None,
        backward_utilization=None,
    )
