"""Text as Markdown, for viewers that would wrap plain text."""

from __future__ import annotations

import re

_SHORTEST_FENCE = 3


def fenced(text: str) -> str:
    """*text* in a code block whose fence is longer than any run of backticks in it."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence = "`" * max(_SHORTEST_FENCE, longest + 1)
    return f"{fence}\n{text}{'' if text.endswith(chr(10)) else chr(10)}{fence}\n"
