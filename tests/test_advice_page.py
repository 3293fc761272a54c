"""docs/advice.md is what the table of rules says."""

from __future__ import annotations

from docs import write_advice


def test_the_page_is_what_the_rules_say() -> None:
    text = write_advice.PAGE.read_text(encoding="utf-8")
    assert text == write_advice.page(), "make docs-profile writes it anew"
    assert "The step waits ⟨wait⟩ a batch for data (⟨measured⟩)" in text
    assert "| when | more than 5.00% |" in text
