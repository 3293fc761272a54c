"""Private names of a framework that a door uses: each is looked for, and where it is missing the report says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class PrivateNames:
    """Private names of one framework, each with what is lost without it.

    Args:
        framework: its name and version, as a sentence has them.
        lost: what is lost, by name; an empty text where nothing is, because only some versions have the name.
        note: takes a sentence for every report of the run.
    """

    def __init__(self, framework: str, lost: Mapping[str, str], note: Callable[[str], None]) -> None:
        self._framework = framework
        self._lost = lost
        self._note = note

    def get(self, owner: Any, name: str, stand_in: Any) -> Any:
        """What *owner* has as *name*; *stand_in*, and a note, where it has nothing.

        Raises:
            KeyError: *name* is none of those that this framework is known for.
        """
        lost = self._lost[name]
        if exists(owner, name):
            return getattr(owner, name)
        if lost:
            self._note(f"This {self._framework} keeps no {name}: {lost}.")
        return stand_in

    def has(self, owner: Any, name: str) -> bool:
        """Whether *owner* has *name*; a note where it has not."""
        return self.get(owner, name, None) is not None


def exists(owner: Any, name: str) -> bool:
    """Whether *owner* has *name*, asked of its class and itself, and of nothing that answers for others."""
    return name in vars(owner) or any(name in vars(kind) for kind in type(owner).__mro__)
