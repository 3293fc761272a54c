from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from lightning_flops.config import ProfilerConfig
from lightning_flops.records import ProcessorLoss, WindowRecord
from lightning_flops.report.scalars import monitor_scalars, profile_scalars
from tests.report import windows
from tests.report.windows import build_profile


def scalars_of(window: WindowRecord, **settings: Any) -> dict[str, float]:
    """Scalars of the profile of *window*, by their tags below the prefix."""
    scalars = profile_scalars(build_profile(window, config=ProfilerConfig(**settings)))
    assert all(tag.startswith("flops_profiler/") for tag in scalars)
    return {tag.removeprefix("flops_profiler/"): value for tag, value in scalars.items()}


def test_every_scalar_of_a_whole_profile_has_its_tag_and_value() -> None:
    model_sec = 3744e9 / 312e12 + 240e9 / 19.5e12
    assert scalars_of(windows.transformer_window()) == pytest.approx(
        {
            "fwd_flops": 1328e9,
            "bwd_flops": 2656e9,
            "bwd_flops_estimated": 2656e9,
            "recompute_flops": 48e9,
            "iter_flops": 4032e9,
            "fwd_flops_per_sec": 1328e9 / 0.030,
            "bwd_flops_per_sec": 2704e9 / 0.050,
            "bwd_flops_per_sec_estimated": 2656e9 / 0.050,
            "fwd_bwd_flops_per_sec": 4032e9 / 0.080,
            "iter_flops_per_sec": 4032e9 / 0.090,
            "fwd_latency_sec": 0.030,
            "bwd_latency_sec": 0.050,
            "step_latency_sec": 0.010,
            "iter_latency_sec": 0.090,
            "data_wait_sec": 0.005,
            "global_step_sec": 0.100,
            "samples_per_sec": 8 / 0.100,
            "iter_samples_per_sec": 8 / 0.090,
            "tokens_per_sec": 4000 / 0.100,
            "mfu": model_sec / 0.100,
            "hfu": (model_sec + 48e9 / 312e12) / 0.100,
            "params": 154e6,
        },
        rel=1e-12,
    )


def test_heat_that_was_measured_is_a_scalar() -> None:
    used = ProcessorLoss(seconds=2.0, batches_sec=(), waited_share=None, heat_share=0.25)
    found, unread = (scalars_of(replace(windows.transformer_window(), processor=one)) for one in (used, None))
    assert dict(found.items() - unread.items()) == {"heat_limited_ratio": 0.25}


def test_scalar_that_is_not_available_is_left_out() -> None:
    assert scalars_of(windows.untimed_window()) == {
        "fwd_flops": 600e6,
        "bwd_flops": 800e6,
        "bwd_flops_estimated": 1200e6,
        "recompute_flops": 0.0,
        "iter_flops": 1400e6,
        "params": 3_002_500.0,
    }


def test_a_loop_that_does_not_train_has_no_scalar_of_a_backward_or_an_optimizer() -> None:
    assert scalars_of(windows.predict_window(), peak_flops_per_sec=600e9) == pytest.approx(
        {
            "fwd_flops": 600e6,
            "fwd_flops_per_sec": 600e6 / 0.012,
            "fwd_latency_sec": 0.012,
            "data_wait_sec": 0.002,
            "global_step_sec": 0.020,
            "samples_per_sec": 100 / 0.020,
            "iter_samples_per_sec": 100 / 0.012,
            "mfu": 600e6 / 600e9 / 0.020,
            "hfu": 600e6 / 600e9 / 0.020,
            "params": 3_002_500.0,
        },
        rel=1e-12,
    )


def test_lower_bound_shows_among_the_scalars_and_only_then() -> None:
    assert scalars_of(windows.lower_bound_window())["heavy_operators_uncounted"] == 1
    assert "heavy_operators_uncounted" not in scalars_of(windows.mlp_window())


def test_scalars_of_several_counted_steps_are_their_mean() -> None:
    assert scalars_of(windows.variable_window())["fwd_flops"] == 450e6


KNOWN: dict[str, Any] = {
    **{"seconds": 4.0, "data_wait_sec": 1.0, "batches": 20, "samples": 80, "dp_size": 3, "tokens": 1000},
    **{"padding_ratio": 0.25, "model_flops": 600, "model_flops_peak_sec": 0.5, "estimated_ratio": 0.125},
}
"""What went by between two readings."""


def test_monitor_divides_what_went_by_by_its_time() -> None:
    assert monitor_scalars(**KNOWN) == {
        "flops_monitor/samples_per_sec": 3 * 80 / 4.0,
        "flops_monitor/batches_per_sec": 20 / 4.0,
        "flops_monitor/data_wait_ratio": 1.0 / 4.0,
        "flops_monitor/tokens_per_sec": 3 * 1000 / 4.0,
        "flops_monitor/padding_ratio": 0.25,
        "flops_monitor/mfu": 0.5 / 4.0,
        "flops_monitor/model_flops_per_sec": 600 / 4.0,
        "flops_monitor/estimated_ratio": 0.125,
    }


def test_monitor_leaves_out_what_it_does_not_know() -> None:
    names = ("samples", "tokens", "padding_ratio", "model_flops", "model_flops_peak_sec", "estimated_ratio")
    scalars = monitor_scalars(**KNOWN | dict.fromkeys(names))
    assert scalars.keys() == {"flops_monitor/batches_per_sec", "flops_monitor/data_wait_ratio"}


@settings(deadline=None)  # a busy machine is no failure
@given(st.floats(), st.floats(), st.integers(), st.integers(), st.none() | st.integers(), st.none() | st.floats())
def test_monitor_writes_no_number_that_is_not_finite(
    seconds: float, data_wait_sec: float, batches: int, flops: int, samples: int | None, peak_sec: float | None
) -> None:
    drawn = {"seconds": seconds, "data_wait_sec": data_wait_sec, "batches": batches, "samples": samples}
    drawn |= {"tokens": flops, "model_flops": flops, "model_flops_peak_sec": peak_sec}
    scalars = monitor_scalars(**KNOWN | drawn)
    assert all(math.isfinite(value) and value >= 0 for value in scalars.values())


def test_what_goes_by_in_two_seconds_on_four_ranks() -> None:
    given: dict[str, Any] = {"data_wait_sec": 0.5, "batches": 4, "tokens": 100, "padding_ratio": None}
    for peak_sec, shares in ((1.0, {"flops_monitor/mfu": 0.5}), (3.0, {})):  # 150% of the peak cannot be
        found = monitor_scalars(
            seconds=2.0, samples=32, dp_size=4, model_flops=1e9, model_flops_peak_sec=peak_sec, **given
        )
        assert found == shares | {
            "flops_monitor/samples_per_sec": 64.0,
            "flops_monitor/batches_per_sec": 2.0,
            "flops_monitor/data_wait_ratio": 0.25,
            "flops_monitor/tokens_per_sec": 200.0,
            "flops_monitor/model_flops_per_sec": 0.5e9,
        }
