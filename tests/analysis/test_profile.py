from __future__ import annotations

import json
import math
import re
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

import pytest

from lightning_flops.config import ProfilerConfig
from lightning_flops.records import OUTSIDE, FlopRecord, OperatorCell, PhaseBytes, PhaseSeconds, TimePhase, WindowRecord
from lightning_flops.report.scalars import profile_scalars
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import Budget, BudgetKey, Rates
from lightning_flops.schema.trace import PartFilling
from tests.analysis.in_memory import known
from tests.report import windows
from tests.report.traced_windows import mlp_traced, transformer_traced
from tests.report.windows import build_profile

TICK = 2.0**-10


def in_ticks(window: WindowRecord) -> WindowRecord:
    """*window* with every millisecond of its steps a 1,024th of a second: sums and means of such times are exact."""

    def ticks(seconds: PhaseSeconds) -> PhaseSeconds:
        return PhaseSeconds(
            **{field.name: TICK * round(1000 * getattr(seconds, field.name)) for field in fields(seconds)}
        )

    steps = (replace(one, seconds=ticks(one.seconds)) for one in window.timed_steps if one.seconds is not None)
    return replace(window, timed_steps=tuple(steps))


MLP = in_ticks(windows.mlp_window())
CONFIG = ProfilerConfig()


def test_counts_of_one_step_are_the_ints_that_were_counted() -> None:
    flops = build_profile(windows.lower_bound_window(), config=ProfilerConfig(recompute_fwd_factor=1.0)).flops
    assert flops.forward == (400 + 200 + 100) * 10**6
    assert flops.backward == (400 + 400) * 10**6
    assert flops.recompute == 400 * 10**6
    assert flops.optimizer == 50 * 10**6
    assert flops.backward_estimated == (2 + 1) * 700 * 10**6
    assert flops.model == (700 + 800) * 10**6
    assert flops.hardware == (700 + 800 + 400 + 50) * 10**6


def test_rates_are_totals_over_the_timed_steps_by_their_number() -> None:
    # Steps of 10 and 30 ticks: a mean of rates would be (140 + 46.7) / 2 MFLOP a tick, the rate of the totals is 70.
    profile = build_profile(MLP, config=ProfilerConfig(peak_flops_per_sec=64 * 1400e6, tokens_per_sample=3))
    rates, timing = profile.rates, known(profile.timing)
    assert (timing.forward_sec, timing.iter_sec, timing.global_step_sec) == (6 * TICK, 16 * TICK, 20 * TICK)
    assert rates.forward_flops_per_sec == 600e6 / (6 * TICK)
    assert rates.backward_flops_per_sec == 800e6 / (8 * TICK)
    assert rates.backward_flops_per_sec_estimated == 1200e6 / (8 * TICK)
    assert rates.forward_backward_flops_per_sec == 1400e6 / (14 * TICK)
    assert rates.iter_flops_per_sec == 1400e6 / (16 * TICK)
    assert rates.samples_per_sec == 100 / (20 * TICK)
    assert rates.iter_samples_per_sec == 100 / (16 * TICK)
    assert rates.data_wait_ratio == 2 / 20
    assert rates.mfu == 16 / 20  # at the peak, the step's FLOPs take a 64th of a second: 16 ticks


def test_mfu_of_a_mixed_run_holds_each_dtype_against_its_own_peak() -> None:
    profile = build_profile(in_ticks(windows.transformer_window()), config=CONFIG)
    model_sec = 3744e9 / 312e12 + 240e9 / 19.5e12
    hardware_sec = (3744e9 + 48e9) / 312e12 + 240e9 / 19.5e12
    # Of the model's attention 12 * (4 + 8) G are masked, of what is recomputed 12 * 2 G.
    assert [(one.dtype, one.model, one.hardware, one.executed_model, one.executed) for one in profile.dtypes] == [
        ("bfloat16", 3744 * 10**9, 3792 * 10**9, 3600 * 10**9, 3624 * 10**9),
        ("float32", *[240 * 10**9] * 4),
    ]
    assert profile.rates.mfu == model_sec / (100 * TICK)
    assert profile.rates.hfu == hardware_sec / (100 * TICK)
    assert profile.rates.hfu is not None and profile.rates.mfu is not None
    assert profile.rates.hfu > profile.rates.mfu  # by one convention for causal attention


