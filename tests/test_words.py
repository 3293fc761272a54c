"""No private word stands where a reader looks: in docstrings, comments and messages of the package, docs and README."""

from __future__ import annotations

import re
import tokenize

import pytest

from tests.pages import PAGES, REPOSITORY

SAY = {
    r"\bborders?\b(?!`|\")": "step boundary, error boundary or hook: whichever is meant",
    r"\bbook(s|ed|ing)\b": "totals; added to; attributed to",
    r"\b(spend|spends|spent|spending)\b": "cost; FLOPs of; with FLOPs",
    r"\bheavy\b(?!`|\")": "may have FLOPs",
    r"\b(nobody|somebody)\b": "name the caller, or say what is unknown",
    r"\btold\b|\btell(s|ing)?\b": "notify, record, read, show, separate",
    r"\bshared out\b": "apportioned",
    r"\bstands? down\b|\btakes? itself out\b": "is disabled, detaches",
    r"\bforet": "predicted",
    r"\bat stake\b": "potential saving",
    r"\b(errand|undisturbed|door)\b": "request or run id; unprofiled; adapter",
    r"\blikewise\b": "say it again, with its noun",
}
"""What to say in the place of words that a pattern finds."""

PROSE = {"STRING", "COMMENT", "FSTRING_MIDDLE"}


def prose() -> list[tuple[str, str]]:
    """The place and the words of each docstring, string and comment of the package, and of each page's lines."""
    found = []
    for path in sorted((REPOSITORY / "lightning_flops").rglob("*.py")):
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if tokenize.tok_name[token.type] in PROSE:
                    lines = re.sub(r"(?s)^r?f.*", lambda text: re.sub(r"{[^{}]*}", "", text[0]), token.string)
                    found += [(f"{path}:{token.start[0] + n}", line) for n, line in enumerate(lines.split("\n"))]
    for page in PAGES:
        found += [(f"{page}:{number}", line) for number, line in enumerate(page.read_text("utf-8").split("\n"), 1)]
    return found


@pytest.mark.parametrize("pattern", SAY)
def test_a_private_word_is_nowhere(pattern: str) -> None:
    places = [f"{place}: {line.strip()}" for place, line in prose() if re.search(pattern, line, re.IGNORECASE)]
    assert not places, f"say: {SAY[pattern]}\n" + "\n".join(places)
