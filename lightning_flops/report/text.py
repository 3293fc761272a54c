"""Reports as text: short unless details are asked for, and the summary that they begin with."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_flops.analysis.counts import FlopCounts
from lightning_flops.analysis.formula import FlopsFormula
from lightning_flops.analysis.rates import ratio
from lightning_flops.report.compare_text import comparison_headline, comparison_sections, ranks_section
from lightning_flops.report.document import VIEW, Section, View, as_html, draw, draw_all, sentences, some_of
from lightning_flops.report.module_text import aggregated_lines, detailed_lines, summary_section
from lightning_flops.report.predicted_document import (
    counts_section,
    formula_section,
    memory_section,
    plan_section,
    predicted_section,
    run_section,
)
from lightning_flops.report.profile_document import (
    IN_DETAILS,
    STARVED,
    devices_of,
    flops_section,
    notes_sections,
    operators_section,
    saving,
    short_sections,
    times_section,
    traced_section,
    uncounted_section,
    without_advice,
)
from lightning_flops.report.trace_document import trace_sections
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.plan import FormulaReport, MemoryReport, Plan
from lightning_flops.schema.profile import Profile, ThroughputSummary
from lightning_flops.schema.step import TimingProfile
from lightning_flops.units import (
    NOT_AVAILABLE,
    duration,
    page,
    percent,
    plain,
    plural,
    printable,
    run_text,
    runs_of,
    si,
)

_BAR_COLUMNS = 80  # the bar is not to be broken by a narrow terminal
_CELLS = 40  # of a step's bar, all its parts together
_SHORT_SEC = 3e-3  # below it, 0.1 ms that hearing costs beside our own work is over 3% of a step: `make bench-time`


def summary(profile: Profile) -> list[str]:
    """The summary in plain words: what ran where, a step's time, what to try first, MFU, stalls, and FLOPs."""
    return [printable(words) for said in _said(profile) for words in said if words]


def summary_lines(profile: Profile, view: View = VIEW) -> list[str]:
    """The summary, six lines at most for each part of it, with a bar of the step's parts."""
    above, below = (
        [line for words in said if words for line in view.paragraph(words, rest="  ", most=6)]
        for said in _said(profile)
    )
    return [*above, *_bar(step_parts(profile)), *below]


def _said(profile: Profile) -> tuple[list[str], list[str]]:
    """What stands above the bar of the step's parts, and what stands below; empty: there is nothing to say."""
    first = [f"Try first: {one.fact} {one.remedy}{saving(one)}" for one in profile.advice[:1]] or [
        profile.unexplained or without_advice(profile)
    ]
    starved = profile.starved and f"{STARVED} {profile.starved.partition('. ')[0]}."
    longer = 1.0 if profile.timing is None else profile.timing.longer
    rough = (
        f"Rough: the steps timed by parts and those timed as a whole differ by {percent(abs(longer - 1))}."
        if not 3 / 4 <= longer <= 4 / 3  # the shorter ones have less than three quarters of the longer ones' time
        else ""
    )
    above = [
        _what(profile),
        _step(profile),
        rough,
        starved,
        *((*first, _utilization(profile)) if profile.timing else ()),
    ]
    return above, [_phases(profile), _stalls(profile), _flops(profile)]


def step_parts(profile: Profile) -> list[tuple[str, float]]:
    """Seconds of each part of a typical step that took any, the longest first; they add up to it."""
    parts = () if profile.timing is None else profile.timing.parts
    return sorted(((one.name, one.typical_sec) for one in parts if one.typical_sec > 0), key=lambda one: -one[1])


