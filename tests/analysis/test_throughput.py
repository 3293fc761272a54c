from __future__ import annotations

from lightning_flops.analysis.throughput import build_throughput
from lightning_flops.records import BatchTokens, BatchTotals, Extremes, StepSums, UnprofiledFlops
from lightning_flops.run.monitor import Monitor
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from tests.analysis.in_memory import known
from tests.fake_clock import FakeNow

Batch = tuple[float, float, int | None]


def run(batches: list[Batch], *, ranks: int = 1) -> ThroughputSummary | None:
    """A run of batches, each of so many seconds of waiting and working, and so many samples."""
    now = FakeNow()
    monitor = Monitor(now)
    for wait, work, samples in batches:
        monitor.go_on()
        monitor.fetch_begins()
        now.sleep(wait)
        monitor.fetch_ends()
        now.sleep(work)
        monitor.batch(samples=samples, tokens=None, profiled=False, ends_step=True)
    return build_throughput(monitor.totals(), dp_size=ranks)


def test_averages_are_totals_over_totals() -> None:
    summary = known(run([(0.5, 0.5, 8), (0.5, 1.5, 8), (2.0, 3.0, 4)]))
    assert summary.batches == 3
    assert summary.reader_ratio == 3.0 / 8.0
    assert summary.reader_cost_sec == Spread(average=1.0, maximum=2.0, minimum=0.5)
    assert summary.batch_cost_sec == Spread(average=8.0 / 3.0, maximum=5.0, minimum=1.0)
    # 20 samples in 8 s; the batches by themselves: 8, 4 and 0.8.
    assert summary.ips == Spread(average=2.5, maximum=8.0, minimum=0.8)
    assert summary.ips_unit == "samples/s"


def test_without_known_samples_the_rate_is_of_batches() -> None:
    summary = known(run([(0.0, 1.0, 8), (0.0, 4.0, None)]))
    assert summary.ips_unit == "batches/s"
    assert summary.ips == Spread(average=0.4, maximum=1.0, minimum=0.25)


def test_flops_of_the_run_and_rates_of_its_unprofiled_steps() -> None:
    """Ten steps of 100 FLOPs in 4 s, and one that was counted; a peak of 500 FLOP/s."""
    second = Extremes(number=10, total=4.0, least=0.1, greatest=1.0)
    totals = BatchTotals(batches=10, seconds=second, reader_sec=None, samples=None, samples_per_sec=None)
    flops = StepSums(
        model_flops=1_100,
        hardware_flops=1_320,
        unprofiled=UnprofiledFlops({"float32": 1_000}, None, 0.9),
        error=0.02,
        steps_counted=1,
        steps_by_formula=0,
        steps_estimated=10,
        checks=3,
        lower_bound=True,
    )
    tokens = BatchTokens(100, 80, 2_000)
    found = known(build_throughput(totals, dp_size=1, flops=flops, model_flops_peak_sec=2.0, tokens=tokens))
    assert (found.model_flops, found.hardware_flops) == (1_100, 1_320)
    assert (found.mfu, found.flops_error, found.lower_bound) == (0.5, 0.02, True)
    assert (found.steps_counted, found.steps_estimated, found.checks) == (1, 10, 3)
    assert list(found.unavailable) == ["useful_mfu"]
    no_peak = known(build_throughput(totals, dp_size=1, flops=flops))
    assert "no dense peak" in no_peak.unavailable["mfu"]
