"""Replaces functions of torch's classes and modules for a while, so that they run our code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_flops.instrument.torch_private.compiler import hide

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gets a function, and returns what runs in place of it."""

_PATCH = "__lightning_flops_patch__"
"""Attribute of a function of ours that holds its ``_Patch``."""


class _Patch:
    """One replaced function. It is pickled by its name, as the original is."""

    def __init__(self, target: Any, name: str, make: Make) -> None:
        self.target = target
        self.name = name
        self.had = name in vars(target)
        self.previous = vars(target).get(name)
        original = getattr(target, name)
        self.inner: Callable[..., Any] | None = make(original)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            # Who still holds this after it was undone runs the function alone.
            return (self.inner or original)(*args, **kwargs)

        hide(call, alone=True)
        self.replacement: Any = call
        setattr(call, _PATCH, self)
        setattr(target, name, call)

    def undo(self) -> None:
        self.inner = None
        if vars(self.target).get(self.name) is not self.replacement:
            return  # other code has wrapped it since
        had, previous = self.had, self.previous
        # We may have replaced another one of ours, which was undone while we were on top of it.
        while isinstance(older := getattr(previous, _PATCH, None), _Patch) and older.inner is None:
            had, previous = older.had, older.previous
        if had:
            setattr(self.target, self.name, previous)
        else:
            delattr(self.target, self.name)


def replace(undo: ExitStack, target: Any, name: str, make: Make) -> None:
    """Make ``target.name`` of a class or a module run ``make(original)`` until *undo* is closed.

    On a class, *original* is the plain function, which gets the instance as its first argument. References to the
    function that were taken before cannot be pickled meanwhile.

    Raises:
        AttributeError: *target* has no such attribute.
    """
    undo.callback(_Patch(target, name, make).undo)


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
        ends = None if before is None else _answer(failed, before, *args, **kwargs)
        try:
            result = original(*args, **kwargs)
        finally:
            if ends is not None:
                _answer(failed, ends)
        if after is not None:
            _answer(failed, after, *args, **kwargs)
        return result

    return call


def _answer(failed: Callable[[Exception], None], ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return ask(*args, **kwargs)
    except Exception as error:
        failed(error)
        return None


hide(_answer)