def test_bytes_are_those_read_and_written_in_each_phase_elementwise_work_too() -> None:
    moved = build_profile(windows.transformer_window(), config=CONFIG).bytes_total
    assert moved == PhaseBytes(forward=3 * 10**9 + 10**9 + 500 * 10**6, backward=6 * 10**9)


def test_samples_and_tokens_are_those_of_all_ranks_with_different_data() -> None:
    window = in_ticks(windows.parallel_window())
    window = replace(window, timed_steps=tuple(replace(step, tokens=7000) for step in window.timed_steps))
    rates = build_profile(window, config=CONFIG).rates
    assert rates.samples_per_sec == 4 * 100 / (20 * TICK)
    assert rates.tokens_per_sec == 4 * 7000 / (20 * TICK)


def test_several_counted_steps_give_totals_and_mean() -> None:
    profile = build_profile(in_ticks(windows.variable_window()), config=CONFIG)
    assert profile.counted_steps == (3, 7)
    assert profile.flops.forward == 450 * 10**6
    assert profile.per_step(profile.modules[0].total.forward) == 450e6
    assert profile.rates.forward_flops_per_sec == 450e6 / (6 * TICK)
    assert profile.samples == (50 + 150) / 2


def test_mean_of_steps_is_the_nearest_whole_flop_and_rates_are_of_it() -> None:
    cells = (windows.cell("fc1", "forward", 5),)
    window = replace(MLP, flops=FlopRecord(cells=cells), counted_steps=(windows.step(3), windows.step(4)))
    profile = build_profile(window, config=CONFIG)
    assert profile.flops.forward == 3
    assert profile.rates.forward_flops_per_sec == 3 / (6 * TICK)


@pytest.mark.parametrize(
    ("forward", "factor", "backward"),
    # 32.5, and Python rounds a half to the even number; exact for counts that a float cannot hold.
    [(13, 0.0, 2 * 13), (13, 1.0, 3 * 13), (13, 0.5, 32), (2**60 + 1, 0.0, 2**61 + 2)],
)
def test_the_estimated_backward_is_twice_the_forward_and_what_is_said_to_be_repeated(
    forward: int, factor: float, backward: int
) -> None:
    window = replace(MLP, flops=FlopRecord(cells=(windows.cell("fc1", "forward", forward),)))
    profile = build_profile(window, config=ProfilerConfig(recompute_fwd_factor=factor))
    assert profile.flops.backward_estimated == backward


def in_gflops(forward: int, *, is_beyond: bool = False) -> dict[str, Any]:
    """A forward of so many GFLOPs, and twice as many for the backward, in the dtype of the MLP."""
    predicted = {("forward", "float32"): forward * 10**9, ("backward", "float32"): 2 * forward * 10**9}
    return {"predicted": predicted, "is_beyond": is_beyond}


def test_flops_of_a_window_are_those_of_its_timed_steps_where_a_formula_gives_them() -> None:
    window = in_ticks(windows.variable_window())
    seconds = PhaseSeconds(forward=6 * TICK, backward=8 * TICK, optimizer=2 * TICK)
    costs, walls = (1, 2, 3, 4), (1, 2, 3, 30)  # of typical ones (the middle half) the second and the third
    timed = tuple(
        replace(windows.step(10 + place), seconds=replace(seconds, other=wall), **in_gflops(cost))
        for place, (cost, wall) in enumerate(zip(costs, walls, strict=True))
    )
    profile = build_profile(replace(window, timed_steps=timed), config=CONFIG)
    assert profile.flops_of == "formula"
    assert (profile.flops.forward, profile.flops.backward) == (2_500_000_000, 5 * 10**9)
    assert profile.flops.backward_estimated == 5 * 10**9
    assert [(one.dtype, one.model) for one in profile.dtypes] == [("float32", 7_500_000_000)]
    assert profile.rates.forward_flops_per_sec == 2_500_000_000 / (6 * TICK)
    assert profile.typical_flops_ratio == 1.0  # 2.5 of 2.5
    assert profile.per_step(profile.modules[0].total.forward) == 450e6  # the counted ones'
    assert "FLOPs of a step, FLOP/s and MFU are of the 4 timed steps" in profile.notes[-1]
    dearest = replace(timed[0], **in_gflops(9, is_beyond=True))
    profile = build_profile(replace(window, timed_steps=(dearest, *timed[1:])), config=CONFIG)
    assert (profile.flops_of, profile.flops.forward) == ("estimate", 4_500_000_000)
    assert profile.typical_flops_ratio == 2.5 / 4.5
    assert "1 of them beyond the counted sizes" in profile.notes[-1]
    # What only other steps than the counted ones do is in none of the window's counts, and in the timed steps' FLOPs.
    other = replace(timed[0], predicted={("forward", "float32"): 10**9, ("recompute", "bfloat16"): 8 * 10**9})
    profile = build_profile(replace(window, timed_steps=(other, *timed[1:])), config=CONFIG)
    assert (profile.flops.forward, profile.flops.recompute) == (2_500_000_000, 2 * 10**9)
    assert [(one.dtype, one.hardware) for one in profile.dtypes] == [("float32", 7 * 10**9), ("bfloat16", 2 * 10**9)]


