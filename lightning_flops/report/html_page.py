"""Profiles, two of them compared, or traces as one HTML file: the page that ``web/`` builds, and its figures inside it.

A content security policy in the page's head names two files of the package by their digests. Nothing else may run, and
nothing may be loaded from anywhere. Profiles are compressed data, which the page reads as JSON; the names in them are
text there, never markup.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from typing import Any

from lightning_flops.analysis.no_mfu import why_no_flops, why_no_mfu
from lightning_flops.analysis.rank_names import name_files
from lightning_flops.analysis.rates import mean
from lightning_flops.report.compare_text import comparison_headline
from lightning_flops.report.compare_traces_text import trace_comparison_headline
from lightning_flops.schema import codec
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.schema.trace_comparison import TraceComparison
from lightning_flops.schema.trace_flops import TraceFlops
from lightning_flops.text.printable import printable
from lightning_flops.units import plural

BUNDLE = files("lightning_flops.report") / "page"
"""What ``web/`` builds: ``page.js``, ``style.css``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRun:
    """The windows of one run, in their order."""

    name: str
    """Told apart from other runs on the page by it."""
    windows: Sequence[Profile]
    """One page shows them all, one at a time."""
    problems: Sequence[str] = ()
    """What could not be read, in sentences."""


def render_page(runs: Sequence[ShownRun]) -> str:
    """The page of *runs*, whole: it needs no network, and opens from disk.

    Raises:
        ProfileFormatError: a number of a profile is not finite.
    """
    data = {
        f"profile-{at}-{number}": packed(profile)
        for at, run in enumerate(runs)
        for number, profile in enumerate(run.windows)
    }
    return "".join(_pieces(_title(runs), document_of(runs), data))


def render_comparison_page(comparison: Comparison) -> str:
    """The page of two runs compared, likewise.

    Raises:
        ProfileFormatError: a number of the comparison is not finite.
    """
    document = {
        "kind": "comparison",
        "written_by": package_version(),
        "a": printable(comparison.a.source),
        "b": printable(comparison.b.source),
        "headline": printable(comparison_headline(comparison)),
    }
    title = printable(f"{comparison.a.source} and {comparison.b.source} compared")
    return "".join(_pieces(title, document, {"comparison": packed(comparison)}))


def render_trace_comparison_page(comparison: TraceComparison, *, sources: tuple[str, str]) -> str:
    """The page of two runs' traces compared, likewise.

    Args:
        comparison: what to show.
        sources: what the user calls the two.

    Raises:
        ProfileFormatError: a number of the comparison is not finite.
    """
    a, b = map(printable, sources)
    document = {
        "kind": "trace_comparison",
        "written_by": package_version(),
        "a": a,
        "b": b,
        "headline": printable(trace_comparison_headline(comparison)),
    }
    return "".join(_pieces(f"{a} and {b} compared", document, {"comparison": packed(comparison)}))


def render_traces_page(report: TracesReport) -> str:
    """The page of traces, likewise: it shows one of them at a time, and all of them side by side.

    Raises:
        ProfileFormatError: a number of a trace is not finite.
    """
    traces = report.traces
    files = name_files([trace.source for trace in traces])
    names = [file if trace.rank is None else f"rank {trace.rank}" for trace, file in zip(traces, files, strict=True)]
    are_ranks = all(trace.rank is not None for trace in traces)
    document = {
        "kind": "traces",
        "written_by": package_version(),
        "ranks": are_ranks,
        "traces": [trace_figures(trace, name=name) for trace, name in zip(traces, names, strict=True)],
    }
    data = {f"trace-{number}": packed(trace) for number, trace in enumerate(traces)}
    data["together"] = packed(replace(report, traces=()))
    what = plural("rank" if are_ranks else "trace", len(traces))
    title = printable(f"Trace of {files[0]}" if len(traces) == 1 else f"Traces of {len(traces)} {what}")
    return "".join(_pieces(title, document, data))


def _pieces(title: str, document: Mapping[str, Any], data: Mapping[str, bytes]) -> Iterator[str]:
    script, style = bundled("page.js"), bundled("style.css")
    policy = "; ".join(
        [
            "default-src 'none'",
            f"script-src '{_digest(script)}'",
            f"style-src '{_digest(style)}'",
            "base-uri 'none'",
            "form-action 'none'",
        ]
    )
    yield (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<div id="app"><noscript>This page shows figures with a script; the JSON that it was made from has them all.'
        "</noscript></div>\n"
    )
    text = json.dumps(document, ensure_ascii=True, allow_nan=False)
    # A name cannot end the element: a reader of JSON takes an escape for the sign itself.
    yield f'<script type="application/json" id="document">{text.replace("<", chr(92) + "u003c")}</script>\n'
    for name, content in data.items():
        yield f'<script type="text/plain" id="{name}">{base64.b64encode(content).decode("ascii")}</script>\n'
    yield f"<script>{script}</script>\n</body>\n</html>\n"


