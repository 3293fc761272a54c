"""What a report advises."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing that holds the run back."""

    rule: str
    """The rule's name, which also begins the names of its thresholds."""
    evidence: str
    """What was measured, in a sentence."""
    threshold: str
    """What it was held against, in words."""
    action: str
    """What to try, in a sentence."""
    source: str
    """Where the rule comes from."""
    stake: float | None
    """Share of the step that is at stake here and in no other advice; None if it is not known, or if other advice has
    all of it."""
