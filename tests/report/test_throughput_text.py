from __future__ import annotations

from lightning_flops.report.throughput_text import render_throughput
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from tests.golden_files import golden


def test_the_summary_is_a_table_of_costs_and_rates() -> None:
    summary = ThroughputSummary(
        schema_version=1,
        batches=1200,
        reader_ratio=0.53514,
        reader_cost_sec=Spread(average=0.01367, maximum=0.01407, minimum=0.0131),
        batch_cost_sec=Spread(average=0.02555, maximum=0.02781, minimum=0.0222),
        ips=Spread(average=39.13907, maximum=45.03588, minimum=35.9583),
        ips_unit="samples/s",
    )
    golden("text/throughput.txt", render_throughput(summary))


def test_what_was_not_seen_is_not_available() -> None:
    summary = ThroughputSummary(
        schema_version=1,
        batches=1,
        reader_ratio=None,
        reader_cost_sec=None,
        batch_cost_sec=Spread(average=0.0, maximum=0.0, minimum=0.0),
        ips=None,
        ips_unit="batches/s",
    )
    golden("text/throughput_unknown.txt", render_throughput(summary))
