from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops.analysis.rates import mean, peak_seconds, per_second, ratio

ANY_NUMBER = st.one_of(st.none(), st.integers(), st.floats(), st.just(10**400), st.just(-(10**400)))


def test_rate_without_time_is_unknown_and_not_infinite() -> None:
    assert per_second(amount=600, seconds=0.0) is None
    assert per_second(amount=0, seconds=0.0) is None
    assert per_second(amount=600, seconds=None) is None


def test_negative_numbers_give_no_rate_even_when_their_signs_cancel() -> None:
    assert per_second(amount=-6, seconds=-2.0) is None
    assert per_second(amount=-6, seconds=2.0) is None
    assert per_second(amount=6, seconds=-2.0) is None


@settings(deadline=None)  # a busy machine is no failure
@given(ANY_NUMBER, ANY_NUMBER)
def test_rate_is_finite_and_not_negative_or_unknown(amount: float | None, seconds: float | None) -> None:
    rate = per_second(amount=amount, seconds=seconds)
    assert rate is None or (math.isfinite(rate) and rate >= 0)
    assert ratio(part=amount, whole=seconds) == rate


def test_mixed_dtypes_take_the_time_each_needs_at_its_own_peak() -> None:
    seconds = peak_seconds({"bfloat16": 300, "float32": 40}, peaks_flops_per_sec={"bfloat16": 100, "float32": 20})
    assert seconds == 300 / 100 + 40 / 20


def test_peak_time_is_unknown_when_a_dtype_that_spent_flops_has_no_peak() -> None:
    assert peak_seconds({"bfloat16": 300, "float8": 1}, peaks_flops_per_sec={"bfloat16": 100}) is None
    assert peak_seconds({"bfloat16": 300}, peaks_flops_per_sec={"bfloat16": 0.0}) is None


def test_dtype_that_spent_nothing_needs_no_peak() -> None:
    assert peak_seconds({"bfloat16": 300, "float8": 0}, peaks_flops_per_sec={"bfloat16": 100}) == 3
    assert peak_seconds({}, peaks_flops_per_sec={}) == 0


def test_mean_of_one_step_is_the_int_itself() -> None:
    exact = 2**70 + 1
    assert mean(total=exact, steps=1) == exact
    assert mean(total=3, steps=2) == 1.5
    assert mean(total=None, steps=2) is None
    assert mean(total=10**400, steps=2) is None
