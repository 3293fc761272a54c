"""Rooflines worked out by hand."""

from __future__ import annotations

from dataclasses import replace

from lightning_flops.analysis.roofline import Roof, module_rooflines, operator_rooflines
from lightning_flops.config import ProfilerConfig
from lightning_flops.schema.step import Roofline
from tests.report.traced_windows import mlp_traced
from tests.report.windows import build_profile, cell

ROOF = Roof(peak_of={"bfloat16": 1000.0, "float32": 100.0}.get, memory_bytes_per_sec=50.0)


def test_a_module_can_reach_the_lesser_of_its_intensity_times_bandwidth_and_the_peak() -> None:
    cells = (
        cell("few", "forward", 400, dtype="bfloat16", bytes_read=150, bytes_written=50),
        cell("many", "forward", 40_000, dtype="bfloat16", bytes_read=100, bytes_written=100),
    )
    found = module_rooflines(cells, {}, ROOF, counted_steps=1)
    # 400 / 200 = 2 FLOP/byte, times 50 byte/s are 100 FLOP/s; 200 FLOP/byte would be 10,000, above the peak.
    assert found["few"] == Roofline(flops_per_byte=2.0, achieved_flops_per_sec=None, attainable_flops_per_sec=100.0)
    assert found["many"] == Roofline(flops_per_byte=200.0, achieved_flops_per_sec=None, attainable_flops_per_sec=1000.0)
    # The root: 40,400 FLOPs at the peak take 40.4 s, its 400 bytes 8 s.
    assert found[""].attainable_flops_per_sec == 1000.0
    assert found[""].flops_per_byte == 101.0


def test_peak_of_a_mix_of_dtypes_is_that_of_all_its_flops_at_their_peaks() -> None:
    cells = (
        cell("", "forward", 500, dtype="bfloat16", bytes_read=1),
        cell("", "backward", 50, dtype="float32", bytes_read=1),
    )
    # 0.5 s and 0.5 s: 550 FLOPs in a second.
    assert module_rooflines(cells, {}, ROOF, counted_steps=1)[""].attainable_flops_per_sec == 550.0


def test_what_is_not_known_is_none() -> None:
    cells = (cell("a", "forward", 10), cell("b", "forward", 10, dtype="float8", bytes_read=1), cell("c", "forward", 0))
    found = module_rooflines(cells, {}, ROOF, counted_steps=1)
    assert found["a"] == Roofline(flops_per_byte=None, achieved_flops_per_sec=None, attainable_flops_per_sec=None)
    assert found["b"] == Roofline(flops_per_byte=10.0, achieved_flops_per_sec=None, attainable_flops_per_sec=None)
    assert "c" not in found
    no_bandwidth = replace_bandwidth(None)
    assert module_rooflines(cells, {}, no_bandwidth, counted_steps=1)["b"].attainable_flops_per_sec is None


def replace_bandwidth(bandwidth: float | None) -> Roof:
    return replace(ROOF, memory_bytes_per_sec=bandwidth)


def test_work_of_the_optimizer_is_no_modules() -> None:
    cells = (cell("a", "forward", 10, bytes_read=1), cell("a", "optimizer", 90, bytes_read=9))
    assert module_rooflines(cells, {}, ROOF, counted_steps=1)["a"].flops_per_byte == 10.0


def test_modules_and_operators_of_a_traced_step_have_what_they_achieved() -> None:
    window, traced = mlp_traced()
    profile = build_profile(window, config=ProfilerConfig(), traced=traced)
    # fc1: 400 M forward in 2 ms, 400 M backward in 3: 800 M in 5 ms. fc2: 600 M in 1 + 4 ms.
    achieved = {one.name: one.roofline.achieved_flops_per_sec for one in profile.modules if one.roofline is not None}
    assert {name: round(rate or 0) for name, rate in achieved.items() if name} == {
        "fc1": 160 * 10**9,
        "fc2": 120 * 10**9,
    }
    # aten.addmm ran twice in both steps: 600 M in 2.6 ms. aten.mm ran three times in one, twice in the other.
    by_operator = {one.operator: one.roofline for one in profile.operators}
    addmm, mm = by_operator["aten.addmm"], by_operator["aten.mm"]
    assert addmm is not None and mm is not None
    assert round(addmm.achieved_flops_per_sec or 0) == round(600e6 / 0.0026)
    assert mm.achieved_flops_per_sec is None


def test_counts_over_several_steps_are_held_to_the_time_of_one() -> None:
    _, traced = mlp_traced()
    cells = (cell("", "forward", 2 * 600_000_000, operator="aten.addmm", calls=4, bytes_read=4),)
    found = operator_rooflines(cells, traced, ROOF, counted_steps=2)["aten.addmm"]
    assert round(found.achieved_flops_per_sec or 0) == round(600e6 / 0.0026)
    assert found.flops_per_byte == 300_000_000.0
