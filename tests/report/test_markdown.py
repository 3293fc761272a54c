from __future__ import annotations

import html

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops.config import ProfilerConfig
from lightning_flops.report.text import fenced, render_text
from tests.report import windows
from tests.report.windows import build_profile


def _shown_by_tensorboard(markdown: str) -> str:
    plugin_util = pytest.importorskip("tensorboard.plugin_util")
    shown: str = plugin_util.markdown_to_safe_html(markdown)
    return shown


def test_report_is_one_code_block() -> None:
    profile = build_profile(windows.mlp_window(), config=ProfilerConfig())
    assert fenced(render_text(profile)) == f"```\n{render_text(profile)}```\n"


def test_tensorboard_shows_the_report_to_the_last_character() -> None:
    profile = build_profile(windows.transformer_window(), config=ProfilerConfig())
    shown = _shown_by_tensorboard(fenced(render_text(profile)))
    assert shown.startswith("<pre><code>") and shown.endswith("</code></pre>")
    assert html.unescape(shown.removeprefix("<pre><code>").removesuffix("</code></pre>")) == render_text(profile)


@pytest.mark.parametrize("text", ["```\n</code><b>bold</b>\n```\n# head\n", "````` five\n", "a `b` c", "~~~\nx\n~~~"])
def test_backticks_and_markup_inside_stay_text(text: str) -> None:
    shown = _shown_by_tensorboard(fenced(text))
    inside = shown.removeprefix("<pre><code>").removesuffix("</code></pre>")
    assert html.unescape(inside).rstrip("\n") == text.rstrip("\n")
    assert "<b>" not in inside


@settings(deadline=None)  # a busy machine is no failure
@given(st.text(alphabet="`~a\n ", max_size=30))
def test_no_line_of_the_text_closes_the_block(text: str) -> None:
    first, *inside, last, end = fenced(text).split("\n")
    assert first == last
    assert end == ""
    assert not any(line.strip().startswith(first) for line in inside)
    assert "\n".join(inside).rstrip("\n") == text.rstrip("\n")
