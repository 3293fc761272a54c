"""No private word stands where a reader looks: in docstrings, comments and messages of the package, docs and README."""

from __future__ import annotations

import re
import tokenize

import pytest

from tests.pages import PAGES, REPOSITORY

SAY = {
    r"\bborders?\b(?!`|\")": "step boundary, error boundary or hook: whichever is meant",
    r"\bbook(s|ed|ing)\b": "totals; added to; attributed to",
    r"\b(spends?|spent|spending)\b": "cost; FLOPs of; with FLOPs",
    r"\bheavy\b(?!`|\")": "may have FLOPs",
    r"\b(nobody|somebody)\b": "name the caller, or say what is unknown",
    r"\b(told|tells?|telling)\b": "notify, record, read, show, separate",
    r"\bshared out\b|\bstands? down\b": "apportioned; is disabled, detaches",
    r"\bat stake\b|\bforet": "potential saving; predicted",
    r"\b(errand|random word|undisturbed|doors?|likewise|session|spared)\b": "run id; unprofiled; adapter; run; a noun",
    r"\b(the answer|to spare|idle values|dispelled|looks left|set apart)\b": "summary; skipped; data-dependent",
}


def prose() -> list[tuple[str, int, str]]:
    """File, line and text of each docstring, string and comment of the package, and of each line of the pages."""
    found = [(str(page), at, line) for page in PAGES for at, line in enumerate(page.read_text("utf-8").split("\n"), 1)]
    for path in sorted((REPOSITORY / "lightning_flops").rglob("*.py")):
        with path.open("rb") as file:
            tokens = list(tokenize.tokenize(file.readline))
        words = [one for one in tokens if tokenize.tok_name[one.type] in ("STRING", "COMMENT", "FSTRING_MIDDLE")]
        for one in words:
            text = re.sub(r"{[^{}]*}", "", one.string) if one.string[:1] in "fr" else one.string
            found += [(str(path), at, line) for at, line in enumerate(text.split("\n"), one.start[0])]
    return found


@pytest.mark.parametrize("pattern", SAY)
def test_a_private_word_is_nowhere(pattern: str) -> None:
    assert [place for place in prose() if re.search(pattern, place[2], re.IGNORECASE)] == [], SAY[pattern]
