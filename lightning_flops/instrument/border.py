"""The border between torch and us: what fails on our side stays there, and whatever we put up comes down.

``UndoLedger`` holds how everything of ours is taken off again. ``border`` is what a method wears that torch, or a
function that we replaced, calls within the user's step: an error of ours ends at it. ``listening`` is the same for
a function of somebody else's that we replace: we are called before it and after it.

The user's Ctrl-C may arrive in our code, too. It goes on to the user.
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
"""Is told where something of ours failed, and how; it raises nothing."""


class Bordered(Protocol):
    """What has methods that torch calls."""

    @property
    def _failed(self) -> Failed: ...


def border(
    where: str,
) -> Callable[[Callable[Concatenate[_Owner, _Arguments], None]], Callable[Concatenate[_Owner, _Arguments], None]]:
    """Keeps the errors of a method from whoever calls it, and tells them to the ``_failed`` of the method's owner.

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
    """What is on torch, on Python or on somebody's object because of us: how each of it is taken off.

    An undo is written down before what it undoes is done. So it must do nothing where that was not done, and it may be
    called twice. The ledger can be used again when it was closed.
    """

    def __init__(self) -> None:
        self._undos: list[Callable[[], object]] = []
        self.add: Callable[[Callable[[], object]], None] = self._undos.append
        """Has a function called at the end. The list's own method: there is no line of ours to be interrupted at."""

    def __bool__(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._undos)

    def hook(self, register: Callable[..., Any], hook: Callable[..., Any], **options: Any) -> None:
        """Puts up one of torch's hooks until the end."""
        handles: list[Any] = []
        self.add(functools.partial(remove_hooks, handles))
        handles.append(register(hook, **options))

    def enter(self, manager: AbstractContextManager[object]) -> None:
        """Enters *manager*, and leaves it at the end; to be left twice must not harm it."""
        entered: list[AbstractContextManager[object]] = []

        def leave() -> None:
            while entered:
                entered[-1].__exit__(None, None, None)
                entered.pop()

        self.add(leave)
        entered.append((manager.__enter__(), manager)[1])

    def close(self) -> None:
        """Undoes everything, the last first, to the end, whatever one of them raises.

        Raises:
            BaseException: what was raised first, or the user's Ctrl-C, when everything else is undone.
        """
        first: BaseException | None = None
        while self._undos:
            undo = self._undos[-1]
            for _ in range(2):  # what an interrupt kept from its end gets there the second time
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
    """Takes down the hooks of these handles, and empties the list."""
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
    """A function that runs *original*, of whose calls we hear.

    Args:
        original: gets what the function gets; what it returns or raises is what the function does.
        before: is called with the same arguments before; may return what is called when *original* has ended, also if
            it raised.
        after: is called with the same arguments when *original* has returned.
        failed: is told what *before* or *after* raised; it raises nothing.
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
