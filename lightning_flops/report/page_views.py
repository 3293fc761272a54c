"""What the page shows of a profile, of a trace and of a comparison: the sections of its document, and its pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
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
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.text.printable import printable
from lightning_flops.units import plain

_US = 1e-6

View = dict[str, Any]
"""Plain JSON of one profile, trace or comparison, as ``web/src/document.ts`` has it."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A picture that the page draws between the tables, from the view's field of this name."""

    picture: str


def page_view(
    *, title: str, where: str, summary: Sequence[str], sections: Iterable[Section | Picture], **pictures: Any
) -> View:
    """A view of *sections*; a picture belongs to the section before it."""
    shown: list[dict[str, Any]] = []
    for one in sections:
        if isinstance(one, Picture):
            shown[-1]["items"].insert(0, {"picture": one.picture})
        else:
            shown.append(as_data(one))
    empty: View = {"parts": [], "steps": None, "modules": None, "roofline": None, "curves": []}
    head = {"title": printable(title), "where": printable(where), "summary": [printable(line) for line in summary]}
    return {**head, **empty, **pictures, "sections": shown}


def profile_view(profile: Profile) -> View:
    """The page of one window."""
    context, tables = profile.context, None if profile.traced is None else profile.traced.tables
    rows = _profile_modules(profile)
    points, steps = _profile_points(profile, rows), _steps(profile)
    sections: list[Section | Picture] = [times_section(profile), *([Picture("steps")] if steps else [])]
    if profile.budget is not None:
        sections.append(breakdown_section(profile, profile.budget))
    sections.append(advice_section(profile.advice, rules=True, nothing=no_advice(profile)))
    if profile.notes:
        sections.append(notes_section(profile.notes))
    if rows:
        sections += [_all_modules(profile), Picture("modules"), modules_section(profile)]
    if points["modules"] or points["operators"]:
        note = "How fast, over how many FLOPs a byte; areas are in proportion to time." + _estimated(profile)
        sections += [Section("Roofline", note, []), Picture("roofline")]
    sections += [one for one in detailed_sections(profile) if one.title not in ("Advice", "Notes")]
    if tables is not None:
        sections += _traced(tables, f"Traced {context.step_word}: ")
    name = profile.modules[0].type_name if profile.modules else ""
    parts = [
        f"{context.device_name or 'unknown device'} ({context.device_type})",
        context.precision,
        f"{context.world_size} ranks" if context.world_size > 1 else "",
        f"step {profile.profile_step} counted",
    ]
    first = [f"Try first: {one.fact} {one.remedy}{saving(one)}" for one in profile.advice[:1]]
    return page_view(
        title=name or "FLOPs profile",
        where=" · ".join(filter(None, parts)),
        summary=[*answer(profile), *first],
        sections=sections,
        parts=[[name, seconds] for name, seconds in step_parts(profile)],
        steps=steps,
        modules=rows or None,
        roofline=points,
        curves=_curves(tables),
    )


def _traced(tables: TraceReport, prefix: str = "") -> Iterator[Section | Picture]:
    for one in trace_sections(tables):
        title = f"{prefix}{one.title[:1].lower()}{one.title[1:]}" if prefix else one.title
        yield Section(title, one.note, one.items)
        if one.title == "Memory over time":
            yield Picture("curves")
        if one.title == "FLOPs" and not prefix:
            yield Picture("roofline")


def traces_views(report: TracesReport) -> list[tuple[str, View]]:
    """Name and page of each trace; what all of them say together is in each."""
    summary, views = answer_of_traces(report), []
    for trace, name in zip(report.traces, names_of(report), strict=True):
        notes = [notes_section(trace.notes)] if trace.notes else []
        view = page_view(
            title=f"Trace of {name}",
            where=f"{trace.source} · {plain(trace.events)} events",
            summary=summary,
            sections=[*ranks_of(report), advice_section(report.advice, rules=True), *notes, *_traced(trace)],
            roofline=_trace_points(trace),
            curves=_curves(trace),
        )
        views.append((name, view))
    return views


