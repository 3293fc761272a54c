"""The sentences that a report says in addition to its figures, kept in one place for the whole run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from lightning_flops.records import TimePhase, WindowRecord


class Notes:
    """Notes of one run of training. Some hold for every report of the run, the others for its present window only."""

    def __init__(self) -> None:
        self.speak: Callable[[str], object] = str  # gets each note of the whole run, once
        self._of_run: list[str] = []
        self._of_window: list[str] = []
        self._reported: set[str] = set()  # notes of a window's report

    def of_report(self) -> tuple[str, ...]:
        """What the report of the present window, which is made now, has to say, in the order in which it was noted."""
        self._reported.update(self._of_window)
        return tuple(self._of_window)

    @property
    def unreported(self) -> tuple[str, ...]:
        """What was noted for the whole run, and is in no window's report."""
        return tuple(sentence for sentence in self._of_run if sentence not in self._reported)

    def add(self, sentence: str) -> None:
        """Note *sentence* for the report of the present window, once."""
        if sentence not in self._of_window:
            self._of_window.append(sentence)

    def add_for_run(self, sentence: str) -> None:
        """Note *sentence* for this window's report and for those of later windows, and say it once."""
        if sentence not in self._of_run:
            self._of_run.append(sentence)
            self.add(sentence)
            self.speak(sentence)

    def begin_window(self) -> None:
        """The report that comes next is of a new window."""
        self._of_window = list(self._of_run)


def notes_on_times(
    window: WindowRecord, *, watched: int, clocked: bool, mixed: Sequence[TimePhase], complete: bool
) -> Iterator[str]:
    """Sentences on the times of *window*, for whoever reads rates made of them.

    *watched* steps ran while some were timed; work of the *mixed* phases ran, in part, in another of them; *complete*
    are counts and times that the window did not end before.
    """
    timed = len(window.timed_steps) + len(window.plain_steps)
    if not complete:
        yield f"{window.context.activity} ended before the window closed."
    if mixed:
        yield (
            f"In the counted step, work of one phase ran where the loop was in another ({' and '.join(mixed)}), as "
            "with autograd.grad in a forward, a backward the loop does not see, or a forward in a callback or of a "
            "model that was not given, such as a teacher: these times cannot be separated, their sum is true."
        )
    if not clocked:
        yield "This device has no clock this profiler can read without stopping it, so no phase was timed."
        return
    if window.variable:
        return
    if timed < watched:
        yield (
            f"Steps differ: only {timed} of the {watched} steps watched had the counted step's batch shapes and "
            "numbers of forwards, backwards and updates. FLOPs, times and rates are of such steps."
        )
    if timed < window.timing_steps:
        yield f"{timed} of the {window.timing_steps} steps asked for were timed: the run was too short."