def _what(profile: Profile) -> str:
    context, micro_steps, size = profile.context, profile.micro_steps, profile.context.micro_batch_size
    word, name = context.step_word, profile.modules[0].type_name if profile.modules else ""
    timed = _indexes(word, profile.timed_steps).lower() or f"no {word}"
    whole, unhooked = (0, 0) if profile.timing is None else (profile.timing.whole_steps, profile.timing.unhooked_steps)
    loop = "" if context.trains else f" in a {context.loop} loop"
    times = "" if micro_steps == 1 else f" x {plain(micro_steps)} micro-steps"
    ranks = "" if context.dp_size == 1 else f" on each of {plain(context.dp_size)} ranks"
    parts = [
        f"{name or 'A model'}{loop} on {_where(profile)}",
        f"precision {context.precision}" if context.precision else "",
        "" if size is None else f"batch {plain(size)}{times}{ranks}",
    ]
    counted = _indexes(word, profile.counted_steps) or f"No whole {word}"
    return sentences(
        f"{', '.join(filter(None, parts))}.",
        f"{counted} counted, {timed} timed"
        + (f" by parts, {plain(whole)} more as a whole" if whole else "")
        + (f", {plain(unhooked)} without hooks." if unhooked else "."),
    )


def _where(profile: Profile) -> str:
    context, ranks = profile.context, profile.ranks
    device = context.device_name or "unknown device"
    if device.lower() != context.device_type.lower():
        device = f"{context.device_type} ({device})"
    if context.world_size == 1 or ranks is None:
        return device if context.world_size == 1 else f"{device}, rank {context.rank} of {plain(context.world_size)}"
    devices = some_of(devices_of(ranks), most=2)
    missing = f", {plain(ranks.world_size - ranks.answered)} ranks did not answer" if ranks.absences else ""
    return f"{devices}{missing}, times of rank {plain(context.rank)}"


def _indexes(word: str, steps: Sequence[int]) -> str:
    """Their numbers: "Step 10", "Steps 13-32", or how many there are where they lie apart."""
    runs = runs_of(steps)
    if len(runs) > 2:
        return f"{plain(len(steps))} {plural(word, 2)} of {min(steps)}-{max(steps)}"
    return f"{plural(word, len(steps)).title()} {', '.join(map(run_text, runs))}" if runs else ""


def _step(profile: Profile) -> str:
    word, timing, rates = profile.context.step_word, profile.timing, profile.job_rates
    if timing is None:
        return f"No {word} was timed, so samples/s, MFU and HFU are {NOT_AVAILABLE}."
    reason = profile.job_unavailable.get("samples_per_sec")
    unknown = f"samples/s {NOT_AVAILABLE}" + (f" ({reason})" if reason else "")
    samples = unknown if rates.samples_per_sec is None else f"{plain(rates.samples_per_sec)} samples/s"
    tokens = "" if rates.tokens_per_sec is None else f", {plain(rates.tokens_per_sec)} tokens/s"
    in_all = " in all" if profile.context.world_size > 1 else ""
    few = f" (few steps: {len(profile.timed_steps)} timed)" if timing.few_steps else ""
    which = f"those {plain(timing.whole_steps)}" if timing.whole_steps else plain(timing.timed_steps)
    left_out, step_sec, steps = _left_out(timing), timing.global_step_sec, timing.timed_steps + timing.whole_steps
    # What lies between some steps is said here if it takes over a tenth of their time.
    between = [f"{cause} {duration(sec)}" for cause, sec in timing.excluded_sec.items() if sec > steps * step_sec / 10]
    return sentences(
        f"A typical {word}{few}: {duration(timing.global_step.typical_sec)}; mean of {which}: "
        f"{duration(step_sec)}, {samples}{tokens}{in_all} over the "
        "wall clock.",
        f"A {word} this short may read 0.1 ms too long."
        if timing.global_step.typical_sec < _SHORT_SEC and not timing.unhooked_steps
        else "",
        f"Left out of each {word}: {left_out}." if left_out else "",
        f"Between these {steps} {plural(word, steps)}, and in none of them: {', '.join(between)}."
        if between and not left_out
        else "",
    )


