"""What became of the runs of this process, for a command that says at its end what was profiled, and if not, why."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Outcomes:
    """Counts sessions and their reports."""

    sessions: int = 0
    """Runs of training that had a session."""
    profiles: int = 0
    """Reports that were made."""
    told: bool = False
    """A line has told the user where a report is."""
    latest: str = ""
    """The latest report, in a line."""
    reasons: list[str] = field(default_factory=list)
    """Why runs ended without a report, in sentences without a full stop."""


OUTCOMES = Outcomes()
"""Of this process."""
