"""Rooflines worked out by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_flops.analysis.roofline import Roof, build_operators, work_of_modules
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import OperatorCell
from tests.report.traced_windows import mlp_traced
from tests.report.windows import build_profile, cell

ROOF = Roof(peaks={"bfloat16": 1000.0, "float32": 100.0}, memory_bytes_per_sec=50.0)


def attainable(*cells: OperatorCell, roof: Roof = ROOF) -> Mapping[str, float | None]:
    return {name: work.attainable(roof) for name, work in work_of_modules(cells).items()}


def test_a_module_can_reach_the_lesser_of_its_intensity_times_bandwidth_and_the_peak() -> None:
    found = attainable(
        cell("few", "forward", 400, dtype="bfloat16", bytes_read=150, bytes_written=50),
        cell("many", "forward", 40_000, dtype="bfloat16", bytes_read=100, bytes_written=100),
    )
    # 400 / 200 = 2 FLOP/byte, times 50 byte/s are 100 FLOP/s; 200 FLOP/byte would be 10,000, above the peak.
    # The root: 40,400 FLOPs at the peak take 40.4 s, its 400 bytes 8 s.
    assert found == {"few": 100.0, "many": 1000.0, "": 1000.0}


def test_peak_of_a_mix_of_dtypes_is_that_of_all_its_flops_at_their_peaks() -> None:
    found = attainable(
        cell("", "forward", 500, dtype="bfloat16", bytes_read=1),
        cell("", "backward", 50, dtype="float32", bytes_read=1),
    )
    # 0.5 s and 0.5 s: 550 FLOPs in a second.
    assert found[""] == 550.0


def test_what_is_not_known_is_none_and_work_of_the_optimizer_is_no_modules() -> None:
    cells = (cell("a", "forward", 10), cell("b", "forward", 10, dtype="float8", bytes_read=1))
    assert attainable(*cells) == {"a": None, "b": None, "": None}
    unlimited = cell("c", "forward", 10, bytes_read=1)
    assert attainable(unlimited, roof=replace(ROOF, memory_bytes_per_sec=None))["c"] is None
    optimizer = cell("c", "optimizer", 90, bytes_read=900)
    assert attainable(unlimited, optimizer)["c"] == 100.0


def test_operators_of_a_traced_step_have_what_they_achieved() -> None:
    window, traced = mlp_traced()
    profile = build_profile(window, config=ProfilerConfig(), traced=traced)
    # aten.addmm ran twice in both steps: 600 M in 2.6 ms. aten.mm ran three times in one, twice in the other.
    achieved = {one.operator: one.achieved_flops_per_sec for one in profile.operators}
    assert round(achieved["aten.addmm"] or 0) == round(600e6 / 0.0026)
    assert achieved["aten.mm"] is None


def test_counts_over_several_steps_are_held_to_the_time_of_one_and_to_twice_the_peak() -> None:
    _, traced = mlp_traced()
    cells = (cell("", "forward", 2 * 600_000_000, operator="aten.addmm", calls=4, bytes_read=4),)
    roof = replace(ROOF, peaks={"float32": 600e6 / 0.0052})
    (found,), notes = build_operators(cells, traced, roof, counted_steps=2)
    assert (round(found.achieved_flops_per_sec or 0), notes) == (round(600e6 / 0.0026), ())
    (beyond,), (note,) = build_operators(cells, traced, ROOF, counted_steps=2)
    assert beyond.achieved_flops_per_sec is None
    assert note.startswith("Left out, as they would be beyond the device's peak: FLOP/s of aten.addmm (2,307,692,307.7")
