"""Throughput of a whole run: of several ranks, with padding, and what is impossible."""

from __future__ import annotations

from lightning_flops.analysis.rates import build_throughput
from lightning_flops.records import BatchTokens, BatchTotals, Extremes
from lightning_flops.schema.profile import Spread
from tests.analysis.in_memory import known

# Two batches of 8 samples, in 1 and in 4 s: 16 samples in 5 s, at 8 and at 2 samples/s.
TOTALS = BatchTotals(
    batches=2,
    seconds=Extremes(number=2, total=5.0, least=1.0, greatest=4.0),
    reader_sec=Extremes(number=2, total=1.0, least=0.25, greatest=0.75),
    samples=16,
    samples_per_sec=Extremes(number=2, total=10.0, least=2.0, greatest=8.0),
)


def test_items_of_all_ranks_that_see_other_data_add_up() -> None:
    for ranks in (1, 4):
        found = known(build_throughput(TOTALS, dp_size=ranks, timed_tokens=100))
        assert found.ips == Spread(average=3.2 * ranks, maximum=8.0 * ranks, minimum=2.0 * ranks)
        assert (found.ips_unit, found.tokens_per_sec) == ("samples/s", 20.0 * ranks)
        assert found.batch_cost_sec == Spread(average=2.5, maximum=4.0, minimum=1.0)  # which they share
        assert found.reader_ratio == 0.2


def test_padding_is_the_share_of_tokens_that_are_none() -> None:
    found = known(build_throughput(TOTALS, dp_size=1, tokens=BatchTokens(200, 150, 5_000)))
    assert (found.tokens, found.real_tokens, found.padding_ratio) == (200, 150, 0.25)


def test_a_share_of_the_peak_above_all_of_it_is_none() -> None:
    # The FLOPs of 5 s take a device 4 s at its peak: 80%; 6 s cannot be.
    found = known(build_throughput(TOTALS, dp_size=1, model_flops_peak_sec=4.0))
    assert found.mfu == 0.8
    found = known(build_throughput(TOTALS, dp_size=1, model_flops_peak_sec=6.0))
    assert found.mfu is None and "MFU would be 120%, which is impossible" in found.unavailable["mfu"]
