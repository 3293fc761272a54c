"""Short steps of a window that go unheard: nothing of ours is in them but where they end.

To hear of a step makes it longer, by more than what we do ourselves: our code has to come into the caches, and torch to
our hooks. Of a step of 0.4 ms that is a third. So once the steps of a window were timed as a whole, and the same was
heard of each of them, the adapter takes off what hears it, but for what a step has ended in. Calls of that count the
steps that come. The rest of them, samples, shapes and FLOPs, is taken to be as in the last step that was heard. What
steps do not have, as a validation, a checkpoint or the end of the run, is heard, and ends this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from lightning_flops.measure.recorder import Measured, Phase, Recorder
from lightning_flops.run.adapter import Adapter

P = ParamSpec("P")
R = TypeVar("R")


class Unheard:
    """What is heard of each step of a run, where that matters, and the steps that go unheard."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._doing: Any = None  # the outermost method of the adapter's that runs
        self._heard: Counter[Any] = Counter()  # methods of its that did since the latest step has ended
        self._usual = self._heard  # in that step, and in so many before it
        self._alike = 0
        self._measured: Measured | None = None  # gets the times of steps that go unheard; None: they are heard
        self._ender: Any = None  # what these end in
        self._again: Callable[[], None] = lambda: None  # does once more what was done where the last one heard ended

    def step_ends(self, recorder: Recorder, again: Callable[[], None]) -> None:
        """A step has ended, as another would by *again*; those that come go unheard if the *recorder* has them so."""
        self._alike = self._alike + 1 if self._heard == self._usual else 0
        self._usual, self._heard = self._heard, Counter()
        measured = recorder.measured
        if recorder.state is not Phase.UNHEARD or measured is None or measured.unheard or not measured.short_steps:
            return
        if self._alike < measured.short_steps - 1 or self._doing not in self._usual:
            measured.short_steps = 0  # these are heard
            return
        self._measured, self._ender, self._again = measured, self._doing, again
        self._adapter.goes_unheard({*self._usual}, but=self._doing)
        measured.stamp()

    def does(self, ours: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """What *ours* answers, which goes unheard if each step has it; anything else has us hear again."""
        self._heard[ours] += 1
        if self._measured is not None and self._misses(self._measured, ours):
            return None
        outer, self._doing = self._doing, self._doing or ours
        try:
            return ours(*args, **kwargs)
        finally:
            self._doing = outer

    def _misses(self, measured: Measured, ours: Any) -> bool:
        if ours not in self._usual:
            self.hear_again()
            return False
        if ours is self._ender and self._heard[ours] == self._usual[ours]:
            self._heard.clear()
            measured.stamp()
            if len(measured.unheard) > measured.short_steps:
                self.hear_again()
        return True

    def hear_again(self) -> None:
        """Hear of what comes, and do what was not done where steps ended, if any went unheard."""
        measured, self._measured = self._measured, None
        if measured is not None:
            self._adapter.hears_again()
            for _ in measured.unheard[1:]:
                self._again()
            self._again = lambda: None
