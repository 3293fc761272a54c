"""What the page shows of a profile, of a trace and of a comparison: the sections of its document, and its pictures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_flops.analysis.module_names import parent_name
from lightning_flops.analysis.rank_names import name_files
from lightning_flops.report.document import Column, Section, as_data, quantity, share, table
from lightning_flops.report.headline import answer_lines, step_parts
from lightning_flops.report.layout import WHOLE
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
from lightning_flops.report.ranks_document import rank_section
from lightning_flops.report.text import detailed_sections
from lightning_flops.report.trace_document import trace_sections
from lightning_flops.report.trace_text import answer_lines as traces_answer
from lightning_flops.report.trace_text import name_of
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import Roofline
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.schema.trace_events import MemoryCurve
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
    words = [printable(line) for line in summary]
    return {
        "title": printable(title),
        "where": printable(where),
        "summary": words,
        **empty,
        **pictures,
        "sections": shown,
    }


def profile_view(profile: Profile) -> View:
    """The page of one window."""
    context, tables = profile.context, None if profile.traced is None else profile.traced.tables
    rows = _profile_modules(profile)
    points = _profile_points(profile, rows)
    sections: list[Section | Picture] = [times_section(profile)]
    if profile.timing is not None and profile.timing.global_step.steps_sec:
        sections.append(Picture("steps"))
    if profile.budget is not None:
        sections.append(breakdown_section(profile))
    sections.append(advice_section(profile.advice, rules=True, nothing=no_advice(profile)))
    if profile.notes:
        sections.append(notes_section(profile.notes))
    if rows:
        sections += [Section("Modules", _modules_note(profile), [_all_modules(profile)]), Picture("modules")]
        sections.append(modules_section(profile))
    if any(points[kind] for kind in ("modules", "operators")):
        note = "How fast, over how many FLOPs a byte; areas are in proportion to time."
        sections += [Section("Roofline", note, []), Picture("roofline")]
    elif profile.traced is not None and not profile.traced.like_counted:
        note = f"n/a: the shapes of the traced {context.step_word}s are not those of the counted ones."
        sections.append(Section("Roofline", note, []))
    curves = [] if tables is None else [_curve(one) for one in tables.memory_curves or ()]
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
    return page_view(
        title=name or "FLOPs profile",
        where=" · ".join(filter(None, parts)),
        summary=[
            *answer_lines(profile, advice=False, bar=False, whole=True),
            *(f"Try first: {one.fact} {one.remedy}{saving(one)}" for one in profile.advice[:1]),
        ],
        sections=sections,
        parts=[[name, seconds] for name, seconds in step_parts(profile)],
        steps=_steps(profile),
        modules=rows or None,
        roofline=points,
        curves=curves,
    )


def _traced(tables: TraceReport, prefix: str = "") -> Iterator[Section | Picture]:
    for one in trace_sections(tables):
        first = one.title[:1].lower() if prefix else one.title[:1]
        yield Section(f"{prefix}{first}{one.title[1:]}", one.note, one.items)
        if one.title == "Memory over time":
            yield Picture("curves")
        if one.title == "FLOPs" and not prefix:
            yield Picture("roofline")
        if one.title.startswith("Modules") and not prefix:
            yield Picture("modules")


def traces_views(report: TracesReport) -> list[tuple[str, View]]:
    """Name and page of each trace; what all of them say together is in each."""
    files = name_files([trace.source for trace in report.traces])
    together: list[Section] = []
    if report.ranks is not None:
        straggles = any(advice.rule == "straggler" for advice in report.advice)
        together.append(rank_section(report.ranks, straggles=straggles))
    summary = whole_sentences(traces_answer(report, files, WHOLE)[1:])
    views = []
    for trace, file in zip(report.traces, files, strict=True):
        name = name_of(trace, file)
        notes = [notes_section(trace.notes)] if trace.notes else []
        view = page_view(
            title=f"Trace of {name}",
            where=f"{trace.source} · {plain(trace.events)} events",
            summary=summary,
            sections=[*together, advice_section(report.advice, rules=True), *notes, *_traced(trace)],
            **trace_pictures(trace),
        )
        views.append((name, view))
    return views


def whole_sentences(lines: Sequence[str]) -> list[str]:
    """*lines* with those that go on with the one before in one."""
    return "\n".join(lines).replace("\n  ", " ").split("\n")


def _steps(profile: Profile) -> Any:
    timing = profile.timing
    if timing is None or not timing.global_step.steps_sec:
        return None
    labels = [f"step {index}" for index in profile.timed_steps]
    return {
        "names": [part.name for part in timing.parts],
        "items": [[label, [part.steps_sec[at] for part in timing.parts]] for at, label in enumerate(labels)],
    }


def _modules_note(profile: Profile) -> str:
    word = profile.context.step_word
    timed = any(module.times is not None for module in profile.modules)
    return f"FLOPs and bytes are of the counted {word}" + (f", times of the traced {word}." if timed else ".")


def _all_modules(profile: Profile) -> Any:
    per_step = profile.per_step
    columns = [
        Column("module", lambda one: one.name or "(root)", str),
        Column("class", lambda one: one.type_name or "(not described)", str, left=True),
        quantity("params", lambda one: one.params, ""),
        quantity("fwd", lambda one: per_step(one.total.forward), "FLOPs"),
        quantity("bwd", lambda one: per_step(one.total.backward + one.total.recompute), "FLOPs"),
        quantity("self", lambda one: per_step(one.own.total), "FLOPs"),
    ]
    if any(one.times is not None for one in profile.modules):

        def of_times(name: str) -> Any:
            return lambda one: None if one.times is None else getattr(one.times, name)

        columns += [
            quantity("fwd", of_times("forward_sec"), "s"),
            quantity("bwd", of_times("backward_sec"), "s"),
            quantity("self fwd", of_times("own_forward_sec"), "s"),
            quantity("self bwd", of_times("own_backward_sec"), "s"),
            share("fwd of peak", of_times("forward_utilization")),
            share("bwd of peak", of_times("backward_utilization")),
        ]
    columns += [
        Column("bytes", lambda one: per_step(one.total_bytes.total)),
        Column("calls", lambda one: per_step(one.calls)),
        Column("", lambda one: one.extra_repr, str, left=True),
    ]
    return table(profile.modules, columns, whole=True)


def _module(name: str, kind: str, detail: str, parent: int | None) -> list[Any]:
    """What begins a module of the icicle; times, FLOPs, bytes, parameters and kept memory of it follow."""
    label = name if parent is None else name.rpartition(".")[2]
    return [*map(printable, (name, label, kind, detail)), parent]


def _profile_modules(profile: Profile) -> list[list[Any]]:
    kept, per_step = _kept(None if profile.traced is None else profile.traced.tables), profile.per_step
    place = {module.name: at for at, module in enumerate(profile.modules)}
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
        seconds = own_sec = None
        if times is not None:
            seconds = times.forward_sec + (times.backward_sec or 0.0)
            own_sec = times.own_forward_sec + (times.own_backward_sec or 0.0)
        memory = kept.get(module.name, (None, None))
        parent = place.get(parent_name(module.name)) if module.name else None
        rows.append(
            [
                *_module(module.name, module.type_name, module.extra_repr, parent),
                [own_sec, per_step(module.own.total), own_bytes, own_params, memory[1]],
                [seconds, per_step(module.total.total), per_step(moved), module.params, memory[0]],
                None if module.roofline is None else module.roofline.achieved_flops_per_sec,
                share_of_peak([module]),
                per_step(module.calls),
            ]
        )
    return rows


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
    known = [(one.peak_flops_per_sec, one.dtype) for one in profile.dtypes if one.peak_flops_per_sec and one.hardware]
    peaks = [[dtype, peak] for peak, dtype in sorted(known, reverse=True)]
    bandwidth = profile.memory_bytes_per_sec
    found: dict[str, Any] = {"peaks": peaks, "bandwidth": bandwidth, "modules": [], "operators": []}
    if profile.traced is None or not profile.traced.like_counted:
        return found

    def add(kind: str, name: str, words: str, amounts: Sequence[Any], known: Roofline | None) -> None:
        seconds, flops, moved = amounts
        if flops and moved and seconds:
            limits = [*(peak for _, peak in peaks[:1]), *([] if bandwidth is None else [bandwidth * flops / moved])]
            limit = (known and known.attainable_flops_per_sec) or min(limits, default=None)
            point = [printable(name), printable(words), flops / moved, flops / seconds, seconds, flops, moved, limit]
            found[kind].append(point)

    for module, row in zip(profile.modules, rows, strict=True):
        roof = module.roofline if module.own == module.total else None
        add("modules", module.name or "(root)", module.type_name, row[5][:3], roof)
    seconds_of = {name.replace("::", "."): one.self_sec for name, one in profile.traced.operators.items()}
    for spent in profile.operators:
        flops, moved = profile.per_step(spent.flops.total), profile.per_step(spent.bytes_read + spent.bytes_written)
        amounts = (seconds_of.get(spent.operator), flops, moved)
        add("operators", spent.operator, "operator", amounts, spent.roofline)
    return found


def trace_pictures(trace: TraceReport) -> dict[str, Any]:
    """Modules, roofline and memory of a trace, of one of its steps."""
    return {
        "modules": _trace_modules(trace) or None,
        "roofline": _trace_points(trace),
        "curves": [_curve(one) for one in trace.memory_curves or ()],
    }


def _curve(curve: MemoryCurve) -> dict[str, Any]:
    points = [dict(zip(("us", "bytes"), point, strict=True)) for point in curve.points]
    spans = [dict(zip(("name", "start_us", "end_us"), span, strict=True)) for span in curve.spans]
    return asdict(curve) | {"points": points, "spans": spans}


def _trace_modules(trace: TraceReport) -> list[list[Any]]:
    """The modules that a trace shows, below a root that stands for all of them."""
    rows = () if trace.modules is None else trace.modules.rows
    if not any(one.name or one.calls for one in rows):
        return []
    flops = {one.name: one for one in (() if trace.flops is None else trace.flops.modules or ())}
    steps, kept = max(1, trace.modules.steps if trace.modules is not None else 1), _kept(trace)
    place: dict[str, int] = {}
    made: list[list[Any]] = []
    named = {one.name: one for one in rows}
    if "" not in named:
        seconds = sum(one.own_forward_us + one.own_backward_us for one in rows) * _US / steps
        nothing = [None] * 3
        made.append([*_module("", "", "", None), [0.0, 0, *nothing], [seconds, None, *nothing], None, None, 0])
        place[""] = 0
    for name in sorted(named, key=_by_parts):
        row, counted = named[name], flops.get(name)
        above = parent_name(name)
        while above and above not in place:
            above = parent_name(above)
        own_flops = total_flops = None if trace.flops is None else 0.0
        if counted is not None:
            own_flops = counted.own / steps
            total_flops = counted.counted / steps
        memory = kept.get(name, (None, None))
        parent = place[above] if made else None
        place[name] = len(made)
        made.append(
            [
                *_module(name, "", "", parent),
                [(row.own_forward_us + row.own_backward_us) * _US / steps, own_flops, None, None, memory[1]],
                [(row.forward_us + row.backward_us) * _US / steps, total_flops, None, None, memory[0]],
                None if counted is None else counted.flops_per_sec,
                None if counted is None else counted.peak_share,
                row.calls / steps,
            ]
        )
    return made


def _by_parts(name: str) -> list[tuple[bool, int, str]]:
    """What sorts names by their parts, numbers by value, what contains before what is contained."""
    parts = name.split(".") if name else []
    return [(part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in parts]


def _trace_points(trace: TraceReport) -> dict[str, Any]:
    flops, steps = trace.flops, max(1, len(trace.step_times.steps))
    known = {} if flops is None else flops.peaks
    peaks = [[dtype, known[dtype]] for dtype in sorted(known, key=lambda one: known[one], reverse=True)]
    points = []
    for one in () if flops is None else flops.operators:
        if one.flops_per_sec and one.flops_per_byte and one.time_us and one.bytes:
            points.append(
                [
                    *(printable(f"{one.name} ({one.dtype})"), "operator"),
                    *(one.flops_per_byte, one.flops_per_sec, one.time_us * _US / steps),
                    *(one.counted / steps, one.bytes / steps, one.attainable_flops_per_sec),
                ]
            )
    bandwidth = None if flops is None else flops.memory_bytes_per_sec
    return {"peaks": peaks, "bandwidth": bandwidth, "modules": [], "operators": points}
