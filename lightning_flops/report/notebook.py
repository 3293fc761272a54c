"""How reports show themselves: tables in a notebook, a line as ``repr``, text for ``print`` (``schema.shown``)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple
from xml.etree.ElementTree import Element

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.analysis.rates import ratio
from lightning_flops.records import PhaseFlops
from lightning_flops.report import html as page
from lightning_flops.report.compare_text import comparison_headline
from lightning_flops.report.counts_text import ABOUT, counts_table
from lightning_flops.report.headline import counted, figures, headline, throughput_headline
from lightning_flops.report.html_page import ShownRun, render_comparison_page, render_page
from lightning_flops.report.layout import shortened
from lightning_flops.report.step_text import missing_rates_lines
from lightning_flops.report.text import render_text
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.formula import FormulaReport
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import PartTiming
from lightning_flops.schema.throughput import Spread, ThroughputSummary
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, plural, si

_ADVICE_SHOWN = 3
_MODULES_SHOWN = 8
_ROWS_SHOWN = 24
_NAME_CHARS = 72
_SENTENCE_CHARS = 300

_Shown = Profile | ThroughputSummary | FlopCounts


def line(report: _Shown | Comparison) -> str:
    """*report* in one line, for ``repr``."""
    if isinstance(report, Profile):
        return f"<Profile of {counted(report)}: {headline(report)}>"
    if isinstance(report, ThroughputSummary):
        return f"<ThroughputSummary: {throughput_headline(report)}>"
    if isinstance(report, Comparison):
        return f"<Comparison: {comparison_headline(report)}>"
    return repr(report)


def text(report: _Shown | Comparison | FormulaReport) -> str:
    """*report* as text."""
    return render_text(report)


def html(report: _Shown) -> str:
    """*report* as tables, at most a screen of them."""
    if isinstance(report, Profile):
        return _profile(report)
    return _throughput(report) if isinstance(report, ThroughputSummary) else _counts(report)


def whole_page(report: Profile | Comparison) -> str:
    """*report* as an HTML file of its own."""
    if isinstance(report, Comparison):
        return render_comparison_page(report)
    return render_page([ShownRun(name="this run", windows=[report])])


def _profile(profile: Profile) -> str:
    whole = page.block()
    page.paragraph(whole, f"{counted(profile).capitalize()}: {figures(profile)}", bold=True)
    page.paragraph(whole, _where(profile))
    _figures_table(whole, profile)
    _step_table(whole, profile)
    _modules_table(whole, profile)
    _advice_table(whole, profile)
    if profile.notes:
        first, more = shortened(profile.notes[0], chars=_SENTENCE_CHARS), len(profile.notes) - 1
        page.paragraph(whole, f"Note: {first}" + (f" (and {plain(more)} more in render_text(profile))" if more else ""))
    return page.written(whole)


def _where(profile: Profile) -> str:
    context = profile.context
    parts = [
        f"{context.device_name or 'unknown device'} ({context.device_type})",
        *([context.precision] if context.precision else []),
        *([f"rank {context.rank} of {context.world_size}"] if context.world_size > 1 else []),
        f"{context.framework} {context.framework_version}",
        f"{plain(len(profile.counted_steps))} {plural('step', len(profile.counted_steps))} counted, "
        f"{plain(len(profile.timed_steps))} timed",
    ]
    return shortened(", ".join(parts), chars=_SENTENCE_CHARS)


def _figures_table(whole: Element, profile: Profile) -> None:
    flops, job, ranks = profile.flops, profile.job_rates, profile.ranks
    cells = {
        "step time": duration(None if profile.timing is None else profile.timing.global_step_sec),
        "samples/s": plain(job.samples_per_sec),
        "tokens/s": plain(job.tokens_per_sec),
        "MFU": percent(job.mfu),
        "HFU": percent(job.hfu),
        "FLOPs forward": si(flops.forward),
        "FLOPs backward": si(flops.backward),
        "hardware FLOPs": si(flops.hardware),
        "parameters": si(profile.params if ranks is None else ranks.params),
    }
    page.table(whole, tuple(cells), [tuple(cells.values())], left=())
    reasons = profile.unavailable if ranks is None else ranks.unavailable
    shown = ("samples_per_sec", "tokens_per_sec", "mfu", "hfu")
    missing = {rate: reason for rate, reason in reasons.items() if rate in shown and getattr(job, rate) is None}
    if missing:
        page.paragraph(whole, " ".join(" ".join(missing_rates_lines(missing)).split()))
    if profile.lower_bound:
        page.paragraph(whole, "FLOPs, MFU and HFU are lower bounds: something that ran could not be counted.")


def _step_table(whole: Element, profile: Profile) -> None:
    timing = profile.timing
    if timing is None:
        page.paragraph(whole, f"Time of a step: {NOT_AVAILABLE}, no step was timed.")
        return

    def row(part: PartTiming, bar: str | float) -> tuple[str | float, ...]:
        spread = f"{duration(part.minimum_sec)} to {duration(part.maximum_sec)}"
        return part.name, duration(part.mean_sec), percent(part.share), bar, spread

    rows = [*(row(part, part.share or 0.0) for part in timing.parts), row(timing.global_step, "")]
    page.table(whole, ("part of a step", "mean", "share", "", "of single steps"), rows, left=(0, 3))


class _Group(NamedTuple):
    """Modules of one class at one place in equal layers, added up."""

    name: str
    modules: list[ModuleProfile]
    flops: PhaseFlops
    """Without the modules inside."""
    seconds: float | None
    """Of the traced step, without the modules inside; None if none was traced."""


def _modules_table(whole: Element, profile: Profile) -> None:
    groups = _groups(profile.modules)
    timed = any(group.seconds is not None for group in groups)
    if timed:
        groups.sort(key=lambda group: -(group.seconds or 0.0))
    else:
        groups.sort(key=lambda group: -group.flops.total)
    groups = [group for group in groups if (group.seconds if timed else group.flops.total)]
    if not groups:
        page.paragraph(whole, f"Modules: {NOT_AVAILABLE}, none was seen to spend FLOPs.")
        return
    counted = sum(module.own.total for module in profile.modules) + profile.outside.total
    spent_sec = sum(group.seconds or 0.0 for group in groups)
    head = ["module, without those inside it", "class", "FLOPs forward", "FLOPs backward"]
    if any(group.flops.recompute for group in groups):
        head.append("recomputed")
    head += ["of all FLOPs", *(["time", "of all time"] if timed else []), ""]
    rows: list[Sequence[str | float]] = []
    for group in groups[:_MODULES_SHOWN]:
        share = ratio(part=group.flops.total, whole=counted)
        kind = group.modules[0].type_name or "(not described)"
        several = f"{len(group.modules)} x " if len(group.modules) > 1 else ""
        row: list[str | float] = [
            shortened(group.name or "(the root)", chars=_NAME_CHARS),
            f"{several}{shortened(kind, chars=_NAME_CHARS // 2)}",
            si(profile.per_step(group.flops.forward)),
            si(profile.per_step(group.flops.backward)),
        ]
        if "recomputed" in head:
            row.append(si(profile.per_step(group.flops.recompute)))
        row.append(percent(share))
        if timed:
            share = ratio(part=group.seconds, whole=spent_sec)
            row += [duration(group.seconds), percent(share)]
        rows.append((*row, share or 0.0))
    page.table(whole, head, rows, left=(0, 1, len(head) - 1))
    more = len(groups) - len(rows)
    words = []
    if more:
        words.append(f"And {plain(more)} more.")
    if any(len(group.modules) > 1 for group in groups[:_MODULES_SHOWN]):
        words.append("A star stands for any number: the figures of these modules are added up.")
    if timed:
        words.append("Times are those of one traced step.")
    if words:
        page.paragraph(whole, " ".join(words))


def _groups(modules: Sequence[ModuleProfile]) -> list[_Group]:
    """*modules* added up where their names differ in numbers alone and their classes do not differ."""
    members: dict[tuple[str, str], list[ModuleProfile]] = {}
    for module in modules:
        pattern = ".".join("*" if part.isdecimal() else part for part in module.name.split("."))
        members.setdefault((pattern, module.type_name), []).append(module)
    groups = []
    for (pattern, _), group in members.items():
        flops = PhaseFlops()
        for module in group:
            flops += module.own
        times = [module.times for module in group if module.times is not None]
        seconds = sum(one.own_forward_sec + (one.own_backward_sec or 0.0) for one in times) if times else None
        groups.append(_Group(group[0].name if len(group) == 1 else pattern, group, flops, seconds))
    return groups


def _advice_table(whole: Element, profile: Profile) -> None:
    if not profile.advice:
        return
    rows = [
        (percent(one.stake), *(shortened(words, chars=_SENTENCE_CHARS) for words in (one.evidence, one.action)))
        for one in profile.advice[:_ADVICE_SHOWN]
    ]
    page.table(whole, ("at stake", "what was measured", "what to try"), rows, left=(1, 2))
    if more := len(profile.advice) - len(rows):
        page.paragraph(whole, f"And {plain(more)} more in render_text(profile).")


def _throughput(summary: ThroughputSummary) -> str:
    whole = page.block()
    page.paragraph(whole, throughput_headline(summary), bold=True)

    def row(name: str, spread: Spread | None, words: Callable[[float], str]) -> list[str]:
        if spread is None:
            return [name, *[NOT_AVAILABLE] * 3]
        return [name, *map(words, (spread.average, spread.maximum, spread.minimum))]

    rows = [
        row("in the data loader, a batch", summary.reader_cost_sec, duration),
        row("a batch", summary.batch_cost_sec, duration),
        row(summary.ips_unit, summary.ips, plain),
    ]
    page.table(whole, ("", "average", "maximum", "minimum"), rows)
    return page.written(whole)


def _counts(counts: FlopCounts) -> str:
    whole = page.block()
    total = counts.total
    bound = "at least " if counts.is_lower_bound else ""
    phases = [
        f"{name} {si(getattr(total, name), 'FLOPs')}"
        for name in ("forward", "backward", "recompute", "optimizer")
        if name in ("forward", "backward") or getattr(total, name)
    ]
    page.paragraph(whole, bound + ", ".join(phases), bold=True)
    made = counts_table(counts, most=_ROWS_SHOWN)
    page.table(whole, made.head, made.rows, left=(0, 2), indents=made.depths)
    page.paragraph(whole, ABOUT)
    for remark in _first(made.remarks):
        page.paragraph(whole, remark)
    return page.written(whole)


def _first(remarks: Sequence[str]) -> Iterator[str]:
    """As many of *remarks* as a screen has room for, each cut to a few lines."""
    for remark in remarks[:_ADVICE_SHOWN]:
        yield shortened(remark, chars=_SENTENCE_CHARS)
    if len(remarks) > _ADVICE_SHOWN:
        yield f"And {plain(len(remarks) - _ADVICE_SHOWN)} more notes in print(counts)."
