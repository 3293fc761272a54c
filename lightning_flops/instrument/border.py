"""The error boundary between torch and us: what fails on our side stays there. The user's Ctrl-C passes through.

``border`` decorates a method that torch, or a function that we replaced, calls within the user's step. ``listening``
does the same for a function of a library or the user that we replace: we are called before it and after it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

_Method = TypeVar("_Method", bound=Callable[..., None])

Failed = Callable[[str, Exception], None]
"""Gets the place where something of ours failed, and the error; it never raises."""


def border(where: str) -> Callable[[_Method], _Method]:
    """Catches the errors of a method, and gives them to the ``_failed`` of the method's owner.

    Args:
        where: what the method does, in words for the report: "Counting failed in ...".
    """

    def guard(method: _Method) -> _Method:
        @functools.wraps(method)
        def enter(owner: Any, /, *args: Any, **kwargs: Any) -> None:
            try:
                method(owner, *args, **kwargs)
            except Exception as error:
                owner._failed(where, error)

        return enter  # type: ignore[return-value]

    return guard


class UndoLedger:
    """The undo functions for everything that we have put on torch; it can be used again after it was closed."""

    def __init__(self) -> None:
        self._undos = ExitStack()
        self._used = False

    def __bool__(self) -> bool:
        """Whether there is anything to undo."""
        return self._used

    def add(self, undo: Callable[..., object], *args: Any) -> None:
        """Has *undo* called at the end, with these arguments."""
        self._used = True
        self._undos.callback(undo, *args)

    def enter(self, manager: Any) -> Any:
        """Enters *manager*, and leaves it at the end."""
        self._used = True
        return self._undos.enter_context(manager)

    def close(self) -> None:
        """Undoes everything, the last one first. If one undo raises, the others still run, and then it is raised."""
        self._used = False
        self._undos.close()


def listening(
    original: Callable[..., Any],
    *,
    before: Callable[..., Callable[[], None] | None] | None = None,
    after: Callable[..., None] | None = None,
    failed: Callable[[Exception], None],
) -> Callable[..., Any]:
    """A function that runs *original*, and calls us before and after it.

    Args:
        original: gets the function's arguments; the function returns or raises what *original* does.
        before: is called first, with the same arguments. It may return a function, which is called when *original* has
            ended, also if it raised.
        after: is called with the same arguments when *original* has returned.
        failed: gets what *before* or *after* raised; it never raises.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        ends = None
        try:
            if before is not None:
                ends = before(*args, **kwargs)
        except Exception as error:
            failed(error)
        try:
            result = original(*args, **kwargs)
        finally:
            try:
                if ends is not None:
                    ends()
            except Exception as error:
                failed(error)
        try:
            if after is not None:
                after(*args, **kwargs)
        except Exception as error:
            failed(error)
        return result

    return call
