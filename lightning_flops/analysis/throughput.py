"""What a whole run's batches come to: the cost of reading and of the batch, and the rate, in Paddle's terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_flops.analysis.rates import per_second, ratio
from lightning_flops.records import BatchTotals, Extremes
from lightning_flops.schema import dataclass_json

SCHEMA_VERSION = 1
"""Version of the JSON that ``ThroughputSummary.to_json`` writes; it goes up whenever a field changes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A mean between the least and the greatest of what it is the mean of."""

    average: float
    """Total over total."""
    maximum: float
    """Of a single batch."""
    minimum: float
    """Of a single batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputSummary:
    """Throughput of a run over all its batches, counted and traced ones left out.

    The names and the table are those of the benchmark summary of Paddle's profiler; its averages are not, which divide
    sums over some batches by the number of others. Here every average is a total over a total.
    """

    schema_version: int
    """Of the JSON: ``SCHEMA_VERSION``."""
    batches: int
    """Batches of this rank."""
    reader_ratio: float | None
    """Share of the batches' time inside the data loader; None if no wait was seen."""
    reader_cost_sec: Spread | None
    """Host seconds of a batch inside the data loader."""
    batch_cost_sec: Spread
    """Wall time of a batch, the wait for it included; validation, checkpoints and epoch restarts are not."""
    ips: Spread | None
    """Items per second, all ranks that see different data together; None if no batch took any time."""
    ips_unit: Literal["samples/s", "batches/s"]
    """Batches where the number of samples was not known."""

    def to_json(self) -> str:
        """The summary as indented JSON."""
        return dataclass_json.dump(self)

    @staticmethod
    def from_json(text: str) -> ThroughputSummary:
        """The summary that ``to_json`` wrote as *text*.

        Raises:
            ProfileFormatError: *text* is no JSON, has another schema version, or a field is missing, unknown or wrong.
        """
        return dataclass_json.load(ThroughputSummary, text, version_field="schema_version", version=SCHEMA_VERSION)


def build_throughput(totals: BatchTotals, *, dp_size: int) -> ThroughputSummary | None:
    """Averages and extremes of *totals*.

    Args:
        totals: what the batches of this rank took.
        dp_size: ranks that see different data, whose items count together.

    Returns:
        None without batches.
    """
    seconds, reader = totals.seconds, totals.reader_sec
    if seconds is None:
        return None
    unit: Literal["samples/s", "batches/s"] = "batches/s"
    items: int = totals.batches
    slowest, fastest = (per_second(amount=1, seconds=each) for each in (seconds.greatest, seconds.least))
    if totals.samples is not None and totals.samples_per_sec is not None:
        unit, items = "samples/s", totals.samples
        slowest, fastest = totals.samples_per_sec.least, totals.samples_per_sec.greatest
    rate = per_second(amount=items, seconds=seconds.total)
    ips = None
    if rate is not None and slowest is not None and fastest is not None:
        ips = _spread(rate * dp_size, minimum=slowest * dp_size, maximum=fastest * dp_size)
    return ThroughputSummary(
        schema_version=SCHEMA_VERSION,
        batches=totals.batches,
        reader_ratio=None if reader is None else ratio(part=reader.total, whole=seconds.total),
        reader_cost_sec=None if reader is None else _mean(reader),
        batch_cost_sec=_mean(seconds),
        ips=ips,
        ips_unit=unit,
    )


def _mean(values: Extremes) -> Spread:
    return _spread(values.total / values.number, minimum=values.least, maximum=values.greatest)


def _spread(average: float, *, minimum: float, maximum: float) -> Spread:
    # A mean of equal values may miss them by a rounding.
    return Spread(average=min(max(average, minimum), maximum), maximum=maximum, minimum=minimum)