def _left_out(timing: TimingProfile) -> str:
    """What each step left out, in seconds a step; empty if some step left out nothing."""
    causes = timing.excluded_sec.items() if timing.excludes_in_each else ()
    return ", ".join(
        f"{cause} {duration(seconds / (timing.timed_steps + timing.whole_steps))}" for cause, seconds in causes
    )


def _utilization(profile: Profile) -> str:
    mfu, hfu, peaks_of = profile.job_rates.mfu, profile.job_rates.hfu, profile.peaks_flops_per_sec
    if mfu is None or hfu is None:
        reason = profile.job_unavailable.get("mfu") or profile.job_unavailable.get("hfu", "")
        known = "MFU and HFU" if mfu is None else f"MFU {percent(mfu)}, HFU"
        return f"{known} {NOT_AVAILABLE}: {reason}."
    least = "at least " if profile.lower_bound else ""
    given = {"vendor": "", "given": ", as given"}.get(profile.settings.peaks_from, ", measured")
    peaks = [f"{si(peaks_of[one.dtype], 'FLOP/s')} ({one.dtype})" for one in profile.dtypes if one.dtype in peaks_of]
    if profile.ranks is not None:
        peaks = [f"{si(profile.ranks.peak_flops_per_sec, 'FLOP/s')} of all ranks"]
    return f"MFU {least}{percent(mfu)}, HFU {least}{percent(hfu)} of {', '.join(peaks)}{given}."


def _bar(parts: Sequence[tuple[str, float]]) -> list[str]:
    """Each part's share, and blocks of that length."""
    whole, lines = sum(seconds for _, seconds in parts), [""]
    for name, seconds in parts:
        piece = f"{name} {percent(seconds / whole)} {'█' * round(_CELLS * seconds / whole)}".rstrip()
        if len(lines[-1]) + 2 + len(piece) > _BAR_COLUMNS:
            lines.append("")
        lines[-1] += f"  {piece}" if lines[-1] else piece
    return list(filter(None, lines))


def _phases(profile: Profile) -> str:
    """The phases of a step that has some beside training."""
    mfu = {
        name: f" (MFU {percent(one.mfu)})"
        for name, one in profile.phases.items()
        if profile.peaks_flops_per_sec and one.flops  # without a peak, why there is no MFU is said of the step's
    }
    shown = " · ".join(f"{name} {percent(one.ratio)}{mfu.get(name, '')}" for name, one in profile.phases.items())
    return f"Phases: {shown}." if shown and profile.timing is not None else ""


def _stalls(profile: Profile) -> str:
    """Steps that took much longer than a typical one."""
    if profile.timing is None or (one := profile.timing.stalls) is None:
        return ""
    steps = f"{plain(one.steps)} of {plain(profile.timing.timed_steps)} {plural(profile.context.step_word, 2)}"
    return f"Stalls: {steps} took {duration(one.seconds)} longer in all than typical ones, mostly in {one.part}."


_WHOSE = {
    "counted": " (of the counted ones)",
    "formula": " (of the timed ones, by their sizes)",
    "estimate": " (of the timed ones, estimated by their sizes)",
}


def _flops(profile: Profile) -> str:
    flops, context, params = profile.flops, profile.context, profile.job_params
    of_rank = "" if context.world_size == 1 else " on this rank"
    least = "At least " if profile.lower_bound else ""
    backward = f", backward {si(flops.backward)}" if profile.has_backward else ""
    others = {"recomputed": flops.recompute, "optimizer": flops.optimizer, "outside the model": flops.outside}
    beside = ", ".join(f"{name} {si(amount)}" for name, amount in others.items() if amount)
    addition = f"; in addition {beside}" if beside else ""
    half = ' (causal_attention="half" counts half of causal attention)'
    other = half if profile.settings.causal_attention == "full" else ""
    masked = percent(ratio(part=flops.skipped, whole=flops.total))
    whose = "" if profile.flops_of == "counted" and len(profile.counted_steps) < 2 else _WHOSE[profile.flops_of]
    step = f"{least}{si(flops.model, 'FLOPs')} a {context.step_word}{of_rank}{whose}"
    return sentences(
        f"{step}: forward {si(flops.forward)}{backward}{addition}.",
        f"{masked} of all FLOPs are masked, and not executed{other}." if flops.skipped > 0 else "",
        "" if params is None else f"{plain(params)} parameters.",
    )


