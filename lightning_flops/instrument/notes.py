"""The sentences that a report says beside its figures, kept in one place for the whole run."""

from __future__ import annotations

from collections.abc import Callable


def _to_nobody(sentence: str) -> None:
    pass


class Notes:
    """Notes of one run of training. Some hold for every report of the run, the others for its present window only."""

    def __init__(self) -> None:
        self._speak: Callable[[str], None] = _to_nobody
        """Is told each note of the whole run, once."""
        self._of_run: list[str] = []
        self._of_window: list[str] = []
        self._reported: set[str] = set()
        """Those that the report of a window has."""

    def goes_on(self, speak: Callable[[str], None]) -> None:
        """The run goes on, and *speak* is told its notes from here on."""
        self._speak = speak

    def let_go(self) -> None:
        """Nobody is told any notes until the run goes on."""
        self._speak = _to_nobody

    def of_report(self) -> tuple[str, ...]:
        """What the report of the present window, which is made now, has to say, in the order in which it was noted."""
        self._reported.update(self._of_window)
        return tuple(self._of_window)

    @property
    def unreported(self) -> tuple[str, ...]:
        """What was noted for the whole run, and stands in no window's report."""
        return tuple(sentence for sentence in self._of_run if sentence not in self._reported)

    def add(self, sentence: str) -> bool:
        """Note *sentence* for the report of the present window; False if it is there already."""
        if sentence in self._of_window:
            return False
        self._of_window.append(sentence)
        return True

    def add_for_run(self, sentence: str) -> None:
        """Note *sentence* for this window's report and for those of later windows, and say it once."""
        if sentence in self._of_run:
            return
        self._of_run.append(sentence)
        self.add(sentence)
        self._speak(sentence)

    def begin_window(self) -> None:
        """The report that comes next is of a new window."""
        self._of_window = list(self._of_run)
