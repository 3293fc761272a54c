"""What became of the runs of this process, for a command that says at its end what was profiled, and if not, why."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Protocol

from lightning_flops.report.headline import counted, headline
from lightning_flops.schema.profile import Profile


class Running(Protocol):
    """A session."""

    @property
    def out(self) -> bool:
        """Whether it has nothing more to do in its run."""


@dataclass(slots=True)
class Told:
    """What was said of one run's reports."""

    line: str = ""
    """The latest such line."""


@dataclass
class Outcomes:
    """Counts sessions and their reports."""

    sessions: int = 0
    """Runs that had a session."""
    trainings: list[weakref.ref[Running]] = field(default_factory=list)
    """The sessions of those that were training, in their order."""
    profiles: int = 0
    """Reports that were made."""
    told: list[Told] = field(default_factory=list)
    """The runs of which a line has told the user where a report is, in their order."""
    latest: str = ""
    """The latest report, in a line."""
    reasons: list[str] = field(default_factory=list)
    """Why runs ended without a report, in sentences without a full stop."""

    def begin_anew(self) -> None:
        """This process was forked: forget the runs of the process before."""
        self.sessions = self.profiles = 0
        self.latest = ""
        for one in (self.trainings, self.told, self.reasons):
            one.clear()

    def reports(self, profile: Profile) -> None:
        """A report of a run was made."""
        self.profiles += 1
        self.latest = f"{counted(profile)}: {headline(profile)}"

    def begins(self, session: Running, *, trains: bool) -> None:
        """The run of *session* begins."""
        self.sessions += 1
        if trains:
            self.trainings.append(weakref.ref(session))


OUTCOMES = Outcomes()
"""Of this process."""
