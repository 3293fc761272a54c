"""The summary of a run's throughput as text, in the form of the benchmark summary of Paddle's profiler."""

from __future__ import annotations

from lightning_flops.report.law_text import step_law_lines
from lightning_flops.report.layout import paragraph, rule, table, title
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from lightning_flops.text.printable import page
from lightning_flops.units import NOT_AVAILABLE, percent, plain, plural

_NOT_COUNTED = "nothing that was counted tells what they spent"


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
        *step_law_lines(summary.law, why_none=summary.unavailable.get("law", "")),
        rule(),
    ]
    return page(lines)


def _flops_lines(summary: ThroughputSummary) -> list[str]:
    """What the run's steps spent, and how that is known."""
    steps = summary.steps_counted + summary.steps_predicted + summary.steps_unknown
    if not summary.steps_counted + summary.steps_predicted:
        return []
    bound = " (lower bound)" if summary.lower_bound else ""
    lines = [
        f"Model FLOPs: {plain(summary.model_flops)}{bound}, hardware FLOPs: {plain(summary.hardware_flops)}{bound}, "
        f"MFU: {percent(summary.mfu)}{bound}"
    ]
    if reason := summary.unavailable.get("hardware_flops"):
        lines += paragraph(f"Hardware FLOPs are {NOT_AVAILABLE}: {reason}.")
    if summary.model_flops_per_sec is not None and (reason := summary.unavailable.get("mfu")):
        lines += paragraph(f"MFU is {NOT_AVAILABLE}: {reason}.")
    shares = [
        f"{percent(number / steps)} {words}"
        for number, words in (
            (summary.steps_counted, "counted"),
            (summary.steps_predicted, "known by their shapes from those that were counted"),
            (summary.steps_unknown, f"{NOT_AVAILABLE}: {summary.unavailable.get('model_flops', _NOT_COUNTED)}"),
        )
        if number
    ]
    for note in summary.notes:
        lines += paragraph(note)
    known_how = f"FLOPs are of all {plain(steps)} {plural('step', steps)}: {', '.join(shares)}."
    if summary.steps_predicted:
        known_how += f" {_checked(summary)}"
    return [*lines, *paragraph(known_how)]


def _checked(summary: ThroughputSummary) -> str:
    """Whether somebody has looked if the shapes tell what a step spends."""
    if not summary.steps_checked:
        return (
            "No step was counted to check that. Where chance, the program or the optimizer decides what a step runs, "
            "as with layers that are dropped at random, tasks that alternate, or a preconditioner that is computed now "
            "and then, shapes do not tell what it spends."
        )
    steps = plain(summary.steps_checked)
    return f"For {steps} of the counted steps the FLOPs had been foretold: they spent exactly that."


def _token_lines(summary: ThroughputSummary) -> list[str]:
    if summary.tokens is None:
        told = summary.tokens_per_sec
        return [] if told is None else [f"tokens/s, as tokens_per_sample tells: {plain(told)}"]
    words = f"Tokens: {plain(summary.tokens)} processed, {plain(summary.real_tokens)} without padding"
    if summary.trained_tokens is not None:
        words += f", {plain(summary.trained_tokens)} trained on"
    reason = summary.unavailable.get("useful_mfu") if summary.useful_mfu is None else None
    because = f" ({reason})" if reason else ""
    return [
        words,
        *paragraph(
            f"Padding: {percent(summary.padding_ratio)}; "
            f"useful MFU, of the FLOPs without it: {percent(summary.useful_mfu)}{because}; "
            f"tokens/s without padding: {plain(summary.tokens_per_sec)}"
        ),
    ]
