"""docs/advice.md is what the table of rules says."""

from __future__ import annotations

from docs import write_advice
from lightning_flops.analysis.advice import RULES


def test_the_page_is_what_the_rules_say() -> None:
    assert write_advice.PAGE.read_text(encoding="utf-8") == write_advice.page(), "make docs-profile writes it anew"


def test_every_rule_has_its_fact_remedy_ceiling_exception_and_source() -> None:
    text = write_advice.page()
    for rule in RULES:
        section = text.partition(f"## {rule.name}\n")[2].partition("\n## ")[0]
        assert section, rule.name
        assert "| saves at most | " in section
        for part in (rule.unless, rule.source, rule.shown_by):
            assert part and part in section
    assert "The step waits ⟨wait⟩ a batch for data (⟨measured⟩)" in text
    assert "| when | more than 5.00% |" in text
