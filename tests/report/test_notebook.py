"""What a notebook shows: the short report as plain tables, whatever the names are."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from hypothesis import given, settings

from tests.golden_files import golden
from tests.report.test_hostile_names import PROFILES, hostile, renamed, with_suffix
from tests.report.test_ranks_text import CASES as JOBS
from tests.report.test_text import profile_of
from tests.report.test_throughput_text import OF_TEN_STEPS

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
