"""Signals of the user's: what a handler raises is no failure of ours, and whatever we undo loses nothing by it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class Undo:
    """Calls, the latest first, what undoes things; each may be called twice, and does nothing the second time.

    One stays here until it has returned, so that Ctrl-C, or what a signal handler raises, loses none: what is raised
    inside of one has it called once more, and is raised at the end; what is raised between two leaves the rest to the
    next ``close``. ``contextlib.ExitStack`` takes each off before it calls it.
    """

    def __init__(self) -> None:
        self._todo: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return bool(self._todo)

    def __enter__(self) -> Undo:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def callback(self, undo: Callable[..., object], *args: Any) -> None:
        """Call *undo* at the end."""
        self._todo.append(partial(undo, *args))

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Put *value* in the place of what *owner*, a class or a module, has as *name*, until the end."""
        self.callback(setattr, owner, name, vars(owner)[name])
        setattr(owner, name, value)

    def enter_context(self, context: AbstractContextManager[T]) -> T:
        """What *context* returns, which is left at the end."""
        result = context.__enter__()
        self.callback(context.__exit__, None, None, None)
        return result

    def close(self) -> None:
        """Undo everything."""
        raised: BaseException | None = None
        while self._todo:
            one = self._todo[-1]
            try:
                try:
                    one()
                except BaseException as error:
                    raised = error
                    one()
            except BaseException as error:
                raised = error
            if one in self._todo:  # otherwise a signal handler of the user's has closed this, too
                self._todo.remove(one)
        if raised is not None:
            raise raised


def is_of_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler of the user's raised *error*: one frame was given a signal and the frame below it."""
    trace, interrupted = error.__traceback__, object()
    while trace is not None:
        given = list(trace.tb_frame.f_locals.values())[:3]  # with "self", the frame is the third
        given += [one for value in given if type(value) is tuple for one in value]  # of ``*args``
        numbers = [one for one in given if isinstance(one, int) and one in signal.valid_signals()]
        if numbers and any(one is interrupted for one in given):
            return True
        interrupted, trace = trace.tb_frame, trace.tb_next
    return False


class Quiet(suppress):
    """As ``contextlib.suppress``, but for what a signal handler of the user's raises: a TimeoutError is an OSError."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        return bool(super().__exit__(kind, error, trace)) and error is not None and not is_of_signal_handler(error)


def words_of(error: Exception) -> str:
    """*error* in words, for a failure that stays with us.

    Raises:
        Exception: *error* itself, if a signal handler of the user's raised it.
    """
    if is_of_signal_handler(error):
        raise error
    return f"{type(error).__name__}: {error}"
