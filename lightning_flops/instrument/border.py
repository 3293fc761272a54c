"""The border between torch and us: what fails on our side stays there, and everything that we put up is removed again.

``UndoLedger`` knows how to remove everything of ours. ``border`` decorates a method that torch, or a function that we
replaced, calls within the user's step: it catches our errors. ``listening`` does the same for a function of a library
or the user that we replace: we are called before it and after it. The user's Ctrl-C passes through.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

_Owner = TypeVar("_Owner", bound="Bordered")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

Failed = Callable[[str, Exception], None]
"""Is told where something of ours failed, and how; it never raises."""


class Bordered(Protocol):
    """An object with methods that torch calls."""

    @property
    def _failed(self) -> Failed: ...


def border(
    where: str,
) -> Callable[[Callable[Concatenate[_Owner, _Arguments], None]], Callable[Concatenate[_Owner, _Arguments], None]]:
    """Catches the errors of a method, and gives them to the ``_failed`` of the method's owner.

    Args:
        where: what the method does, in words for the report: "Counting failed in ...".
    """

    def guard(
        method: Callable[Concatenate[_Owner, _Arguments], None],
    ) -> Callable[Concatenate[_Owner, _Arguments], None]:
        @functools.wraps(method)
        def enter(owner: _Owner, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> None:
            try:
                method(owner, *args, **kwargs)
            except Exception as error:
                owner._failed(where, error)

        return enter

    return guard


class UndoLedger:
    """The undo functions for everything that we have put on torch, on Python or on a user's object.

    An undo is added before the action that it undoes. So it must do nothing if the action was not done, and it must be
    safe to call twice. The ledger can be used again after it was closed.
    """

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []
        self.add: Callable[[Callable[[], object]], None] = self._undos.append
        """Adds a function to call at the end. It is the list's own method, so no line of ours can be interrupted."""

    def __bool__(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._undos)

    def enter(self, manager: AbstractContextManager[object]) -> None:
        """Enters *manager*, and leaves it at the end. It must be safe to leave it twice."""
        entered: list[AbstractContextManager[object]] = []

        def leave() -> None:
            while entered:
                entered[-1].__exit__(None, None, None)
                entered.pop()

        self.add(leave)
        entered.append((manager.__enter__(), manager)[1])

    def close(self) -> None:
        """Undoes everything, the last one first. If one undo raises, the others still run.

        Raises:
            BaseException: what was raised first, or the user's Ctrl-C, after everything else is undone.
        """
        first: BaseException | None = None
        while self._undos:
            undo = self._undos[-1]
            for _ in range(2):  # an undo that was interrupted gets a second try
                try:
                    undo()
                    break
                except BaseException as error:
                    if first is None or not isinstance(error, Exception):
                        first = error
            self._undos.pop()
        if first is not None:
            raise first


def remove_hooks(handles: list[Any]) -> None:
    """Removes the hooks of these handles, and empties the list."""
    while handles:
        handles[-1].remove()
        handles.pop()


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
        failed: is told what *before* or *after* raised; it never raises.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        ends: Callable[[], None] | None = None
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