def figures(profile: Profile) -> str:
    """FLOPs and time of a step, samples/s and MFU, as far as they are known, in one line."""
    context, timing, rates = profile.context, profile.timing, profile.job_rates
    of_rank = in_all = of_whom = ""
    if context.world_size > 1:
        of_rank, in_all = f" on rank {context.rank} of {context.world_size}", " in all"
        of_whom = " of this rank" if profile.ranks is None else " of all ranks"
    least = "at least " if profile.lower_bound else ""
    took = "" if timing is None else f" and {duration(timing.global_step_sec)}"  # the mean, as of the rates
    left_out = "" if timing is None else _left_out(timing)
    known = [
        f"{least}{si(profile.flops.model, 'FLOPs')}{took} a {context.step_word}{of_rank}",
        f"without {left_out}" if left_out else "",
        "" if rates.samples_per_sec is None else f"{plain(rates.samples_per_sec)} samples/s{in_all} (wall clock)",
        "" if rates.mfu is None else f"MFU {least}{percent(rates.mfu)}{of_whom}",
        "starved of processors" if profile.starved else "",
    ]
    return ", ".join(filter(None, known))


_MOST_LINES = 59  # of the short report, above the rule that ends it

Renderable = Profile | Plan | ThroughputSummary | FlopCounts | FlopsFormula | FormulaReport | Comparison | MemoryReport

# The sections of the short form of each report.
_DOCUMENTS: Mapping[type, Callable[[Any], Iterable[Section]]] = {
    Profile: lambda profile: short_sections(profile, lines=5, advice=4, notes=2),
    Comparison: comparison_sections,
    FlopCounts: lambda counts: [counts_section(counts)],
    FormulaReport: lambda report: [formula_section(report)],
    MemoryReport: lambda report: [predicted_section(report)],
    Plan: lambda plan: [plan_section(plan)],
    ThroughputSummary: lambda summary: [run_section(summary)],
}


def render_text(profile: Renderable, *, detailed: bool | None = None, width: int | None = None) -> str:
    """The report on *profile*, for people: at most 60 lines of 100 columns (74 of 80), ending in a line break.

    Args:
        profile: a profile; also a run's throughput (the table that ends a run), and what ``count_flops``,
            ``flops_formula`` and ``compare_profiles`` return (what ``print`` shows of it).
        detailed: a profile with all advice and its sources, DeepSpeed's summary, everything else that was measured, and
            the tree of modules; None: as the profile's settings say.
        width: columns of the terminal that it is shown in; None: 100 of a profile, and of all else no limit.

    Raises:
        TypeError: *profile* is nothing that there is a report on.
    """
    if not isinstance(profile, Profile):
        return draw_all(_sections(profile), View(rows=12 if isinstance(profile, Comparison) else 200, width=width))
    view = replace(VIEW, width=width or VIEW.width)
    if not (profile.settings.detailed if detailed is None else detailed):
        return page([*_short_lines(profile, view), view.rule()])
    sections = [*short_sections(profile), summary_section(profile), *detailed_sections(profile)]
    modules = ["", *aggregated_lines(profile, view), "", *detailed_lines(profile, view)]
    return page([*summary_lines(profile, view), *_drawn(sections, view), *modules, view.rule()])


def _drawn(sections: Iterable[Section], view: View = VIEW) -> list[str]:
    return [line for section in sections for line in draw(section, view)]


def render_logged(profile: Profile) -> str:
    """The report as a run's loggers show it: also the short one has DeepSpeed's summary."""
    if profile.settings.detailed:
        return render_text(profile)
    return page([*_short_lines(profile), *draw(summary_section(profile)), VIEW.rule()])


