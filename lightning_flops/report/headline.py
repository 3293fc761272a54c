"""What a report says in one line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from lightning_flops.schema.profile import Profile
from lightning_flops.schema.throughput import ThroughputSummary
from lightning_flops.text.printable import printable
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, plural, si

_WIDTH = 200
"""Characters of a headline, if its figures leave room for the advice."""

_LEAST_ADVICE = 120
"""Characters of an advice that are shown in any case."""


def headline(profile: Profile) -> str:
    """One line of whole sentences: FLOPs and time of a step, samples/s, MFU or why there is none, the first advice."""
    sentences = f"{figures(profile)}."
    if profile.advice:
        first = profile.advice[0]
        opening = f"{sentences} First advice: "
        words = printable(f"{first.evidence} {first.action}")
        room = max(_LEAST_ADVICE, _WIDTH - len(opening))
        sentences = opening + textwrap.shorten(words, room, placeholder=" …")
    return printable(sentences)


def figures(profile: Profile) -> str:
    """FLOPs and time of a step, samples/s, and MFU or why there is none, in one line."""
    context, ranks, timing, job = profile.context, profile.ranks, profile.timing, profile.job_rates
    word = context.step_word
    of_rank = in_all = of_whom = ""
    if context.world_size > 1:
        of_rank, in_all = f" on rank {context.rank} of {context.world_size}", " in all"
        of_whom = " of this rank" if ranks is None else " of all ranks"
    flops = f"{'at least ' if profile.lower_bound else ''}{si(profile.flops.model, 'FLOPs')}"
    known = [f"{flops} a {word}{of_rank}"]
    if timing is not None:
        known = [f"{flops} and {duration(timing.global_step_sec)} a {word}{of_rank}"]
    if job.samples_per_sec is not None:
        known.append(f"{plain(job.samples_per_sec)} samples/s{in_all}")
    if job.mfu is not None:
        known.append(f"MFU {'at least ' if profile.lower_bound else ''}{percent(job.mfu)}{of_whom}")
    return ", ".join((*known, *_missing(profile)))


def _missing(profile: Profile) -> Iterator[str]:
    """The figures that are not known, and why; one phrase for each reason."""
    job = profile.job_rates
    reasons = profile.unavailable if profile.ranks is None else profile.ranks.unavailable
    by_reason: dict[str, list[str]] = {}
    for name, value, rate in (
        ("samples/s", job.samples_per_sec, "samples_per_sec"),
        ("MFU", job.mfu, "mfu"),
    ):
        if value is None:
            by_reason.setdefault(reasons.get(rate, ""), []).append(name)
    for reason, names in by_reason.items():
        yield f"{' and '.join(names)} {NOT_AVAILABLE}" + (f" ({reason})" if reason else "")


def throughput_headline(summary: ThroughputSummary) -> str:
    """The averages of a run in one line."""
    ips = NOT_AVAILABLE if summary.ips is None else plain(summary.ips.average)
    waiting = NOT_AVAILABLE if summary.reader_ratio is None else percent(summary.reader_ratio)
    return (
        f"{plain(summary.batches)} {plural('batch', summary.batches)}, {ips} {summary.ips_unit}, "
        f"{duration(summary.batch_cost_sec.average)} a batch, of it in the data loader {waiting}"
    )
