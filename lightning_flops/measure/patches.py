"""Calls us before and after functions of torch's classes and modules, for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from lightning_flops.measure.torch_private.needed import hide_around

Before = Callable[..., Callable[[], None] | None]
"""Gets a function's arguments. It may return what is to be called when the function has ended, also if it raised."""


class _Listener(NamedTuple):
    failed: Callable[[Exception], None]
    before: Before | None
    after: Callable[..., None] | None


_wrapped: dict[tuple[int, str], tuple[list[_Listener], Callable[[], None]]] = {}
"""By the id of a target and a name: who listens, and what makes the function as it was before."""


def listen(
    undo: ExitStack,
    target: Any,
    name: str,
    failed: Callable[[Exception], None],
    *,
    before: Before | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Call us before or after each call of ``target.name``, of a class or a module, until *undo* is closed.

    The function is compiled as it would be without us. On a class, its first argument is the instance. References to it
    that were taken before cannot be pickled meanwhile.

    Args:
        undo: makes the function as it was before.
        target: a class or a module.
        name: of the function.
        failed: gets what *before* or *after* raised; it never raises.
        before: is called first, with the same arguments.
        after: is called with the same arguments when the function has returned.

    Raises:
        KeyError: *target* itself has no such attribute.
    """
    key = id(target), name
    if key not in _wrapped:
        _wrapped[key] = _wrap(target, name)
    listeners, restore = _wrapped[key]
    listener = _Listener(failed, before, after)
    listeners.append(listener)

    def drop() -> None:
        listeners.remove(listener)  # who still holds the wrapper runs the function alone, and keeps nothing else alive
        if not listeners:
            del _wrapped[key]
            restore()

    undo.callback(drop)


def _wrap(target: Any, name: str) -> tuple[list[_Listener], Callable[[], None]]:
    """Puts a wrapper in the place of a function, which is pickled by its name, as the original is."""
    original, listeners = vars(target)[name], list[_Listener]()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        asked = []
        for each in reversed(listeners):
            asked.append((each, _ask(each.failed, each.before, args, kwargs)))
        try:
            result = original(*args, **kwargs)
        finally:
            for each, ends in asked:
                _ask(each.failed, ends, (), {})
        for each, _ in asked:
            _ask(each.failed, each.after, args, kwargs)
        return result

    def restore() -> None:
        if vars(target)[name] is call:  # otherwise other code has wrapped it since, and keeps it
            setattr(target, name, original)

    setattr(target, name, hide_around(call, _ask))
    return listeners, restore


def _ask(failed: Callable[[Exception], None], ours: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    try:
        return None if ours is None else ours(*args, **kwargs)
    except Exception as error:
        failed(error)
        return None
