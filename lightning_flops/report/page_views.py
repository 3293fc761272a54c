"""What the page shows of a profile, of a trace and of a comparison: the sections of its document, and its pictures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning_flops.analysis.module_names import parent_name
from lightning_flops.analysis.rates import ratio
from lightning_flops.report.document import Column, Section, as_data, at, quantity, share, table
from lightning_flops.report.headline import answer, step_parts
from lightning_flops.report.profile_document import (
    advice_section,
    breakdown_section,
    modules_section,
    no_advice,
    notes_section,
    saving,
    share_of_peak,
    times_section,
)
from lightning_flops.report.text import detailed_sections
from lightning_flops.report.trace_document import trace_sections
from lightning_flops.report.trace_text import answer as answer_of_traces
from lightning_flops.report.trace_text import names_of, ranks_of
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.text.printable import printable
from lightning_flops.units import plain

_US = 1e-6

View = dict[str, Any]
"""Plain JSON of one profile, trace or comparison, as ``web/src/document.ts`` has it."""


def page_view(
    *,
    title: str,
    where: str,
    summary: Sequence[str],
    sections: Iterable[Section],
    pictures: Mapping[str, str] = {},
    **data: Any,
) -> View:
    """A view of *sections*; *pictures* are named by the title of the section that each begins, and drawn of *data*."""
    shown = list(map(as_data, sections))
    for one in shown:
        if one["title"] in pictures:
            one["items"].insert(0, {"picture": pictures[one["title"]]})
    empty: View = {"parts": [], "steps": None, "modules": None, "roofline": None, "curves": []}
    head = {"title": printable(title), "where": printable(where), "summary": [printable(line) for line in summary]}
    return {**head, **empty, **data, "sections": shown}


def profile_view(profile: Profile) -> View:
    """The page of one window."""
    context, tables = profile.context, None if profile.traced is None else profile.traced.tables
    rows = _icicle(profile, tables)
    times, roofline = times_section(profile), _operators(profile)
    sections = [times]
    if profile.budget is not None:
        sections.append(breakdown_section(profile, profile.budget))
    sections.append(advice_section(profile.advice, rules=True, nothing=no_advice(profile)))
    if profile.notes:
        sections.append(notes_section(profile.notes))
    if rows:
        sections += [_all_modules(profile), modules_section(profile)]
    if roofline["operators"] or any(all(row[3][:3]) for row in rows):
        note = "How fast, over how many FLOPs a byte; areas are in proportion to time." + _estimated(profile)
        sections.append(Section("Roofline", note, []))
    sections += [one for one in detailed_sections(profile) if one.title not in ("Advice", "Notes")]
    prefix = f"Traced {context.step_word}: "
    if tables is not None:
        sections += [
            replace(one, title=f"{prefix}{one.title[:1].lower()}{one.title[1:]}") for one in trace_sections(tables)
        ]
    name = profile.modules[0].type_name if profile.modules else ""
    parts = [
        f"{context.device_name or 'unknown device'} ({context.device_type})",
        context.precision,
        f"{context.world_size} ranks" if context.world_size > 1 else "",
        f"step {profile.profile_step} counted",
    ]
    first = [f"Try first: {one.fact} {one.remedy}{saving(one)}" for one in profile.advice[:1]]
    pictures = {times.title: "steps", "Modules": "modules", "Roofline": "roofline"}
    return page_view(
        title=name or "FLOPs profile",
        where=" · ".join(filter(None, parts)),
        summary=[*answer(profile), *first],
        sections=sections,
        pictures={**pictures, f"{prefix}memory over time": "curves"},
        parts=step_parts(profile),
        steps=_steps(profile),
        modules=rows or None,
        roofline=roofline,
        curves=_curves(tables),
    )


def traces_views(report: TracesReport) -> list[tuple[str, View]]:
    """Name and page of each trace; what all of them say together is in each."""
    summary, views = answer_of_traces(report), []
    for trace, name in zip(report.traces, names_of(report), strict=True):
        notes = [notes_section(trace.notes)] if trace.notes else []
        view = page_view(
            title=f"Trace of {name}",
            where=f"{trace.source} · {plain(trace.events)} events",
            summary=summary,
            sections=[*ranks_of(report), advice_section(report.advice, rules=True), *notes, *trace_sections(trace)],
            pictures={"Memory over time": "curves", "FLOPs": "roofline"},
            roofline=_traced_operators(trace),
            curves=_curves(trace),
        )
        views.append((name, view))
    return views


def _steps(profile: Profile) -> Any:
    timing = profile.timing
    if timing is None or not timing.global_step.steps_sec:
        return None
    seconds = zip(*(part.steps_sec for part in timing.parts), strict=True)
    return {
        "names": [part.name for part in timing.parts],
        "items": [(f"step {index}", each) for index, each in zip(profile.timed_steps, seconds, strict=True)],
    }


def _estimated(profile: Profile) -> str:
    """What is said of rates of modules where the traced steps are not like the counted ones."""
    if profile.traced is None or profile.traced.like_counted:
        return ""
    return " FLOP/s are estimates: the traced steps' shapes are not those of the counted ones."


def _all_modules(profile: Profile) -> Section:
    word, timed = profile.context.step_word, any(one.times is not None for one in profile.modules)

    def per_step(label: str, of: Any, unit: str = "") -> Column:
        return quantity(label, lambda one: profile.per_step(of(one)), unit)

    columns = [
        Column("module", lambda one: one.name or "(root)", str),
        Column("class", lambda one: one.type_name or "(not described)", str, left=True),
        Column("params", lambda one: one.params),
        per_step("fwd", lambda one: one.total.forward, "FLOPs"),
        per_step("bwd", lambda one: one.total.backward + one.total.recompute, "FLOPs"),
        per_step("self", lambda one: one.own.total, "FLOPs"),
    ]
    if timed:
        times = {"fwd": "forward", "bwd": "backward", "self fwd": "own_forward", "self bwd": "own_backward"}
        columns += [quantity(label, at(f"times.{name}_sec"), "s") for label, name in times.items()]
        columns.append(share("fwd of peak", at("times.forward_utilization")))
        columns.append(share("bwd of peak", at("times.backward_utilization")))
    columns += [
        per_step("bytes", lambda one: one.total_bytes.total, "B"),
        per_step("calls", lambda one: one.calls),
        Column("", lambda one: one.extra_repr, str, left=True),
    ]
    steps = len(profile.counted_steps)
    counted = f"the mean of {steps} counted {word}s" if steps > 1 else f"of the counted {word}"
    note = f"FLOPs and bytes are {counted}" + (f", times of the traced {word}." if timed else ".")
    return Section("Modules", note + _estimated(profile), [table(profile.modules, columns, whole=True)])


def _icicle(profile: Profile, tables: TraceReport | None) -> list[list[Any]]:
    """Modules in tree order; time, FLOPs, bytes, parameters and kept memory of each, own and whole."""
    kept, per_step = _kept(tables), profile.per_step
    bytes_inside, params_inside = Counter[str](), Counter[str]()
    for module in profile.modules:
        if module.name and module.alias_of is None:
            bytes_inside[parent_name(module.name)] += module.total_bytes.total
            params_inside[parent_name(module.name)] += module.params
    rows = []
    for module in profile.modules:
        name, times, total, moved = module.name, module.times, module.total, module.total_bytes.total
        own_params = 0 if module.alias_of is not None else max(0, module.params - params_inside[name])
        own_bytes = per_step(max(0, moved - bytes_inside[name]))
        own = [None, per_step(module.own.total), own_bytes, own_params]
        whole = [None, per_step(total.total), per_step(moved), module.params]
        achieved = None
        if times is not None:
            own[0] = times.own_forward_sec + (times.own_backward_sec or 0.0)
            whole[0] = times.forward_sec + (times.backward_sec or 0.0)
            if (times.forward_flops_per_sec, times.backward_flops_per_sec) != (None, None):
                achieved = ratio(part=per_step(total.total - total.optimizer), whole=whole[0])
        own_kept, whole_kept = kept.get(name, (None, None))
        words = map(printable, (name, module.type_name, module.extra_repr))
        figures = (achieved, share_of_peak([module]), per_step(module.calls))
        rows.append([*words, [*own, own_kept], [*whole, whole_kept], *figures])
    return rows


def _kept(tables: TraceReport | None) -> Mapping[str, tuple[float, float]]:
    """Bytes that each module's forward keeps in one step, without and with the modules inside."""
    rows = () if tables is None else tables.module_memory or ()
    on_device = any(one.device >= 0 for one in rows)
    steps = 1 if tables is None else max(1, len(tables.step_times.steps))
    return {
        one.name: (one.self_size_increase_bytes / steps, one.size_increase_bytes / steps)
        for one in rows
        if one.name is not None and (one.device >= 0) == on_device
    }


