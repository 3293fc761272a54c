"""What a notebook shows: the short report as plain tables, whatever the names are."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import Any

import pytest
from hypothesis import given, settings

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.report.text import render_text
from tests.golden_files import golden
from tests.report import windows
from tests.report.test_hostile_names import PROFILES, hostile, renamed, with_suffix
from tests.report.test_ranks_text import CASES as JOBS
from tests.report.test_text import profile_of
from tests.report.test_throughput_text import OF_TEN_STEPS

REPORTS: dict[str, Any] = {
    "mlp": profile_of("mlp"),
    "traced_on_device": profile_of("traced_on_device"),
    "ranks_slow_loader": JOBS["slow_loader"],
    "unknown": profile_of("unknown"),
    "counts": FlopCounts(windows.mlp_window().flops, windows.mlp_window().modules),
}


class Seen(HTMLParser):
    """What a browser makes of a text: the tags with their attributes, and the words between them."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.closed: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(attrs)))

    def handle_endtag(self, tag: str) -> None:
        self.closed.append(tag)

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.words.append(data.strip())


@pytest.mark.parametrize("name", REPORTS)
def test_a_notebook_shows_the_words_of_the_short_report(name: str) -> None:
    seen = Seen(REPORTS[name]._repr_html_())
    assert {tag for tag, _ in seen.tags} <= {"div", "p", "b", "table", "thead", "tbody", "tr", "th", "td"}
    assert sorted(tag for tag, _ in seen.tags) == sorted(seen.closed)
    text = " ".join(str(REPORTS[name]).split())
    assert [one for one in seen.words if " ".join(one.split()) not in text] == []
    assert len(seen.words) > 5


def test_a_notebook_shows_the_file_people_read_and_the_text_of_a_run() -> None:
    golden("html/traced_on_device.html", REPORTS["traced_on_device"]._repr_html_())
    seen = Seen(OF_TEN_STEPS._repr_html_())
    assert [tag for tag, _ in seen.tags] == ["pre"]
    assert "".join(seen.words).strip() == render_text(OF_TEN_STEPS).strip()


@settings(deadline=None, max_examples=15)  # a busy machine is no failure
@given(hostile)
@pytest.mark.parametrize("name", ["traced", "missing"])
def test_no_name_is_markup(name: str, suffix: str) -> None:
    evil = renamed(PROFILES[name], with_suffix(f"<b onclick='x'>&amp;{suffix}</b>"))._repr_html_()
    assert Seen(evil).tags == Seen(renamed(PROFILES[name], with_suffix("harmless"))._repr_html_()).tags
