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
import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from lightning_flops.errors import ProfileFormatError
from lightning_flops.report.compare_text import comparison_headline, comparison_sections
from lightning_flops.report.headline import step_parts
from lightning_flops.report.page_views import View, page_view, profile_view, traces_views
from lightning_flops.schema import codec
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TracesReport
from lightning_flops.text.printable import printable

BUNDLE = files("lightning_flops.report") / "page"
"""What ``web/`` builds: ``page.js``, ``style.css``."""

_Window = tuple[Mapping[str, Any], bytes]
"""Figures of a view that can be chosen, and the view, compressed."""
_Run = tuple[str, Sequence[_Window], Sequence[str]]
"""Name, windows, and what could not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """The windows of one run, in their order."""

    name: str
    """Its name among the runs of the page."""
    windows: Sequence[Profile]
    """One page shows them all, one at a time."""
    problems: Sequence[str] = ()
    """What could not be read, in sentences."""


def render_page(runs: Sequence[ShownRun]) -> str:
    """The page of *runs*, whole: it needs no network, and opens from disk.

    Raises:
        ProfileFormatError: a number of a profile is not finite.
    """
    shown = [(run.name, [_window(one) for one in run.windows], run.problems) for run in runs]
    return _page(_title([profile for run in runs for profile in run.windows]), shown)


def render_comparison_page(comparison: Comparison) -> str:
    """The page of two runs compared."""
    title = f"{comparison.a.source} and {comparison.b.source} compared"
    summary, sections = [comparison_headline(comparison)], comparison_sections(comparison)
    return _page(title, [_alone("", page_view(title=title, where="", summary=summary, sections=sections))])


def render_traces_page(report: TracesReport) -> str:
    """The page of traces: it shows one of them at a time, and what they say together."""
    views, named = traces_views(report), all(trace.rank is not None for trace in report.traces)
    title = views[0][1]["title"] if len(views) == 1 else f"{len(views)} traces"
    return _page(title, [_alone(name, view) for name, view in views], pick="Rank" if named else "Trace")


def _alone(name: str, view: View) -> _Run:
    return name, [({"label": ""}, _packed(view_text(view)))], ()


def _page(title: str, runs: Sequence[_Run], *, pick: str = "Run") -> str:
    """The page of *runs*, of which one is shown at a time."""
    document = {
        "written_by": package_version(),
        "pick": pick,
        "runs": [
            {
                "name": printable(name),
                "windows": [figures for figures, _ in windows],
                "problems": [*map(printable, problems)],
            }
            for name, windows, problems in runs
        ],
    }
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
    data = json.dumps(document, ensure_ascii=True, allow_nan=False).replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(printable(title))}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="app"><noscript>This page shows figures with a script; the JSON that it was made from has them all.'
        f'</noscript></div>\n<script type="application/json" id="document">{data}</script>\n{views}'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


class RunPages:
    """The page of one run that is still going on, with the latest of its windows.

    Args:
        most: so many windows at most.
    """

    def __init__(self, most: int) -> None:
        self._windows: deque[_Window] = deque(maxlen=most)

    def add(self, profile: Profile) -> str:
        """The page when *profile* is the latest window.

        Raises:
            ProfileFormatError: a number of the profile is not finite.
        """
        self._windows.append(_window(profile))
        return _page(_title([profile]), [("", self._windows, ())])


def _window(profile: Profile) -> _Window:
    return window_figures(profile), _packed(view_text(profile_view(profile)))


def packed(profile: Profile) -> bytes:
    """The JSON of *profile*, compressed by gzip; the same bytes for equal profiles.

    Raises:
        ProfileFormatError: a number of it is not finite.
    """
    return _packed(codec.dump(profile, indented=False))


def _packed(text: str) -> bytes:
    return gzip.compress(text.encode(), compresslevel=6, mtime=0)


def view_text(view: View) -> str:
    """*view* as JSON.

    Raises:
        ProfileFormatError: a number of it is not finite.
    """
    try:
        return json.dumps(view, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise ProfileFormatError(f"the page cannot be made: {error}") from error


def window_figures(profile: Profile) -> Mapping[str, Any]:
    """One window in a few figures: for a strip of many windows."""
    timing = profile.timing
    return {
        "label": f"{profile.profile_step:,}",
        "profile_step": profile.profile_step,
        "global_step_sec": None if timing is None else timing.global_step_sec,
        "parts_sec": dict(step_parts(profile)),
        "mfu": profile.job_rates.mfu,
    }


@cache
def bundled(name: str) -> str:
    """The text of a file that ``web/`` built."""
    return (BUNDLE / name).read_text(encoding="utf-8")


@cache
def package_version() -> str:
    """Version of this package, by what was installed: the layers below the package do not know its root."""
    try:
        return version("lightning-flops")
    except PackageNotFoundError:
        return "(not installed)"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


def _title(profiles: Sequence[Profile]) -> str:
    model = profiles[0].modules[0].type_name if profiles and profiles[0].modules else ""
    return f"{model or 'FLOPs profile'}, step {profiles[0].profile_step}" if profiles else "FLOPs profile"
