"""Short steps of a window that go without hooks: nothing is done in them but to see that one ends.

To hear of a step makes it longer, by more than what we do ourselves: our code has to come into the caches, and torch to
our hooks. Of a step of 0.4 ms that is a third. So once the steps of a window were timed as a whole, and the same was
heard of each of them, the hooks on the models come off, and of all the rest one method alone is heard, in which steps
end by themselves. Its calls count them. What they computed on is not known, so they are in no figure of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from lightning_flops.measure.recorder import Measured, Phase, Recorder
from lightning_flops.run.adapter import Adapter

P = ParamSpec("P")
R = TypeVar("R")

_always: set[Any] = set()


def always_heard(hook: Callable[P, R]) -> Callable[P, R]:
    """*hook*, a method of an adapter, is heard in every step: the run is over, or the loop says something itself."""
    _always.add(hook)
    return hook


class Unhooked:
    """What is heard of each step that is timed as a whole, and the steps that go without hooks after them.

    *heard_again* gets how many these were, when all is heard again.
    """

    def __init__(self, adapter: Adapter, heard_again: Callable[[int], None]) -> None:
        self._adapter, self._hooks_are_on_again = adapter, heard_again
        self._doing: Any = None  # the outermost method of the adapter's that runs
        self._heard: Counter[Any] = Counter()  # methods of its that did since the latest step has ended
        self._usual = self._heard  # in that step, and in so many before it
        self._alike = 0
        self._measured: Measured | None = None  # gets the times of steps that go without hooks; None: they are heard
        self.only: Any = None  # what alone is heard then

    def step_ends(self, recorder: Recorder) -> None:
        """A step is over, and if the *recorder* is so far, those that come go without hooks."""
        self._alike = self._alike + 1 if self._heard == self._usual else 0
        self._usual, self._heard = self._heard, Counter()
        if recorder.state is Phase.UNHOOKED and recorder.measured is not None:
            self._begin(recorder.measured)

    def _begin(self, measured: Measured) -> None:
        is_alike = self._alike >= len(measured.plain) - 1 and self._usual[self._doing] == 1
        if is_alike and self._adapter.is_between_steps():
            self._measured, self.only = measured, self._doing
            self._adapter.take_hooks_off()
            measured.stamp()
        else:
            self._hooks_are_on_again(0)

    def does(self, ours: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        """What *ours* answers, if it is heard."""
        measured = self._measured
        if measured is not None and ours not in _always:
            if ours is self.only and self._adapter.is_between_steps():  # not in what the loop has left out
                measured.stamp()
                if len(measured.unhooked) > len(measured.plain):
                    self.end()
            return None
        self._heard[ours] += 1
        outer, self._doing = self._doing, self._doing or ours
        try:
            return ours(*args, **kwargs)
        finally:
            self._doing = outer

    def end(self) -> None:
        """All is heard again, if steps went without hooks."""
        measured, self._measured, self.only = self._measured, None, None
        if measured is not None:
            self._adapter.put_hooks_on()
            self._hooks_are_on_again(len(measured.unhooked) - 1)
