"""What a framework's taps call when a part of a training step begins and ends.

A tap runs inside somebody's training. Every entry is guarded: the first failure of ours takes the profiler out, and
training goes on.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from lightning_flops.instrument.timing.phase_timer import Mark

if TYPE_CHECKING:
    from lightning_flops.instrument.memory import MemoryWatch
    from lightning_flops.instrument.recorder import Recorder
    from lightning_flops.instrument.timing.monitor import Monitor

S = TypeVar("S", bound="StepTaps")
P = ParamSpec("P")
R = TypeVar("R")


def guarded(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R | None]:
    """*method* of a ``StepTaps``, which never raises into training: its first failure takes the profiler out."""

    @functools.wraps(method)
    def run(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if self._out:
            return None
        try:
            return method(self, *args, **kwargs)
        except Exception as error:  # the border to the training loop: whatever it is, it is ours to swallow
            self._fail(error)
            return None

    return run


class StepTaps(ABC):
    """Tells recorder, monitor and memory watch which part of a step runs, as far as one of them wants to know it.

    ``_enter`` and ``_leave`` are for taps of a door's own; ``_inside_part`` and ``_outside_of_steps`` make taps.
    """

    def __init__(self) -> None:
        self._out = False
        self._recorder: Recorder | None = None
        self._monitor: Monitor | None = None
        self._memory: MemoryWatch | None = None
        self._marking = False
        self._in_batch_scope = False

    @abstractmethod
    def _fail(self, error: Exception) -> None:
        """Something of ours has failed with *error*: say so, and take the profiler out."""

    @guarded
    def _enter_batch_scope(self) -> AbstractContextManager[Any]:
        assert self._recorder is not None
        scope = self._recorder.batch_scope()
        scope.__enter__()
        self._in_batch_scope = True
        return scope

    def _leave_batch_scope(self, scope: AbstractContextManager[Any]) -> None:
        # Not @guarded: a counter that was entered is left, also when the profiler has taken itself out meanwhile.
        self._in_batch_scope = False
        try:
            scope.__exit__(None, None, None)
        except Exception as error:
            self._fail(error)

    @guarded
    def _enter(self, part: str, *, counts: bool = True) -> None:
        if self._marking:
            assert self._recorder is not None
            if self._memory is not None and self._recorder.counting:
                self._memory.enter(part)
            self._recorder.enter(part, counts=counts)

    @guarded
    def _leave(self) -> None:
        if self._marking:
            assert self._recorder is not None
            self._recorder.leave()  # first: what follows is not in the part's time
            if self._memory is not None and self._recorder.counting:
                self._memory.leave()

    def _inside_part(self, part: str, *, counts: bool = True) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What turns a function into one whose every call is *part* of a step; *counts* as in ``Recorder.enter``."""
        mark = Mark(part, counts)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                recorder = self._recorder
                timer = None if recorder is None else recorder.timer
                if timer is None:
                    self._enter(part, counts=counts)
                    try:
                        return original(*args, **kwargs)
                    finally:
                        self._leave()
                try:
                    timer.enter(mark)
                except Exception as error:
                    self._fail(error)
                try:
                    return original(*args, **kwargs)
                finally:
                    try:
                        timer.leave()
                    except Exception as error:
                        self._fail(error)

            return run

        return make

    def _outside_of_steps(self, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """What turns a function into one whose every call is no part of any step, known as *name*."""
        marked = self._inside_part(name)

        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            inner = marked(original)

            def run(*args: Any, **kwargs: Any) -> Any:
                self._training_stops(name)
                try:
                    return inner(*args, **kwargs)
                finally:
                    self._training_goes_on(name)

            return run

        return make

    @guarded
    def _training_stops(self, reason: str) -> None:
        if self._monitor is not None:
            self._monitor.exclude(reason)

    @guarded
    def _training_goes_on(self, reason: str) -> None:
        if self._monitor is not None:
            self._monitor.include(reason)

    @guarded
    def _epoch_ends(self) -> None:
        assert self._recorder is not None
        self._recorder.epoch_ends()
        if self._monitor is not None:
            self._monitor.exclude("epoch restart")

    @guarded
    def _epoch_begins(self) -> None:
        assert self._recorder is not None
        self._recorder.epoch_begins()
        if self._monitor is not None:
            self._monitor.include("epoch restart")
