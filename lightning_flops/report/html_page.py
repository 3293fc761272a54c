"""The page as one HTML file: what ``web/`` builds, and the views of profiles, traces or comparisons inside it.

A content security policy in the page's head names two files of the package by their digests. Nothing else may run, and
nothing may be loaded from anywhere. Views are compressed JSON; the names in them are text, never markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import cache
from importlib.resources import files
from operator import attrgetter, itemgetter
from typing import Any

import msgspec

from lightning_flops.analysis.counts import with_those_below
from lightning_flops.report.compare_text import comparison_sections
from lightning_flops.report.document import Column, Section, Table, as_data, at, share
from lightning_flops.report.module_text import where
from lightning_flops.report.profile_document import (
    NOT_DESCRIBED,
    notes_sections,
    own_sec,
    share_of_peak,
    short_sections,
)
from lightning_flops.report.text import detailed_sections, step_parts, summary
from lightning_flops.report.trace_document import (
    common_sections,
    names_of,
    summary as summary_of_traces,
    trace_sections,
)
from lightning_flops.schema import codec
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.profile import Profile, ProfiledRun
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.units import plain, plural, printable

BUNDLE = files("lightning_flops.report") / "page"  # what ``web/`` builds: ``page.js``, ``style.css``


class WindowFigures(msgspec.Struct):
    """One view in a few figures: what a strip of many views shows without reading any."""

    label: str  #: Its name in the list of views to choose from.
    profile_step: int = 0  #: Place of a window in its run.
    global_step_sec: float | None = None  #: Of a typical step, or the mean of all; None if none was timed.
    parts_sec: dict[str, float] = {}  #: The same, divided.
    mfu: float | None = None  #: Of the job; None where it is not known.
    address: str = ""  #: Query for the view, where TensorBoard's server has it.


class PageRun(msgspec.Struct):
    """One run as the page lists it."""

    name: str  #: Its name among the runs of the page.
    windows: list[WindowFigures] = []  #: One is shown at a time.
    problems: list[str] = []  #: What could not be read, in sentences.


View = dict[str, Any]  # plain JSON of one profile, trace or comparison, as ``web/src/document.ts`` has it
Window = tuple[WindowFigures, bytes]  # figures of a view that can be chosen, and the view, compressed
_Run = tuple[str, Iterable[Window], Iterable[str]]  # name, windows, and what could not be read


def render_page(runs: Sequence[ProfiledRun]) -> str:
    """The page of *runs*, whole: it needs no network, and opens from disk."""
    return _page("FLOPs profile", [(run.name, list(map(_window, run.windows)), run.problems) for run in runs])


def render_latest(profile: Profile, windows: deque[Window]) -> str:
    """The page of a run that is still going on: *profile* is its latest window, and comes behind *windows*."""
    windows.append(_window(profile))
    return _page("FLOPs profile", [("", windows, ())])


def render_comparison_page(comparison: Comparison) -> str:
    """The page of two runs compared."""
    title = f"{comparison.a.source} and {comparison.b.source} compared"
    first, *others = comparison_sections(comparison)
    view = page_view(title, "", [str(first.items[0])], [replace(first, items=first.items[1:]), *others])
    return _page(title, [("", [(WindowFigures(""), packed(view))], ())])


def render_traces_page(report: TracesReport) -> str:
    """The page of traces: it shows one of them at a time, and what they say together."""
    runs: list[_Run] = []
    for trace, name in zip(report.traces, names_of(report), strict=True):
        view = page_view(
            f"Trace of {name}",
            f"{trace.source} · {plain(trace.events)} events",
            summary_of_traces(report),
            [*common_sections(report), *notes_sections(trace.notes), *trace_sections(trace)],
            roofline=_traced_roofline(trace),
            curves=_curves(trace),
        )
        runs.append((name, [(WindowFigures(""), packed(view))], ()))
    return _page(f"Trace of {runs[0][0]}" if len(runs) == 1 else f"{len(runs)} traces", runs)


def _page(title: str, runs: Sequence[_Run]) -> str:
    """The page of *runs*, of which one is shown at a time."""
    listed = [
        PageRun(printable(name), [figures for figures, _ in windows], [*map(printable, problems)])
        for name, windows, problems in runs
    ]
    views = "".join(
        f'<script type="text/plain" id="view-{place}-{number}">{base64.b64encode(view).decode("ascii")}</script>\n'
        for place, (_, windows, _) in enumerate(runs)
        for number, (_, view) in enumerate(windows)
    )
    script, style = bundled("page.js"), bundled("style.css")
    of_script, of_style = (
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") for text in (script, style)
    )
    policy = (
        f"default-src 'none'; script-src 'sha256-{of_script}'; style-src 'sha256-{of_style}'; base-uri 'none'; "
        "form-action 'none'"
    )
    # A name cannot end the element: a reader of JSON takes an escape for the sign itself.
    data = document(listed).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(printable(title))}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="app"><noscript>This page shows figures with a script; the JSON that it was made from has them all.'
        f'</noscript></div>\n<script type="application/json" id="document">{data}</script>\n{views}'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def document(runs: Sequence[PageRun]) -> str:
    """What the page reads first, as JSON: the runs and their windows."""
    package = sys.modules["lightning_flops"]  # the root, which knows every folder, is always imported first
    return msgspec.json.encode({"written_by": package.__version__, "runs": runs}).decode()


def packed(value: object) -> bytes:
    """The JSON of a view, compressed by gzip; the same bytes for equal ones."""
    return gzip.compress(codec.dump(value, indented=False).encode(), compresslevel=6, mtime=0)


def _window(profile: Profile) -> Window:
    return window_figures(profile), packed(profile_view(profile))


def window_figures(profile: Profile) -> WindowFigures:
    """One window in a few figures."""
    return WindowFigures(
        label=f"{profile.profile_step:,}",
        profile_step=profile.profile_step,
        global_step_sec=at("timing.global_step_sec")(profile),
        parts_sec=dict(step_parts(profile)),
        mfu=profile.job_rates.mfu,
    )


@cache
def bundled(name: str) -> str:
    """The text of a file that ``web/`` built."""
    return (BUNDLE / name).read_text(encoding="utf-8")


# ---- views


def page_view(title: str, where: str, summary: Sequence[str], sections: Iterable[Section], **data: Any) -> View:
    """A view of *sections*, whose pictures are drawn of *data*."""
    return {
        "title": printable(title),
        "where": printable(where),
        "summary": list(map(printable, summary)),
        **{"parts": [], "steps": None, "modules": [], "roofline": None, "curves": [], **data},
        "sections": list(map(as_data, sections)),
    }


def profile_view(profile: Profile) -> View:
    """The page of one window."""
    keys, modules = _all_modules(profile)
    roofline = "ownSec" in keys and profile.bytes_total.total
    note = "How fast, over how many FLOPs a byte; areas are in proportion to time."
    sections = [
        *short_sections(profile),
        *([modules] if profile.modules else []),
        *([Section("Roofline", note, [], "roofline")] if roofline else []),
        *detailed_sections(profile, traced=()),
    ]
    known = profile.peaks_flops_per_sec
    peaks = sorted(((one.dtype, known[one.dtype]) for one in profile.dtypes if one.dtype in known), key=itemgetter(1))
    return page_view(
        (profile.modules[0].type_name if profile.modules else "") or "FLOPs profile",
        f"{where(profile)}, step {profile.profile_step} counted",
        summary(profile),
        sections,
        parts=step_parts(profile),
        steps=_steps(profile),
        modules=keys,
        roofline={"peaks": peaks[::-1], "bandwidth": profile.memory_bytes_per_sec, "operators": []},
        curves=_curves(at("traced.tables")(profile)),
    )


def _steps(profile: Profile) -> Any:
    timing = profile.timing
    if timing is None or not timing.global_step.steps_sec:
        return None
    steps, seconds = profile.timed_steps, zip(*(part.steps_sec for part in timing.parts), strict=True)
    return {
        "names": [part.name for part in timing.parts],
        "items": [(f"step {index}", each) for index, each in zip(steps, seconds, strict=True)],
    }


def _all_modules(profile: Profile) -> tuple[list[str], Section]:
    """Every module with what is known of any, and the keys by which the page's picture finds the columns."""

    def per_step(label: str, of: Any, unit: str = "") -> Column:
        return Column(label, lambda one: profile.per_step(of(one)), unit=unit)

    tensors = () if profile.tensors is None else profile.tensors.modules
    held = with_those_below({one.name: one.peak_bytes for one in tensors}, 0)
    columns = {
        "name": Column("module", lambda one: one.name or "(root)", str),
        "type": Column("class", lambda one: one.type_name or NOT_DESCRIBED, str, left=True),
        "params": Column("params", at("params")),
        "forward": per_step("fwd", at("total.forward"), "FLOPs"),
        "backward": per_step("bwd", lambda one: one.total.backward + one.total.recompute, "FLOPs"),
        "own": per_step("self", at("own.total"), "FLOPs"),
        "forwardSec": Column("fwd", at("times.forward_sec"), unit="s"),
        "backwardSec": Column("bwd", at("times.backward_sec"), unit="s"),
        "ownSec": Column("self", lambda one: own_sec([one]), unit="s"),
        "share": share("of peak", lambda one: share_of_peak([one])),
        "bytes": per_step("bytes", at("total_bytes.total"), "B"),
        "memory": Column("held at the peak", lambda one: held.get(one.name, 0) if held else None, unit="B"),
        "calls": per_step("calls", at("calls")),
        "detail": Column("", at("extra_repr"), str, left=True),
    }
    shown = {key: one for key, one in columns.items() if any(one.of(row) is not None for row in profile.modules)}
    steps = plural(profile.context.step_word, 2)
    note = f"FLOPs and bytes are means of the counted {steps}, times of the traced {steps}."
    return list(shown), Section("Modules", note, [Table(profile.modules, list(shown.values()), True)], "modules")


def _traced_roofline(trace: TraceReport) -> dict[str, Any] | None:
    if (flops := trace.flops) is None:
        return None
    figures = attrgetter("flops_per_sec", "flops_per_byte", "attainable_flops_per_sec")
    points = [
        (printable(f"{one.name} ({one.dtype})"), one.time_us * 1e-6 / len(flops.steps), *figures(one))
        for one in flops.operators
        if one.flops_per_sec and one.flops_per_byte and one.time_us
    ]
    peaks = sorted(flops.peaks.items(), key=itemgetter(1), reverse=True)
    return {"peaks": peaks, "bandwidth": flops.memory_bytes_per_sec, "operators": points}


def _curves(tables: TraceReport | None) -> list[dict[str, Any]]:
    return [asdict(curve) for curve in (() if tables is None else tables.memory_curves or ())]
