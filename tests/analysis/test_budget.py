"""The budget of a step; the rows of every one are worked out by hand, in nanoseconds."""

from __future__ import annotations

from dataclasses import replace
from typing import cast, get_args

from lightning_flops.analysis.budget import build_budget
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import TimePhase
from lightning_flops.schema.step import Budget, BudgetKey, PartTiming, TimingProfile
from lightning_flops.schema.trace import PartFilling, TracedStep
from tests.analysis.in_memory import known
from tests.report import windows
from tests.report.traced_windows import mlp_traced, transformer_traced
from tests.report.windows import build_profile

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


def test_row_of_useful_flops_is_the_mfu_and_attention_that_is_not_executed_is_taken_back() -> None:
    window, traced = transformer_traced()
    profile = build_profile(window, config=ProfilerConfig(), traced=traced)
    found = rows(profile.budget)
    # 3744 G in bfloat16 at 312 T and 240 G in float32 at 19.5 T: 12 + 12.307692 ms. Recompute 48 G, skipped 168 G.
    assert found["model"] == 24_307_692
    assert found["other_flops"] == 153_846 - 538_461
    assert found["model"] == round(known(profile.rates.mfu) * 100_000_000)


def test_bytes_of_operators_without_flops_explain_a_part_of_them() -> None:
    # The gelu of block 0 writes 0.5 GB: at 2,039 GB/s of an A100 that takes 245,218 ns. Nothing else moves such bytes.
    window = windows.transformer_window()
    filling = {"forward": PartFilling(matmul_ns=80, operators_ns=20), "backward": PartFilling(matmul_ns=1)}
    traced = TracedStep(index=8, like_counted=True, files=(), tables=None, own_forward_sec=None, filling=filling)
    profile = build_profile(window, config=ProfilerConfig(), traced=traced)
    assert profile.memory_bytes_per_sec == 2039e9
    assert profile.budget is not None
    assert profile.budget.memory_ns == 245_218
    # Forward 30 ms of it 20% others; the optimizer's 10 ms have no trace.
    assert rows(profile.budget)["operators"] == 6_000_000


def part(name: str, seconds: float) -> PartTiming:
    phases = cast("tuple[TimePhase, ...]", tuple(one.replace(" ", "_") for one in name.split(" + ") if one))
    return PartTiming(phases=phases, mean_sec=seconds, typical_sec=seconds, steps_sec=(seconds,))


def timing(*parts: PartTiming) -> TimingProfile:
    whole = part("", sum(one.mean_sec for one in parts))
    return TimingProfile(stalls=None, parts=parts, global_step=whole, reader_sec=None, excluded_sec={})


def budget(*parts: PartTiming, filling: dict[str, PartFilling], model: float | None) -> Budget:
    traced = TracedStep(index=5, like_counted=True, files=(), tables=None, own_forward_sec=None, filling=filling)
    made = build_budget(
        timing=timing(*parts),
        traced=traced,
        peak_sec=(model, model),
        memory_sec=None,
        lower_bound=False,
    )
    assert made is not None
    return made


def test_flops_that_took_less_time_than_at_the_peak_give_no_row() -> None:
    # 1 s of forward: the trace gives products 0.1 s, but at the peak they need 0.5.
    filling = {"forward": PartFilling(matmul_ns=10, operators_ns=50, idle_ns=40)}
    made = budget(part("forward", 1.0), filling=filling, model=0.5)
    assert rows(made) == {
        "model": None,
        "other_flops": None,
        "compute": 100_000_000,
        "operators": 500_000_000,
        "idle": 400_000_000,
    }
    assert made.notes == ("FLOPs at the peak are n/a: matmul-like operators took less time than that.",)


def test_time_between_the_timed_steps_stands_beside_the_step() -> None:
    window = windows.mlp_window()
    first = replace(window.timed_steps[0], excluded_sec={"validation": 1.5, "epoch restart": 0.25, "my own": 0.5})
    profile = build_profile(replace(window, timed_steps=(first, *window.timed_steps[1:])), config=PEAK)
    # Eight steps of 20 ms on average, of which two, beside the middle half, took 10 ms longer.
    stalls = known(known(profile.timing).stalls)
    assert (stalls.steps, round(1e9 * stalls.seconds), stalls.part) == (
        2,
        20_000_000,
        "backward",
    )
    words = "Between steps: epoch restart 250 ms, my own 500 ms, validation 1.5 s."
    assert words in " ".join(str(profile).split())