def _operators(profile: Profile) -> dict[str, Any]:
    """The roofline, and what operators reach of it over how many FLOPs a byte."""
    known, bandwidth = profile.peaks_flops_per_sec, profile.memory_bytes_per_sec
    peaks = {one.dtype: known[one.dtype] for one in profile.dtypes if one.dtype in known}
    traced = {} if profile.traced is None else profile.traced.operators_sec
    seconds_of = {name.replace("::", "."): seconds for name, seconds in traced.items()}
    points = []
    for one in profile.operators:
        seconds, flops = seconds_of.get(one.operator), profile.per_step(one.flops.total)
        moved = profile.per_step(one.bytes)
        if seconds and flops and moved:
            limits = sorted(peaks[dtype] for dtype in one.dtypes if dtype in peaks)[-1:]
            limits += [] if bandwidth is None else [bandwidth * flops / moved]
            points.append([one.operator, seconds, flops / seconds, flops / moved, min(limits, default=None)])
    return _roofline(peaks, bandwidth, points)


def _traced_operators(trace: TraceReport) -> dict[str, Any]:
    flops, steps = trace.flops, max(1, len(trace.step_times.steps))
    if flops is None:
        return _roofline({}, None, [])
    points = [
        (
            *(f"{one.name} ({one.dtype})", one.time_us * _US / steps),
            *(one.flops_per_sec, one.flops_per_byte, one.attainable_flops_per_sec),
        )
        for one in flops.operators
        if one.flops_per_sec and one.flops_per_byte and one.time_us
    ]
    return _roofline(flops.peaks, flops.memory_bytes_per_sec, points)


def _roofline(peaks: Mapping[str, float], bandwidth: float | None, points: Sequence[Sequence[Any]]) -> dict[str, Any]:
    ordered = sorted(peaks.items(), key=lambda item: item[1], reverse=True)
    return {"peaks": ordered, "bandwidth": bandwidth, "operators": [[printable(name), *at] for name, *at in points]}


def _curves(tables: TraceReport | None) -> list[dict[str, Any]]:
    return [asdict(curve) for curve in (() if tables is None else tables.memory_curves or ())]