def render_html(report: Renderable) -> str:
    """The short report for a notebook, as plain tables."""
    return as_html(summary(report) if isinstance(report, Profile) else (), _sections(report))


def line(report: Profile | ThroughputSummary | Comparison) -> str:
    """*report* in one line, for ``repr``."""
    if isinstance(report, Profile):
        steps = _indexes(report.context.step_word, report.counted_steps or (report.profile_step,)).lower()
        return f"<Profile of {steps}: {figures(report)}>"
    if isinstance(report, ThroughputSummary):
        return f"<ThroughputSummary of {plain(report.batches)} {plural('batch', report.batches)}>"
    return f"<Comparison: {comparison_headline(report)}>"


def _sections(report: object) -> Iterable[Section]:
    report = getattr(report, "report", lambda: report)()  # a formula, and a prediction of memory, make one when asked
    if type(report) not in _DOCUMENTS:
        raise TypeError(f"render_text takes a Profile and the like, got {type(report).__name__}")
    return _DOCUMENTS[type(report)](report)


def _short_lines(profile: Profile, view: View = VIEW) -> list[str]:
    """The short report: of many long names, fewer tables, modules, pieces of advice and notes are shown."""
    most = max(_MOST_LINES, 100 * _MOST_LINES // (view.width or 100))  # as many letters where it is narrow
    # What does not fit in the least of these has no tables of phases and of what fills the step: advice is below them.
    for tables, modules, of_user, advice, notes in (
        (tables, *most_of)
        for tables in (True, False)
        for most_of in ((10, 5, 4, 2), (6, 5, 3, 1), (4, 5, 2, 1), (3, 4, 1, 0), (2, 2, 1, 0))
    ):
        sections = short_sections(profile, tables=tables, modules=modules, lines=of_user, advice=advice, notes=notes)
        lines = [*summary_lines(profile, view), *_drawn(sections, view)]
        if len(lines) <= most:
            return lines
    return [*lines[: most - 1], f"… more {IN_DETAILS}"]


def render_forwards(profile: Profile, *, detailed: bool) -> str:
    """The forwards of one model under DeepSpeed's labels, beginning with an empty line and ending in a line break."""
    several = profile.timing is not None and profile.timing.timed_steps > 1
    above = [summary_section(profile, of_run=False), *([times_section(profile)] if several else [])]
    modules = ["", *aggregated_lines(profile), *(["", *detailed_lines(profile)] if detailed else ())]
    below = [*([uncounted_section(profile)] if profile.uncounted else ()), *notes_sections(profile.notes)]
    return page([*_drawn(above), *modules, *_drawn(below), VIEW.rule()])


def render_aggregated(profile: Profile) -> str:
    """The classes of modules that weigh most at each depth, alone."""
    return page(aggregated_lines(profile))


def render_advice(profile: Profile) -> str:
    """The report's section of advice, all of it with its rules, ending in a line break."""
    return page([line for one in short_sections(profile) if one.title == "Advice" for line in list(draw(one))[2:]])


def fenced(text: str) -> str:
    """*text* as Markdown: in a code block whose fence is longer than any run of backticks in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", text)), default=0))
    return f"{fence}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}\n"


# Tables of the traced step that a text has; the others are in the page, and in ``lightning-flops trace``.
_TRACED = {"Step time", "Devices", "Modules", "Communication", "Idle", "Memory"}


def detailed_sections(profile: Profile, traced: Collection[str] = _TRACED) -> Iterator[Section]:
    """What is not in the short report, with the tables of the *traced* step that have these titles; all without any."""
    for section in (flops_section, memory_section, operators_section, uncounted_section, traced_section, ranks_section):
        yield from filter(None, [section(profile)])
    tables = None if profile.traced is None else profile.traced.tables
    for one in () if tables is None else trace_sections(tables):
        if not traced or one.title in traced:
            yield replace(one, title=f"Traced {profile.context.step_word}: {one.title[:1].lower()}{one.title[1:]}")
