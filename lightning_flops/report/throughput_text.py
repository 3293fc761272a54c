"""The summary of a run's throughput as text, in the form of the benchmark summary of Paddle's profiler."""

from __future__ import annotations

from lightning_flops.report.layout import paragraph, rule, table, title
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from lightning_flops.text.printable import page
from lightning_flops.units import NOT_AVAILABLE, percent, plain, plural


def render_throughput(summary: ThroughputSummary) -> str:
    """The table of *summary*, ending in a line break."""

    def row(name: str, spread: Spread | None) -> list[str]:
        if spread is None:
            return [name, *[NOT_AVAILABLE] * 3]
        return [name, *(f"{value:.6f}" for value in (spread.average, spread.maximum, spread.minimum))]

    lines = [
        title("Throughput of the run"),
        f"Reader Ratio: {percent(summary.reader_ratio)}",
        f"Time Unit: s, IPS Unit: {summary.ips_unit}",
        *table(
            ["", "avg", "max", "min"],
            [
                row("reader_cost", summary.reader_cost_sec),
                row("batch_cost", summary.batch_cost_sec),
                row("ips", summary.ips),
            ],
        ),
        *paragraph(
            f"Over {plain(summary.batches)} {plural('batch', summary.batches)} of this rank; ips adds up all "
            "ranks that see different data. Averages are totals over totals. Not in it: batches that were counted or "
            "traced, validation, checkpoints and what lies "
            "between epochs."
        ),
        rule(),
    ]
    return page(lines)
