"""Private names of a framework that an adapter uses: each is looked up, and if it is missing, the report says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class PrivateNames:
    """Private names of one framework, each with what is lost without it.

    Args:
        framework: its name and version, as they stand in a sentence.
        lost: what is lost without each name; an empty text if nothing is lost, because only some versions have it.
    """

    def __init__(self, framework: str, lost: Mapping[str, str]) -> None:
        self._framework = framework
        self._lost = lost
        self._unsaid: list[str] = []
        self._note: Callable[[str], object] = self._unsaid.append

    def tell(self, note: Callable[[str], object]) -> None:
        """From here on *note* adds a sentence for each missing name to every report, also for those missed before."""
        self._note = note
        for sentence in self._unsaid:
            note(sentence)

    def get(self, owner: Any, name: str, stand_in: Any) -> Any:
        """The attribute *name* of *owner*; if *owner* has none, *stand_in*, and a note in the report.

        Raises:
            KeyError: *name* is not listed for this framework.
        """
        lost = self._lost[name]
        if exists(owner, name):
            return getattr(owner, name)
        if lost:
            self._note(f"This {self._framework} keeps no {name}: {lost}.")
        return stand_in

    def has(self, owner: Any, name: str) -> bool:
        """Whether *owner* has *name*; if not, a note in the report."""
        return self.get(owner, name, None) is not None


def exists(owner: Any, name: str) -> bool:
    """Whether *owner* or its class has *name*; ``__getattr__``, which may answer for another object, is not asked."""
    return name in vars(owner) or any(name in vars(kind) for kind in type(owner).__mro__)