@pytest.mark.parametrize("without", ["a formula of one step", "phases that are all training", "another cost"])
def test_flops_of_a_window_are_those_of_its_counted_steps(without: str) -> None:
    window = in_ticks(MLP)
    timed = tuple(replace(one, **in_gflops(1)) for one in window.timed_steps)
    if without == "a formula of one step":
        timed = (*timed[:-1], replace(timed[-1], predicted=None))
    elif without == "another cost":
        flops = {("forward", "float32"): 600 * 10**6, ("backward", "float32"): 800 * 10**6}
        timed = tuple(replace(one, predicted=flops) for one in timed)
    else:
        window = replace(window, phases={"training": {}, "rollout": {}})
    profile = build_profile(replace(window, timed_steps=timed), config=CONFIG)
    assert (profile.flops_of, profile.flops.forward, profile.typical_flops_ratio) == ("counted", 600 * 10**6, 1.0)


def test_masks_skip_as_large_a_part_of_what_a_formula_gives_as_of_what_was_counted() -> None:
    window = in_ticks(windows.transformer_window())
    counted = build_profile(window, config=CONFIG)
    doubled = {
        (phase, dtype): 2 * sum(one.flops for one in window.flops.cells if (one.phase, one.dtype) == (phase, dtype))
        for phase in ("forward", "backward", "recompute")
        for dtype in ("bfloat16", "float32")
    }
    timed = tuple(replace(one, predicted=doubled) for one in window.timed_steps)
    profile = build_profile(replace(window, timed_steps=timed), config=CONFIG)
    assert profile.flops.skipped == 2 * counted.flops.skipped > 0
    assert [one.executed_model for one in profile.dtypes] == [2 * one.executed_model for one in counted.dtypes]


def test_window_without_timed_steps_has_counts_and_no_rates() -> None:
    profile = build_profile(windows.untimed_window(), config=ProfilerConfig(peak_flops_per_sec=1e12))
    assert profile.timing is None
    assert profile.flops.forward == 600 * 10**6
    for field in fields(Rates):
        assert getattr(profile.rates, field.name) is None
        assert profile.unavailable[field.name] == "no step was timed"


def test_unknown_device_has_no_utilization_and_says_which_peak_is_missing() -> None:
    profile = build_profile(MLP, config=CONFIG)
    assert profile.rates.mfu is None
    assert profile.rates.hfu is None
    assert (
        profile.unavailable["mfu"]
        == "no dense peak is known for float32 on cpu; run lightning-flops peak, or set peak_flops_per_sec"
    )


def test_phases_that_are_mixed_show_only_their_sum() -> None:
    mixed: tuple[TimePhase, ...] = ("forward", "backward")
    profile = build_profile(replace(MLP, mixed_phases=mixed), config=CONFIG)
    timing = known(profile.timing)
    assert (timing.forward_sec, timing.backward_sec) == (None, None)
    assert timing.forward_backward_sec == 14 * TICK
    assert timing.iter_sec == 16 * TICK
    assert [part.name for part in timing.parts] == ["data wait", "transfer", "forward + backward", "optimizer", "other"]
    assert sum(part.mean_sec for part in timing.parts) == timing.global_step_sec
    assert profile.rates.forward_flops_per_sec is None
    assert profile.unavailable["forward_flops_per_sec"] == "the times of these phases cannot be separated"
    assert profile.rates.forward_backward_flops_per_sec == 1400e6 / (14 * TICK)


@pytest.mark.parametrize("wrong", [-0.001, math.nan, math.inf, 1e300])
def test_step_whose_clock_cannot_be_right_is_left_out_and_told(wrong: float) -> None:
    good, bad = MLP.timed_steps[0], windows.step(6, seconds=PhaseSeconds(forward=wrong, backward=0.5))
    profile = build_profile(replace(MLP, timed_steps=(good, bad)), config=CONFIG)
    assert profile.timed_steps == (5,)
    assert known(profile.timing).global_step_sec == 10 * TICK
    assert "Left out: 1 timed step with times that cannot be right." in profile.notes


