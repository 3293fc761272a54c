"""What the page shows of a profile, of a trace and of a comparison: the sections of its document, and its pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning_flops.report.document import Column, Section, Table, as_data, at, field, quantity, share
from lightning_flops.report.headline import answer, step_parts
from lightning_flops.report.profile_document import (
    advice_section,
    notes_section,
    saving,
    share_of_peak,
    short_sections,
)
from lightning_flops.report.text import detailed_sections
from lightning_flops.report.trace_document import trace_sections
from lightning_flops.report.trace_text import answer as answer_of_traces
from lightning_flops.report.trace_text import names_of, ranks_of
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.text.printable import printable
from lightning_flops.units import plain, plural

_US = 1e-6

View = dict[str, Any]
"""Plain JSON of one profile, trace or comparison, as ``web/src/document.ts`` has it."""


def page_view(*, title: str, where: str, summary: Sequence[str], sections: Iterable[Section], **data: Any) -> View:
    """A view of *sections*, whose pictures are drawn of *data*."""
    head = {"title": printable(title), "where": printable(where), "summary": list(map(printable, summary))}
    empty: View = {"parts": [], "steps": None, "modules": [], "roofline": None, "curves": []}
    return {**head, **empty, **data, "sections": list(map(as_data, sections))}


def profile_view(profile: Profile) -> View:
    """The page of one window."""
    context, tables = profile.context, None if profile.traced is None else profile.traced.tables
    roofline, keys = _operators(profile), list[str]()
    sections = list(short_sections(profile, advice=None, notes=None, rules=True))
    if profile.modules:
        keys, modules = _all_modules(profile)
        sections.append(modules)
    if roofline["operators"] or ("ownSec" in keys and profile.bytes_total.total):
        note = "How fast, over how many FLOPs a byte; areas are in proportion to time." + _estimated(profile)
        sections.append(Section("Roofline", note, [], "roofline"))
    sections += detailed_sections(profile)
    for one in () if tables is None else trace_sections(tables):
        sections.append(replace(one, title=f"Traced {context.step_word}: {one.title[:1].lower()}{one.title[1:]}"))
    parts = [
        f"{context.device_name or 'unknown device'} ({context.device_type})",
        context.precision,
        f"{context.world_size} ranks" if context.world_size > 1 else "",
        f"step {profile.profile_step} counted",
    ]
    first = [f"Try first: {one.fact} {one.remedy}{saving(one)}" for one in profile.advice[:1]]
    return page_view(
        title=(profile.modules[0].type_name if profile.modules else "") or "FLOPs profile",
        where=" · ".join(filter(None, parts)),
        summary=[*answer(profile), *first],
        sections=sections,
        parts=step_parts(profile),
        steps=_steps(profile),
        modules=keys,
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


def _all_modules(profile: Profile) -> tuple[list[str], Section]:
    """Every module with what is known of any, and the keys by which the page's picture finds the columns."""
    word, steps = profile.context.step_word, len(profile.counted_steps)

    def per_step(label: str, of: Any, unit: str = "") -> Column:
        return quantity(label, lambda one: profile.per_step(of(one)), unit)

    def own_sec(one: ModuleProfile) -> float | None:
        return None if one.times is None else one.times.own_forward_sec + (one.times.own_backward_sec or 0.0)

    columns = {
        "name": Column("module", lambda one: one.name or "(root)", str),
        "type": Column("class", lambda one: one.type_name or "(not described)", str, left=True),
        "params": field("params", "params"),
        "forward": per_step("fwd", at("total.forward"), "FLOPs"),
        "backward": per_step("bwd", lambda one: one.total.backward + one.total.recompute, "FLOPs"),
        "own": per_step("self", at("own.total"), "FLOPs"),
        "forwardSec": quantity("fwd", at("times.forward_sec"), "s"),
        "backwardSec": quantity("bwd", at("times.backward_sec"), "s"),
        "ownSec": quantity("self", own_sec, "s"),
        "share": share("of peak", lambda one: share_of_peak([one])),
        "bytes": per_step("bytes", at("total_bytes.total"), "B"),
        "calls": per_step("calls", at("calls")),
        "detail": Column("", at("extra_repr"), str, left=True),
    }
    shown = {key: one for key, one in columns.items() if any(one.of(row) is not None for row in profile.modules)}
    counted = f"the mean of {steps} counted {plural(word, steps)}" if steps > 1 else f"of the counted {word}"
    note = f"FLOPs and bytes are {counted}, times of the traced {word}.{_estimated(profile)}"
    return list(shown), Section("Modules", note, [Table(profile.modules, list(shown.values()), True)], "modules")


def _operators(profile: Profile) -> dict[str, Any]:
    """The roofline, and what operators reach of it over how many FLOPs a byte."""
    known, bandwidth = profile.peaks_flops_per_sec, profile.memory_bytes_per_sec
    peaks = {one.dtype: known[one.dtype] for one in profile.dtypes if one.dtype in known}
    traced = {} if profile.traced is None else profile.traced.operators
    seconds_of = {name.replace("::", "."): one.self_sec for name, one in traced.items()}
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
        (f"{one.name} ({one.dtype})", one.time_us * _US / steps, one.flops_per_sec, one.flops_per_byte, attainable)
        for one in flops.operators
        if one.flops_per_sec and one.flops_per_byte and one.time_us
        for attainable in [one.attainable_flops_per_sec]
    ]
    return _roofline(flops.peaks, flops.memory_bytes_per_sec, points)


def _roofline(peaks: Mapping[str, float], bandwidth: float | None, points: Sequence[Sequence[Any]]) -> dict[str, Any]:
    ordered = sorted(peaks.items(), key=lambda item: -item[1])
    return {"peaks": ordered, "bandwidth": bandwidth, "operators": [[printable(name), *at] for name, *at in points]}


def _curves(tables: TraceReport | None) -> list[dict[str, Any]]:
    return [asdict(curve) for curve in (() if tables is None else tables.memory_curves or ())]
