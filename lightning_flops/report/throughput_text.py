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
            f"Over {plain(summary.batches)} {plural('batch', summary.batches)} of this rank. ips is this rank's, times "
            "the number of ranks that see different data, as if all were as fast. An average is a total divided by a "
            "total. Left out: batches that were counted or traced, validation, checkpoints and what lies between "
            "epochs."
        ),
        *_flops_lines(summary),
        *_token_lines(summary),
        rule(),
    ]
    return page(lines)


def estimate_text(value: float | None, error: float | None) -> str:
    """A share whose FLOPs have this *error*: ``34.20%``, ``≈ 34.20% ± 0.30%`` or ``≈ 34.20% (unchecked)``."""
    if value is None or error == 0.0:
        return percent(value)
    return f"≈ {percent(value)} " + ("(unchecked)" if error is None else f"± {percent(value * error)}")


def _flops_lines(summary: ThroughputSummary) -> list[str]:
    """FLOPs of the run's steps, and how they are known."""
    if summary.model_flops is None:
        return []
    bound = " (lower bound)" if summary.lower_bound else ""
    about = "" if summary.flops_error == 0.0 else "≈ "
    lines = [
        f"Model FLOPs: {about}{plain(summary.model_flops)}{bound}, hardware FLOPs: {about}"
        f"{plain(summary.hardware_flops)}{bound}, MFU: {estimate_text(summary.mfu, summary.flops_error)}{bound}"
    ]
    if reason := summary.unavailable.get("mfu"):
        lines += paragraph(f"MFU is {NOT_AVAILABLE}: {reason}.")
    for note in summary.notes:
        lines += paragraph(note)
    steps = summary.steps_counted + summary.steps_by_formula + summary.steps_estimated
    shares = [
        f"{percent(number / steps)} {words}"
        for number, words in (
            (summary.steps_counted, "of shapes that were counted"),
            (summary.steps_by_formula, "by an exact formula of the batch's sizes"),
            (summary.steps_estimated, "estimated"),
        )
        if number
    ]
    known = f"FLOPs are of all {plain(steps)} {plural('step', steps)}: {', '.join(shares)}."
    return [*lines, *paragraph(f"{known} {_checked(summary)}")]


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


def _token_lines(summary: ThroughputSummary) -> list[str]:
    if summary.tokens is None:
        per_sec = summary.tokens_per_sec
        return [] if per_sec is None else [f"tokens/s, by tokens_per_sample: {plain(per_sec)}"]
    words = f"Tokens: {plain(summary.tokens)} processed, {plain(summary.real_tokens)} without padding"
    reason = summary.unavailable.get("useful_mfu") if summary.useful_mfu is None else None
    because = f" ({reason})" if reason else ""
    return [
        words,
        *paragraph(
            f"Padding: {percent(summary.padding_ratio)}; "
            f"useful MFU, of the FLOPs without it: {estimate_text(summary.useful_mfu, summary.flops_error)}{because}; "
            f"tokens/s without padding: {plain(summary.tokens_per_sec)}"
        ),
    ]