def test_utilization_above_the_peak_is_no_figure_and_says_why() -> None:
    profile = build_profile(MLP, config=ProfilerConfig(peak_flops_per_sec=1e9))
    assert (profile.rates.mfu, profile.rates.hfu) == (None, None)
    # 1.4 GFLOPs take 1.4 s at this peak, and took 20 ticks.
    assert profile.unavailable["mfu"].startswith(f"MFU would be {140 / (20 * TICK):.4g}%, which is impossible: ")
    words = " ".join(str(profile).split())
    reason = "the peak (--peak, peak_flops_per_sec) is too low, or the clock did not wait for the device."
    assert re.search(rf"MFU and HFU n/a: MFU would be [^:]*: {re.escape(reason)}", words.split("---")[0])
    assert words.count("FLOPs at the peak are n/a") == 1
    assert not any("mfu" in tag for tag in profile_scalars(profile))


def _floats_of(value: object) -> list[float]:
    if isinstance(value, float):
        return [value]
    if is_dataclass(value):
        return [number for field in fields(value) for number in _floats_of(getattr(value, field.name))]
    if isinstance(value, dict):
        return [number for item in value.values() for number in _floats_of(item)]
    if isinstance(value, tuple):
        return [number for item in value for number in _floats_of(item)]
    return []


@pytest.mark.parametrize("peak", [None, 1.0, 1e15])
@pytest.mark.parametrize("name", windows.WINDOWS)
def test_any_window_gives_finite_numbers_that_survive_json(name: str, peak: float | None) -> None:
    profile = build_profile(windows.WINDOWS[name](), config=ProfilerConfig(peak_flops_per_sec=peak))
    assert all(math.isfinite(number) for number in _floats_of(profile))
    for field in fields(Rates):
        rate = getattr(profile.rates, field.name)
        assert (rate is None) == (field.name in profile.unavailable)
        assert rate is None or rate >= 0
    text = profile.to_json()
    assert Profile.from_json(text) == profile
    assert Profile.from_json(text).to_json() == text
    json.loads(text, parse_constant=pytest.fail)


# ---- the budget of a step; the rows of every one are worked out by hand, in nanoseconds

PEAK = ProfilerConfig(peak_flops_per_sec=700e9)


def rows(budget: Budget | None) -> dict[str, int | None]:
    """Rows that took time, and those that are not known."""
    assert budget is not None
    assert list(budget.rows_ns) == list(get_args(BudgetKey)) and len(budget.rows_ns) == 8
    assert sum(ns or 0 for ns in budget.rows_ns.values()) == budget.wall_ns
    return {key: ns for key, ns in budget.rows_ns.items() if ns != 0}


UNKNOWN = dict.fromkeys(("operators", "communication", "idle"))
"""Rows that only a trace divides."""


def test_shares_of_the_traced_step_divide_the_times_of_the_timed_steps() -> None:
    window, traced = mlp_traced()
    profile = build_profile(window, config=PEAK, traced=traced)
    # Timed: data wait 2 ms, forward 6, backward 8, optimizer 2, other 2. Traced: forward 5 ms, of it 2.6 products and
    # 0.3 others; backward 10, of it 6.5 products; optimizer 3, of it 2.5 others.
    # Products: 6 * 2.6 / 5 + 8 * 6.5 / 10 = 8.32 ms; 1.4 GFLOPs at 700 GFLOP/s are 2 ms of them.
    # Others: 6 * 0.3 / 5 + 2 * 2.5 / 3 = 2.026667 ms. Idle: 6 * 2.1 / 5 + 8 * 3.5 / 10 + 2 * 0.5 / 3 = 5.653333 ms.
    assert rows(profile.budget) == {
        "model": 2_000_000,
        "compute": 6_320_000,
        "operators": 2_026_667,
        "idle": 5_653_333,
        "data": 2_000_000,
        "other": 2_000_000,
    }
    assert known(profile.budget).notes == ()


def test_without_a_trace_what_it_would_tell_is_not_known_and_stands_in_one_row() -> None:
    profile = build_profile(windows.mlp_window(), config=PEAK)
    assert rows(profile.budget) == {
        "model": 2_000_000,
        "compute": 14_000_000,
        **UNKNOWN,
        "data": 2_000_000,
        "other": 2_000_000,
    }
    assert len(known(profile.budget).notes) == 1


