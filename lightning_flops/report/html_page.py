"""The page as one HTML file: what ``web/`` builds, and the views of profiles, traces or comparisons inside it.

A content security policy in the page's head names two files of the package by their digests. Nothing else may run, and
nothing may be loaded from anywhere. Views are compressed data, which the page reads as JSON; the names in them are text
there, never markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.resources import files

import msgspec

from lightning_flops.report.compare_text import comparison_headline, comparison_sections
from lightning_flops.report.headline import step_parts
from lightning_flops.report.page_views import page_view, profile_view, traces_views
from lightning_flops.schema import codec
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.profile import Profile, ProfiledRun
from lightning_flops.schema.trace import TracesReport
from lightning_flops.text.printable import printable

BUNDLE = files("lightning_flops.report") / "page"
"""What ``web/`` builds: ``page.js``, ``style.css``."""


class WindowFigures(msgspec.Struct):
    """One view in a few figures: what a strip of many views shows without reading any."""

    label: str
    """Its name in the list of views to choose from."""
    profile_step: int = 0
    """Place of a window in its run."""
    global_step_sec: float | None = None
    """Of a typical step, or the mean of all; None if none was timed."""
    parts_sec: dict[str, float] = {}
    """The same, divided."""
    mfu: float | None = None
    """Of the job; None where it is not known."""
    address: str = ""
    """Query for the view, where TensorBoard's server has it."""


class PageRun(msgspec.Struct):
    """One run as the page lists it."""

    name: str
    """Its name among the runs of the page."""
    windows: list[WindowFigures] = []
    """One is shown at a time."""
    problems: list[str] = []
    """What could not be read, in sentences."""


Window = tuple[WindowFigures, bytes]
"""Figures of a view that can be chosen, and the view, compressed."""
_Run = tuple[str, Iterable[Window], Iterable[str]]
"""Name, windows, and what could not be read."""


def render_page(runs: Sequence[ProfiledRun]) -> str:
    """The page of *runs*, whole: it needs no network, and opens from disk.

    Raises:
        ProfileFormatError: a number of a profile is not finite.
    """
    shown = [(run.name, list(map(_window, run.windows)), run.problems) for run in runs]
    return _page(_title([profile for run in runs for profile in run.windows]), shown)


def render_latest(profile: Profile, windows: deque[Window]) -> str:
    """The page of a run that is still going on: *profile* is its latest window, and comes behind *windows*."""
    windows.append(_window(profile))
    return _page(_title([profile]), [("", windows, ())])


def render_comparison_page(comparison: Comparison) -> str:
    """The page of two runs compared."""
    title = f"{comparison.a.source} and {comparison.b.source} compared"
    summary, sections = [comparison_headline(comparison)], comparison_sections(comparison)
    view = page_view(title=title, where="", summary=summary, sections=sections)
    return _page(title, [("", [(WindowFigures(""), packed(view))], ())])


def render_traces_page(report: TracesReport) -> str:
    """The page of traces: it shows one of them at a time, and what they say together."""
    views = traces_views(report)
    title = views[0][1]["title"] if len(views) == 1 else f"{len(views)} traces"
    return _page(title, [(name, [(WindowFigures(""), packed(view))], ()) for name, view in views])


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
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; base-uri 'none'; "
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
    """The JSON of a profile or of a view of one, compressed by gzip; the same bytes for equal ones.

    Raises:
        ProfileFormatError: a number of it is not finite.
    """
    return gzip.compress(codec.dump(value, indented=False).encode(), compresslevel=6, mtime=0)


def _window(profile: Profile) -> Window:
    return window_figures(profile), packed(profile_view(profile))


def window_figures(profile: Profile) -> WindowFigures:
    """One window in a few figures."""
    return WindowFigures(
        label=f"{profile.profile_step:,}",
        profile_step=profile.profile_step,
        global_step_sec=None if profile.timing is None else profile.timing.global_step_sec,
        parts_sec=dict(step_parts(profile)),
        mfu=profile.job_rates.mfu,
    )


@cache
def bundled(name: str) -> str:
    """The text of a file that ``web/`` built."""
    return (BUNDLE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


def _title(profiles: Sequence[Profile]) -> str:
    model = profiles[0].modules[0].type_name if profiles and profiles[0].modules else ""
    return f"{model or 'FLOPs profile'}, step {profiles[0].profile_step}" if profiles else "FLOPs profile"
