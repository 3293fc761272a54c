"""What a notebook shows: the text, whatever the names are."""

from __future__ import annotations

import html
import re
from typing import Any

import pytest
from hypothesis import given, settings

from lightning_flops.analysis.flop_counts import FlopCounts
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
    "run": OF_TEN_STEPS,
}


def seen(text: str) -> tuple[list[str], list[str]]:
    """What a browser makes of a text: the tags with their attributes, and the words between them."""
    words = (" ".join(html.unescape(one).split()) for one in re.split(r"<[^<>]*>", text))
    return re.findall(r"<([^<>/][^<>]*)>", text), [one for one in words if one]


@pytest.mark.parametrize("name", REPORTS)
def test_a_notebook_shows_the_text(name: str) -> None:
    tags, words = seen(REPORTS[name]._repr_html_())
    assert tags == ["pre"] and " ".join(words) == " ".join(str(REPORTS[name]).split())


@settings(deadline=None, max_examples=15)  # a busy machine is no failure
@given(hostile)
@pytest.mark.parametrize("name", ["traced", "missing"])
def test_no_name_is_markup(name: str, suffix: str) -> None:
    evil = renamed(PROFILES[name], with_suffix(f"<b onclick='x'>&amp;{suffix}</b>"))._repr_html_()
    assert seen(evil)[0] == seen(renamed(PROFILES[name], with_suffix("harmless"))._repr_html_())[0]
