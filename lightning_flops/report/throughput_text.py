"""The throughput of a run as a section, in the form of the benchmark summary of Paddle's profiler."""

from __future__ import annotations

from collections.abc import Iterator

from lightning_flops.report.document import Item, Section, cells
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from lightning_flops.units import NOT_AVAILABLE, percent, plain, plural


def run_section(summary: ThroughputSummary) -> Section:
    """What a run's batches cost, and the FLOPs and tokens of all of them."""

    def row(name: str, spread: Spread | None) -> list[str]:
        values = (None,) * 3 if spread is None else (spread.average, spread.maximum, spread.minimum)
        return [name, *(NOT_AVAILABLE if value is None else f"{value:.6f}" for value in values)]

    costs = {"reader_cost": summary.reader_cost_sec, "batch_cost": summary.batch_cost_sec, "ips": summary.ips}
    about = (
        f"Over {plain(summary.batches)} {plural('batch', summary.batches)} of this rank. ips is this rank's, times "
        "the number of ranks that see different data, as if all were as fast. An average is a total divided by a "
        "total. Left out: batches that were counted or traced, validation, checkpoints and what lies between epochs."
    )
    items: list[Item] = [
        f"Reader Ratio: {percent(summary.reader_ratio)}",
        f"Time Unit: s, IPS Unit: {summary.ips_unit}",
        cells(["", "avg", "max", "min"], [row(name, spread) for name, spread in costs.items()]),
        about,
        *_flops(summary),
        *_tokens(summary),
    ]
    return Section("Throughput of the run", "", items)


def estimate_text(value: float | None, error: float | None) -> str:
    """A share whose FLOPs have this *error*: ``34.20%``, ``≈ 34.20% ± 0.30%`` or ``≈ 34.20% (unchecked)``."""
    if value is None or error == 0.0:
        return percent(value)
    return f"≈ {percent(value)} " + ("(unchecked)" if error is None else f"± {percent(value * error)}")


def _flops(summary: ThroughputSummary) -> Iterator[str]:
    """FLOPs of the run's steps, and how they are known."""
    if summary.model_flops is None:
        return
    bound = " (lower bound)" if summary.lower_bound else ""
    about = "" if summary.flops_error == 0.0 else "≈ "
    yield (
        f"Model FLOPs: {about}{plain(summary.model_flops)}{bound}, hardware FLOPs: {about}"
        f"{plain(summary.hardware_flops)}{bound}, MFU: {estimate_text(summary.mfu, summary.flops_error)}{bound}"
    )
    if reason := summary.unavailable.get("mfu"):
        yield f"MFU is {NOT_AVAILABLE}: {reason}."
    yield from summary.notes
    numbers = {
        "of shapes that were counted": summary.steps_counted,
        "by an exact formula of the batch's sizes": summary.steps_by_formula,
        "estimated": summary.steps_estimated,
    }
    steps = sum(numbers.values())
    shares = ", ".join(f"{percent(number / steps)} {words}" for words, number in numbers.items() if number)
    yield f"FLOPs are of all {plain(steps)} {plural('step', steps)}: {shares}. {_checked(summary)}"


def _checked(summary: ThroughputSummary) -> str:
    """What random checks show of these FLOPs."""
    checks = f"{plain(summary.checks)} random {plural('check', summary.checks)}"
    if summary.flops_error is None:
        return f"Their error is not known: there were {checks}, and it takes three."
    if summary.flops_error > 0:
        return f"By {checks} they are within {percent(summary.flops_error)} of the truth, with 95% confidence."
    if not summary.checks:
        return "Every step was counted."
    differ = percent(min(1.0, 3 / summary.checks))
    return f"{checks} agreed to the last FLOP: at most {differ} of the steps differ, with 95% confidence."


def _tokens(summary: ThroughputSummary) -> Iterator[str]:
    if summary.tokens is None:
        if summary.tokens_per_sec is not None:
            yield f"tokens/s, by tokens_per_sample: {plain(summary.tokens_per_sec)}"
        return
    yield f"Tokens: {plain(summary.tokens)} processed, {plain(summary.real_tokens)} without padding"
    reason = summary.unavailable.get("useful_mfu") if summary.useful_mfu is None else None
    yield (
        f"Padding: {percent(summary.padding_ratio)}; "
        f"useful MFU, of the FLOPs without it: {estimate_text(summary.useful_mfu, summary.flops_error)}"
        f"{f' ({reason})' if reason else ''}; tokens/s without padding: {plain(summary.tokens_per_sec)}"
    )