def _steps(profile: Profile) -> Any:
    timing = profile.timing
    if timing is None or not timing.global_step.steps_sec:
        return None
    return {
        "names": [part.name for part in timing.parts],
        "items": [
            [f"step {index}", [part.steps_sec[place] for part in timing.parts]]
            for place, index in enumerate(profile.timed_steps)
        ],
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
        columns += [
            share("fwd of peak", at("times.forward_utilization")),
            share("bwd of peak", at("times.backward_utilization")),
        ]
    columns += [
        per_step("bytes", lambda one: one.total_bytes.total),
        per_step("calls", lambda one: one.calls),
        Column("", lambda one: one.extra_repr, str, left=True),
    ]
    steps = len(profile.counted_steps)
    counted = f"the mean of {steps} counted {word}s" if steps > 1 else f"of the counted {word}"
    note = f"FLOPs and bytes are {counted}" + (f", times of the traced {word}." if timed else ".")
    return Section("Modules", note + _estimated(profile), [table(profile.modules, columns, whole=True)])


def _profile_modules(profile: Profile) -> list[list[Any]]:
    """The icicle: modules by their parents; time, FLOPs, bytes, parameters and kept memory of each, own and whole."""
    kept, per_step = _kept(None if profile.traced is None else profile.traced.tables), profile.per_step
    place = {module.name: number for number, module in enumerate(profile.modules)}
    inside: dict[str, list[ModuleProfile]] = {}
    for module in profile.modules:
        if module.name and module.alias_of is None:
            inside.setdefault(parent_name(module.name), []).append(module)
    rows = []
    for module in profile.modules:
        below, times = inside.get(module.name, []), module.times
        moved = module.total_bytes.total
        own_bytes = per_step(max(0, moved - sum(one.total_bytes.total for one in below)))
        own_params = 0 if module.alias_of is not None else max(0, module.params - sum(one.params for one in below))
        seconds = None if times is None else times.forward_sec + (times.backward_sec or 0.0)
        own_sec = None if times is None else times.own_forward_sec + (times.own_backward_sec or 0.0)
        memory = kept.get(module.name, (None, None))
        rows.append(
            [
                *map(printable, (module.name, module.short_name, module.type_name, module.extra_repr)),
                place.get(parent_name(module.name)) if module.name else None,
                [own_sec, per_step(module.own.total), own_bytes, own_params, memory[1]],
                [seconds, per_step(module.total.total), per_step(moved), module.params, memory[0]],
                _achieved(profile, module),
                share_of_peak([module]),
                per_step(module.calls),
            ]
        )
    return rows


def _achieved(profile: Profile, module: ModuleProfile) -> float | None:
    """FLOP/s of a module's forward and backward in the traced step; None where that was no such step."""
    times = module.times
    if times is None or (times.forward_flops_per_sec is None and times.backward_flops_per_sec is None):
        return None
    spent = profile.per_step(module.total.total - module.total.optimizer)
    return ratio(part=spent, whole=times.forward_sec + (times.backward_sec or 0.0))


def _kept(tables: TraceReport | None) -> Mapping[str, tuple[float, float]]:
    """Bytes that each module's forward keeps in one step, with and without the modules inside."""
    rows = () if tables is None else tables.module_memory or ()
    on_device = any(one.device >= 0 for one in rows)
    steps = 1 if tables is None else max(1, len(tables.step_times.steps))
    return {
        one.name: (one.size_increase_bytes / steps, one.self_size_increase_bytes / steps)
        for one in rows
        if one.name is not None and (one.device >= 0) == on_device
    }


def _profile_points(profile: Profile, rows: Sequence[list[Any]]) -> dict[str, Any]:
    """The roofline: what modules and operators reach over how many FLOPs a byte."""
    known = profile.peaks_flops_per_sec
    peaks = {one.dtype: known[one.dtype] for one in profile.dtypes if one.dtype in known}
    found = _roofline(peaks, profile.memory_bytes_per_sec)
    if profile.traced is None:
        return found

    def add(kind: str, name: str, words: str, amounts: Sequence[Any], dtypes: Iterable[str]) -> None:
        seconds, flops, moved = amounts
        if flops and moved and seconds:
            bandwidth, limits = found["bandwidth"], sorted(peaks[one] for one in dtypes if one in peaks)[-1:]
            limit = min([*limits, *([] if bandwidth is None else [bandwidth * flops / moved])], default=None)
            names = (printable(name), printable(words))
            found[kind].append([*names, flops / moved, flops / seconds, seconds, flops, moved, limit])

    for module, row in zip(profile.modules, rows, strict=True):
        add("modules", module.name or "(root)", module.type_name, row[5][:3], peaks)
    seconds_of = {name.replace("::", "."): one.self_sec for name, one in profile.traced.operators.items()}
    for spent in profile.operators:
        flops, moved = profile.per_step(spent.flops.total), profile.per_step(spent.bytes)
        amounts = (seconds_of.get(spent.operator), flops, moved)
        add("operators", spent.operator, "operator", amounts, spent.dtypes)
    return found


def _roofline(peaks: Mapping[str, float], bandwidth: float | None) -> dict[str, Any]:
    ordered = sorted(peaks.items(), key=lambda item: item[1], reverse=True)
    return {"peaks": [list(one) for one in ordered], "bandwidth": bandwidth, "modules": [], "operators": []}


def _curves(tables: TraceReport | None) -> list[dict[str, Any]]:
    return [asdict(curve) for curve in (() if tables is None else tables.memory_curves or ())]


def _trace_points(trace: TraceReport) -> dict[str, Any]:
    flops, steps = trace.flops, max(1, len(trace.step_times.steps))
    if flops is None:
        return _roofline({}, None)
    points = [
        [
            *(printable(f"{one.name} ({one.dtype})"), "operator"),
            *(one.flops_per_byte, one.flops_per_sec, one.time_us * _US / steps),
            *(one.total / steps, one.bytes / steps, one.attainable_flops_per_sec),
        ]
        for one in flops.operators
        if one.flops_per_sec and one.flops_per_byte and one.time_us and one.bytes
    ]
    return {**_roofline(flops.peaks, flops.memory_bytes_per_sec), "operators": points}
