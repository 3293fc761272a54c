"""Names in a report are data: whatever they hold, the report has its own lines and no others, and each prints."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_flops.adapters.standalone import get_model_profile
from lightning_flops.config import ProfilerConfig
from lightning_flops.report.text import fenced, render_advice, render_text
from lightning_flops.report.trace_text import render_traces
from lightning_flops.schema.advice import Advice
from tests.analysis.in_memory import analyze_traces
from tests.analysis.trace_events import data_loader, memory, module, operator, scope, step, trace
from tests.golden_files import golden
from tests.report import windows
from tests.report.test_ranks_text import CASES as JOBS
from tests.report.test_trace_text import cpu_only, loaded
from tests.report.test_traced_text import CASES as TRACED
from tests.report.test_traced_text import profile_of
from tests.report.windows import build_profile

NAMES = {
    "ModuleProfile": "name type_name extra_repr alias_of",
    "OperatorProfile": "operator dtypes",
    "UncountedOperator": "modules",
    "Profile": "notes uncounted",
    "RunContext": "framework framework_version torch_version device_name precision host strategy",
    "RankFigures": "host",
    "RankAbsence": "reason",
    "RanksProfile": "left_out",
    "RanksDevice": "device_name",
    "Straggler": "module host",
    "CollectiveRow": "name",
    "RankCollectiveRow": "name",
    "KernelRow": "name",
    "OperatorRow": "name",
    "MemoryRow": "name",
    "Row": "name",
    "ModuleRow": "name",
    "DeviceMetrics": "name",
    "RankRow": "source",
    "RankComparison": "notes",
    "TraceReport": "source notes",
    "TracedStep": "files",
    "Advice": "evidence threshold action source",
}
"""Which fields of which records hold words from outside."""

PROFILES = {
    "transformer": build_profile(windows.transformer_window(), config=ProfilerConfig(top_modules=3)),
    "lower bound": build_profile(windows.lower_bound_window(), config=ProfilerConfig()),
    "unknown": build_profile(windows.unknown_window(), config=ProfilerConfig()),
    **{name: profile_of(name) for name in TRACED},
    **{name: JOBS[name] for name in ("uneven", "slow_loader", "mixed_devices", "missing")},
}
TRACES = {
    "cpu": cpu_only(),
    "two ranks": loaded(*(f"two_ranks_known_answers.rank{rank}.pt.trace.json" for rank in (0, 1))),
}

hostile = st.text(
    st.one_of(
        st.sampled_from("\n\r\t\x0b\x0c\x1b\x07\x00\x7f\x85\u2028\u2029\u202e\u2066\u200b\ufeff\u00a0\ud800`~#<*x "),
        st.characters(categories=("Cc", "Cf", "Zl", "Zp", "Cs")),
    ),
    min_size=1,
    max_size=8,
)


def harmless(text: str) -> str:
    """A word of the length that *text* has where it is escaped: ``\\n`` is two characters, ``\\x1b`` four."""
    return "".join(one if one.isprintable() else "x" * len(one.encode("unicode_escape")) for one in text)


def renamed(record: Any, rename: Callable[[str], str], *, here: bool = False) -> Any:
    """*record* in which every word from outside is another one."""
    if isinstance(record, str):
        return rename(record) if here else record
    if isinstance(record, Mapping):
        return {renamed(key, rename, here=here): renamed(value, rename) for key, value in record.items()}
    if isinstance(record, tuple):
        return tuple(renamed(one, rename, here=here) for one in record)
    if is_dataclass(record):
        ours = NAMES.get(type(record).__name__, "").split()
        changes = {
            field.name: renamed(getattr(record, field.name), rename, here=field.name in ours)
            for field in fields(record)
            if field.init
        }
        return replace(record, **changes)  # type: ignore[type-var]
    return record


def with_suffix(suffix: str) -> Callable[[str], str]:
    """Ends each part of a dotted name with *suffix*; numbers stay, which stand for places in a list."""
    return lambda name: ".".join(part if part.isdigit() or not part else part + suffix for part in name.split("."))


def with_harmless_names(name: str, suffix: str) -> Any:
    """The profile with words as wide as *suffix* is shown; in a module's own words a line break is one space."""
    profile = PROFILES[name]
    in_words = with_suffix("".join(" " if one == "\n" else harmless(one) for one in suffix))
    report = renamed(profile, with_suffix(harmless(suffix)))
    modules = [
        replace(one, extra_repr=in_words(was.extra_repr))
        for one, was in zip(report.modules, profile.modules, strict=True)
    ]
    return replace(report, modules=tuple(modules))


