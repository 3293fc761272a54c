"""What a report advises."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing that holds the run back; docs/advice.md has all rules."""

    rule: str
    """The rule's name."""
    fact: str
    """What was measured, in a sentence: how much, of which rank, module or loader."""
    remedy: str
    """What to do, in a sentence."""
    ceiling: float | None
    """Share of a typical step that following it can save at most; None if it is not known. Two pieces of advice may
    name the same time."""
    unless: str
    """When not to follow it, after "not": ``where the data overfit``."""
    threshold: str
    """What was measured was held against this, in words."""
    source: str
    """Where the rule comes from."""
