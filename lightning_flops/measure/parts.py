"""Who takes the parts of a step: what counts, times or traces it."""

from __future__ import annotations


class Parts:
    """Takes the parts of the steps in one state of a recorder; this one does nothing with them.

    Parts nest. A part whose name is not a phase (``validation``, ``checkpoint``) does not belong to the step, and
    neither does anything inside it.
    """

    def __init__(self) -> None:
        self.entered: list[str] = []  # every part that began in the running step and counts, in order

    def enter(self, part: str, *, counts: bool = True) -> None:
        """A part begins, inside whatever is running.

        *counts*: it is a forward, a backward or an update by itself, and not only something that belongs to one.
        """
        if counts:
            self.entered.append(part)

    def leave(self) -> None:
        """The part entered last ends."""

    def claim(self, part: str) -> None:
        """What ran since the last boundary was *part*, if no part was running."""

    def phase(self, name: str) -> None:
        """What runs from here on is of this phase of the step, whatever its parts; an empty *name* ends it."""
