"""Runs without a profile, compared by hand: what a batch takes, what of it is the wait, and what is chance."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from lightning_flops.analysis.compare import compare_throughputs
from lightning_flops.analysis.differences import judge
from lightning_flops.report.compare_text import comparison_headline
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.profile import ThroughputSummary
from tests.analysis.in_memory import known
from tests.analysis.test_timing import run


def steady(wait: float, work: float, samples: int | None = 8, *, batches: int = 100) -> ThroughputSummary:
    return known(run([(wait, work, samples)] * batches))


def uneven(sec: float) -> ThroughputSummary:
    """Eight batches, in turn a tenth of a second shorter and longer."""
    return known(run([(0.0, sec - 0.1, 8), (0.0, sec + 0.1, 8)] * 4))


def compared(a: ThroughputSummary, b: ThroughputSummary) -> Comparison:
    return compare_throughputs([a], [b], sources=(["before"], ["after"]))


def ratios(comparison: Comparison) -> dict[str, float | None]:
    return {one.name: one.ratio for one in comparison.figures}


def test_the_difference_of_a_batch_is_that_of_the_wait_and_the_rest() -> None:
    found = compared(steady(0.5, 0.5), steady(0.25, 0.625))
    assert [(one.name, one.a_ns, one.b_ns, one.noise_ns) for one in (found.step, *found.parts)] == [
        ("batch", 1_000_000_000, 875_000_000, 0),
        ("data wait", 500_000_000, 250_000_000, 0),
        ("the rest", 500_000_000, 625_000_000, 0),
    ]
    # 8 samples in 1 s, then in 0.875; of these 0.5 and 0.25 waiting.
    assert ratios(found) == {
        "samples_per_sec": pytest.approx(1 / 0.875),
        "batch_cost_sec": 0.875,
        "reader_cost_sec": 0.5,
        "data_wait_ratio": pytest.approx(0.25 / 0.875 / 0.5),
    }
    assert judge(found, "samples_per_sec > 1.14")[0] == "holds" and judge(found, "batch_cost_sec > 1")[0] != "holds"


def test_noise_is_that_of_batches_within_the_runs() -> None:
    found = compared(uneven(1.0), uneven(1.1))
    # Welch: both variances are 8 · 0.1² / 7, of 8 batches each; Student's t of 14 degrees of freedom is 2.98.
    assert known(found.step.noise_ns) == pytest.approx(1e9 * 2.98 * math.sqrt(2 * 0.01 / 7), rel=1e-6)
    assert found.step.difference_ns == pytest.approx(1e8) and found.step.beyond_noise is False
    assert "within noise" in comparison_headline(found)
    assert judge(found, "batch_cost_sec > 1.05")[1].endswith(": within noise")


def test_a_small_difference_may_be_of_another_start() -> None:
    words = comparison_headline(compared(steady(0.5, 0.5), steady(0.5, 0.6)))
    assert "more than noise explains, but two starts of one program may differ by 30% more (99%" in words
    of_runs = compare_throughputs(
        [steady(0.5, 0.5), steady(0.5, 0.504)], [steady(0.5, 0.6), steady(0.5, 0.604)], sources=(["a", "b"], ["c", "d"])
    )
    # Means of 1.0 and 1.004 s beside 1.1 and 1.104: 9.92 (t of two degrees of freedom) · 0.002 · √2.
    assert known(of_runs.step.noise_ns) == pytest.approx(1e9 * 9.92 * 0.002 * math.sqrt(2), rel=1e-6)
    assert of_runs.is_told and (of_runs.a.source, of_runs.a.runs) == ("a and 1 more", 2)
    assert of_runs.a.about == "2 runs, each 100 batches, without a profile"
    other = compare_throughputs([steady(0.5, 0.5), uneven(1.0)], [uneven(1.0)], sources=(["a", "b"], ["c"]))
    assert other.a.about == "2 runs, the first 100 batches, without a profile"


def test_what_one_run_does_not_know_is_said_with_its_reason() -> None:
    unseen = replace(steady(0.0, 0.5, None), reader_ratio=None, reader_cost_sec=None, reader_stretches_sec=())
    found = compared(steady(0.5, 0.5), unseen)
    reasons = {one.name: one.reason for one in found.figures if one.reason}
    assert reasons["samples_per_sec"] == "not known in B: how many samples a batch has was not known"
    assert reasons["batches_per_sec"] == "not known in A: its rate is in samples/s"
    assert reasons["reader_cost_sec"] == "not known in B: no wait was seen"
    assert found.parts == () and found.step.b_ns == 500_000_000
    short = compared(steady(0.5, 0.5, batches=3), steady(0.5, 0.5))
    assert short.step.noise_ns is None and any(
        "before: what is noise is not known: it has 3 batches, and less than 4" in note for note in short.notes
    )