def test_a_wait_for_data_that_is_not_apart_from_the_rest_is_not_known_and_no_time_is_lost() -> None:
    mixed = replace(windows.mlp_window(), mixed_phases=("data_wait", "other"))
    budget = build_profile(mixed, config=PEAK).budget
    # Data wait 2 ms and other 2 ms are one part.
    assert (rows(budget)["data"], rows(budget)["other"], known(budget).wall_ns) == (None, 4_000_000, 20_000_000)


def test_attention_that_is_not_executed_takes_no_time_below_zero() -> None:
    window, traced = transformer_traced()
    profile = build_profile(window, config=ProfilerConfig(), traced=traced)
    found = rows(profile.budget)
    # Of the model 3744 - 144 G are executed, in bfloat16 at 312 T, and 240 G in float32 at 19.5 T: 11.538462 +
    # 12.307692 ms. Of 48 G of recompute 24 are executed.
    assert (found["model"], found["other_flops"]) == (23_846_154, 76_923)
    # Kernels take 26 ms of the forward's 30, and 53.5 fill the 50 of the backward; the optimizer's 10 are not traced.
    assert found["idle"] == 4_000_000
    assert found["compute"] == 26_000_000 + 50_000_000 + 10_000_000 - 23_846_154 - 76_923


def test_flops_outside_the_model_are_in_the_row_of_their_time() -> None:
    # The products of a callback, whose time is in other: at the peak they would take 3 ms of the model's 16.
    window = windows.mlp_window()
    cells = [
        OperatorCell(module=OUTSIDE, phase="outside", operator="aten.mm", dtype=dtype, flops=2_100_000_000)
        for dtype in ("float32", "float64")
    ]
    flops = replace(window.flops, cells=(*window.flops.cells, *cells))
    alone, beside = (build_profile(one, config=PEAK) for one in (window, replace(window, flops=flops)))
    assert (beside.flops.outside, beside.flops.hardware) == (4_200_000_000, alone.flops.hardware)
    assert (beside.budget, beside.dtypes, beside.rates) == (alone.budget, alone.dtypes, alone.rates)


def test_flops_that_took_less_time_than_at_the_peak_give_no_row() -> None:
    # A tenth of 6 + 8 + 2 ms are products, 1.6 ms, but at the peak they need 2.
    tenth = PartFilling(matmul_ns=10, operators_ns=50, idle_ns=40)
    traced = windows.traced(filling=dict.fromkeys(("forward", "backward", "optimizer"), tenth))
    made = known(build_profile(windows.mlp_window(), config=PEAK, traced=traced).budget)
    assert rows(made) == {
        "model": None,
        "other_flops": None,
        "compute": 1_600_000,
        "operators": 8_000_000,
        "idle": 6_400_000,
        "data": 2_000_000,
        "other": 2_000_000,
    }
    assert made.notes == ("FLOPs at the peak are n/a: matmul-like operators took less time than that.",)


def test_time_between_the_timed_steps_stands_beside_the_step() -> None:
    window = windows.mlp_window()
    first = replace(window.timed_steps[0], excluded_sec={"validation": 1.5, "epoch restart": 0.25, "my own": 0.5})
    profile = build_profile(replace(window, timed_steps=(first, *window.timed_steps[1:])), config=PEAK)
    # Eight steps of 20 ms on average, of which two, beside the middle half, took 10 ms longer.
    stalls = known(known(profile.timing).stalls)
    assert (stalls.steps, round(1e9 * stalls.seconds), stalls.part) == (2, 20_000_000, "backward")
    words = "Between steps: epoch restart 250 ms, my own 500 ms, validation 1.5 s."
    assert words in " ".join(str(profile).split())


def test_a_device_that_copies_computes_nothing() -> None:
    # Of 6, 8 and 2 ms a quarter each: products, other operators, copies, and nothing at all.
    quarter = PartFilling(matmul_ns=10, operators_ns=10, copies_ns=10, idle_ns=10)
    traced = windows.traced(filling=dict.fromkeys(("forward", "backward", "optimizer"), quarter))
    found = rows(build_profile(windows.mlp_window(), config=ProfilerConfig(), traced=traced).budget)
    assert (found["idle"], found["operators"], found["compute"]) == (8_000_000, 4_000_000, 4_000_000)
