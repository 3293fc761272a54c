"""The text report as Markdown, for viewers that would wrap plain text."""

from __future__ import annotations

import re

from lightning_flops.report.text import render_text
from lightning_flops.schema.profile import Profile

_SHORTEST_FENCE = 3


def render_markdown(profile: Profile) -> str:
    """The report on *profile* in a fenced code block, which keeps its columns in TensorBoard's text page."""
    return fenced(render_text(profile))


def fenced(text: str) -> str:
    """*text* in a code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(_SHORTEST_FENCE, longest + 1)
    return f"{fence}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}\n"