def lines_of(text: str) -> list[str]:
    """The lines that a terminal shows, all of which print."""
    assert text.endswith("\n")
    lines = text[:-1].split("\n")
    assert [line for line in lines if not line.isprintable()] == []
    return lines


@settings(deadline=None, max_examples=15)  # a busy machine is no failure
@given(hostile)
@pytest.mark.parametrize("name", PROFILES)
def test_a_report_has_the_lines_that_it_has_with_harmless_names(name: str, suffix: str) -> None:
    renders: list[Callable[[Any], str]] = [
        lambda one: render_text(one, detailed=True),
        lambda one: render_advice(one.advice),
    ]
    for render in renders:
        # No word is left out: the longest one is hostile, too.
        texts = [render(renamed(PROFILES[name], with_suffix(suffix))), render(with_harmless_names(name, suffix))]
        assert len(lines_of(texts[0])) == len(lines_of(texts[1]))


@settings(deadline=None, max_examples=15)
@given(hostile)
@pytest.mark.parametrize("name", TRACES)
def test_the_tables_of_a_trace_have_the_lines_that_they_have_with_harmless_names(name: str, suffix: str) -> None:
    texts = [render_traces(renamed(TRACES[name], with_suffix(one))) for one in (suffix, harmless(suffix))]
    assert len(lines_of(texts[0])) == len(lines_of(texts[1]))


@settings(deadline=None, max_examples=10)
@given(hostile)
def test_deepspeeds_layout_has_the_lines_that_it_has_with_harmless_names(suffix: str) -> None:
    # No class of Python's has these in its name; a line break in a module's settings is a line break.
    suffix = suffix.replace("\0", "").replace("\n", "").encode("utf-8", "ignore").decode()
    shown = []
    for one in (suffix, harmless(suffix)):
        linear = type(f"Linear{one}", (nn.Linear,), {"extra_repr": lambda self, one=one: f"a{one}"})
        model = nn.Sequential()
        model.add_module(f"first{one}", linear(3, 2))
        shown.append(_printed(model))
    assert len(lines_of(shown[0])) == len(lines_of(shown[1]))


def _printed(model: nn.Module) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        get_model_profile(model, (1, 3), warm_up=0)
    return printed.getvalue()


def test_a_settings_text_of_several_lines_is_one_in_the_forwards_of_a_model() -> None:
    linear = type("Two", (nn.Linear,), {"extra_repr": lambda self: "one\ntwo\x1b"})
    assert len(lines_of(_printed(linear(3, 2)))) == len(lines_of(_printed(nn.Linear(3, 2))))
    assert "one two\\x1b)\n" in _printed(linear(3, 2))


HOSTILE = "\x1b[2J\x1b]0;title\x07"
"""Clears the screen and names the window."""


def test_a_hostile_trace_reads_like_its_golden_file() -> None:
    report = analyze_traces(
        [
            trace(
                step(7, 0, 100),
                data_loader(0, 20),
                scope(f"tokenize{HOSTILE}", 5, 10),
                module(f"encoder\n{HOSTILE}", 25, 60),
                operator(f"aten::linear{HOSTILE}", 30, 50),
                operator("aten::addmm\nstraggler: rank 0", 35, 40),
                memory(40, 4096),
            )
        ]
    )
    report = replace(report, traces=tuple(replace(one, source=f"a{HOSTILE}\ntrace.json") for one in report.traces))
    text = render_traces(report)
    golden("trace/hostile.txt", text)
    lines_of(text)


def test_a_hostile_model_reads_like_its_golden_file() -> None:
    text = render_text(renamed(PROFILES["lower bound"], with_suffix(f"\nMFU: 99%{HOSTILE}\u202e")), detailed=True)
    golden("text/hostile.txt", text)
    lines_of(text)


def test_no_name_in_the_advice_is_markup() -> None:
    plugin_util = pytest.importorskip("tensorboard.plugin_util")
    name = "![x](http://a/b.png)<b>```\n# head **strong** `code`"
    advice = Advice(rule="data_wait", fact=name, threshold=name, remedy=name, source=name, unless=name, ceiling=None)
    shown = plugin_util.markdown_to_safe_html(fenced(render_advice([advice])))
    assert [tag for tag in ("<img", "<b>", "<h1", "<strong", "<a ") if tag in shown] == []
    assert "![x](http://a/b.png)&lt;b&gt;```\\n# head **strong** `code`" in " ".join(shown.split())


def test_json_keeps_names_exact() -> None:
    hostile_profile = renamed(PROFILES["lower bound"], with_suffix("\n\x1b\u202e"))
    assert type(hostile_profile).from_json(hostile_profile.to_json()) == hostile_profile
