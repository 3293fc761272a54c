"""Names in a report are data: whatever they hold, the report has its own lines and no others, and each prints."""

from __future__ import annotations

import contextlib
import html
import io
import re
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from torch import nn

from lightning_flops.adapters.standalone import get_model_profile
from lightning_flops.report.text import render_advice, render_text
from lightning_flops.report.trace_document import render_traces
from tests.analysis.trace_events import RANKS
from tests.golden_files import golden
from tests.report.renamed import renamed, with_suffix
from tests.report.test_ranks_text import CASES as JOBS
from tests.report.test_text import OF_TEN_STEPS, TRACED, profile_of
from tests.report.test_trace_text import cpu_only, loaded

PROFILES = {
    **{name: profile_of(name) for name in ("lower_bound", "unknown", *TRACED)},
    **{name: JOBS[name] for name in ("slow_loader", "missing")},
}
TRACES = {"cpu": cpu_only(), "two ranks": loaded(*RANKS)}

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


def lines_of(text: str) -> list[str]:
    """The lines that a terminal shows, all of which print."""
    assert text.endswith("\n")
    lines = text[:-1].split("\n")
    assert [line for line in lines if not line.isprintable()] == []
    return lines


@settings(deadline=None, max_examples=15)  # a busy machine is no failure
@given(hostile)
@pytest.mark.parametrize("name", PROFILES)
def test_every_line_of_a_report_prints_and_no_name_begins_one(name: str, suffix: str) -> None:
    reports = [renamed(PROFILES[name], with_suffix(one)) for one in (suffix, harmless(suffix))]
    texts = [lines_of(render_text(one, detailed=True)) for one in reports]
    # Long names make lines wrap in other places; whatever else a name can do, it ends no line.
    titles = [[line for line in text if line.startswith("-----")] for text in texts]
    assert titles[0] == titles[1] and abs(len(texts[0]) - len(texts[1])) <= 0.1 * len(texts[0])
    lines_of(render_advice(reports[0]))


@settings(deadline=None, max_examples=15)
@given(hostile)
@pytest.mark.parametrize("name", TRACES)
def test_the_tables_of_a_trace_have_the_lines_that_they_have_with_harmless_names(name: str, suffix: str) -> None:
    texts = [render_traces(renamed(TRACES[name], with_suffix(one))) for one in (suffix, harmless(suffix))]
    assert len(lines_of(texts[0])) == len(lines_of(texts[1]))


def test_names_and_settings_of_a_model_are_text_in_deepspeeds_layout() -> None:
    linear = type("Two\x1b", (nn.Linear,), {"extra_repr": lambda self: "one\ntwo\x1b"})
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        get_model_profile(linear(3, 2), (1, 3), warm_up=0)
    lines_of(printed.getvalue())
    assert "Two\\x1b(" in printed.getvalue() and "one two\\x1b)\n" in printed.getvalue()


HOSTILE = "\x1b[2J\x1b]0;title\x07"
"""Clears the screen and names the window."""


def test_a_hostile_model_reads_like_its_golden_file() -> None:
    text = render_text(renamed(PROFILES["lower_bound"], with_suffix(f"\nMFU: 99%{HOSTILE}\u202e")), detailed=True)
    golden("text/hostile.txt", text)
    lines_of(text)


def test_json_keeps_names_exact() -> None:
    hostile_profile = renamed(PROFILES["lower_bound"], with_suffix("\n\x1b\u202e"))
    assert type(hostile_profile).from_json(hostile_profile.to_json()) == hostile_profile


# ---- what a notebook shows: the short report as plain tables, whatever the names are

REPORTS: dict[str, Any] = {
    "mlp": profile_of("mlp"),
    "traced_on_device": profile_of("traced_on_device"),
    "ranks_slow_loader": JOBS["slow_loader"],
    "unknown": profile_of("unknown"),
    "run": OF_TEN_STEPS,
}


def seen(text: str) -> tuple[list[str], list[str]]:
    """What a browser makes of a text: the tags with their attributes, and the words between them."""
    words = (" ".join(html.unescape(one).split()) for one in re.split(r"<[^<>]*>", text))
    return re.findall(r"<([^<>/][^<>]*)>", text), [one for one in words if one]


@pytest.mark.parametrize("name", REPORTS)
def test_a_notebook_shows_the_words_of_the_short_report(name: str) -> None:
    made = REPORTS[name]._repr_html_()
    tags, words = seen(made)
    assert {tag.split()[0] for tag in tags} <= {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert sorted(tag.split()[0] for tag in tags) == sorted(re.findall(r"</(\w+)>", made))
    text = " ".join(str(REPORTS[name]).split())
    assert [one for one in words if one not in text] == [] and len(words) > 5


def test_a_notebook_shows_the_file_people_read() -> None:
    golden("html/traced_on_device.html", REPORTS["traced_on_device"]._repr_html_())


@settings(deadline=None, max_examples=15)  # a busy machine is no failure
@given(hostile)
@pytest.mark.parametrize("name", ["traced", "missing"])
def test_no_name_is_markup(name: str, suffix: str) -> None:
    evil = renamed(PROFILES[name], with_suffix(f"<b onclick='x'>&amp;{suffix}</b>"))._repr_html_()
    assert seen(evil)[0] == seen(renamed(PROFILES[name], with_suffix("harmless"))._repr_html_())[0]