class RunPages:
    """The page of one run that is still going on, with the latest of its windows.

    Args:
        most: so many windows at most.
    """

    def __init__(self, most: int) -> None:
        self._windows: deque[tuple[Mapping[str, Any], bytes]] = deque(maxlen=most)

    def add(self, profile: Profile) -> str:
        """The page when *profile* is the latest window.

        Raises:
            ProfileFormatError: a number of the profile is not finite.
        """
        self._windows.append((window_figures(profile), packed(profile)))
        run = ShownRun(name="", windows=[profile])
        document = dict(document_of([run]))
        document["runs"] = [{**document["runs"][0], "windows": [figures for figures, _ in self._windows]}]
        data = {f"profile-0-{number}": content for number, (_, content) in enumerate(self._windows)}
        return "".join(_pieces(_title([run]), document, data))


def packed(report: Profile | Comparison | TraceReport | TracesReport | TraceComparison) -> bytes:
    """The JSON of *report*, compressed by gzip; the same bytes for equal reports.

    Raises:
        ProfileFormatError: a number of it is not finite.
    """
    return gzip.compress(codec.dump(report, indented=False).encode(), compresslevel=6, mtime=0)


def document_of(runs: Sequence[ShownRun]) -> Mapping[str, Any]:
    """What the page reads first: which runs there are, and a few figures of each of their windows."""
    return {
        "kind": "profiles",
        "written_by": package_version(),
        "runs": [
            {
                "name": printable(run.name),
                "windows": [window_figures(profile) for profile in run.windows],
                "problems": [printable(problem) for problem in run.problems],
            }
            for run in runs
        ],
    }


def window_figures(profile: Profile) -> Mapping[str, Any]:
    """One window in a few figures: for a strip of many windows, and what its headline picks from the profile."""
    answer = profile.answer
    return {
        "profile_step": profile.profile_step,
        "report_step": profile.report_step,
        "global_step_sec": answer.global_step_sec,
        "parts_sec": dict(answer.parts),
        "samples_per_sec": answer.samples_per_sec,
        "tokens_per_sec": answer.tokens_per_sec,
        "mfu": answer.mfu,
        "model_flops": profile.flops.model,
        "longest": [{"name": printable(one.name), "share": one.share} for one in answer.longest],
        "longest_of": answer.longest_of,
        "advice": [one.rule for one in answer.advice],
    }


def trace_figures(trace: TraceReport, *, name: str) -> Mapping[str, Any]:
    """One trace in a few figures: what several of them side by side show."""
    return {
        "name": printable(name),
        "source": printable(trace.source),
        "steps": len(trace.step_times.steps),
        "mean": asdict(trace.step_times.mean),
        "why_no_flops": why_no_flops([trace]),
        "why_no_mfu": why_no_mfu([trace]),
        **_flops_of_a_step(trace.flops),
    }


def _flops_of_a_step(flops: TraceFlops | None) -> Mapping[str, Any]:
    if flops is None:
        names = ("forward_flops", "backward_flops", "model_flops", "hardware_flops", "mfu", "hfu")
        return {**dict.fromkeys(names), "lower_bound": False}
    steps = flops.steps
    forward, backward = sum(step.forward for step in steps), sum(step.backward for step in steps)
    executed = sum(step.hardware for step in steps)
    return {
        "forward_flops": mean(total=forward, steps=len(steps)),
        "backward_flops": mean(total=backward, steps=len(steps)),
        "model_flops": mean(total=forward + backward, steps=len(steps)),
        "hardware_flops": mean(total=executed, steps=len(steps)),
        "mfu": flops.mfu,
        "hfu": flops.hfu,
        "lower_bound": any(step.lower_bound for step in steps),
    }


@cache
def bundled(name: str) -> str:
    """The text of a file that ``web/`` built."""
    return (BUNDLE / name).read_text(encoding="utf-8")


@cache
def package_version() -> str:
    """Of this package, by what was installed: the layers below the package do not know its root."""
    try:
        return version("lightning-flops")
    except PackageNotFoundError:
        return "(not installed)"


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}"


def _title(runs: Sequence[ShownRun]) -> str:
    profiles = [profile for run in runs for profile in run.windows]
    model = profiles[0].modules[0].type_name if profiles and profiles[0].modules else ""
    return printable(f"{model or 'FLOPs profile'}, step {profiles[0].profile_step}" if profiles else "FLOPs profile")
