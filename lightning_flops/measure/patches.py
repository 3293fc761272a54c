"""Functions of others' classes, modules and tables, wrapped for as long as needed, and what is called around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

from lightning_flops.measure.torch_private.needed import hide_around

Ends = Callable[[Any, BaseException | None], object]
"""Gets what a function has returned, None if it raised, and what it has raised."""
Begins = Callable[..., Ends | None]
"""Gets a function's arguments before it does. It may return what is to be called when the function has ended."""
Failed = Callable[[Exception], object]

_users: dict[tuple[int, Any], list[Callable[[], None]]] = {}
"""By owner and name: how the wrapper is removed, once for each who needs it."""


def wrap(owner: Any, name: Any, make: Callable[[Any], Callable[..., Any]], undo: ExitStack) -> None:
    """Have what *make* returns in the place of a function until *undo* is closed; all who need it share one wrapper.

    *owner* is a class or a module that has the function as the attribute *name*, or a dict that has it as a value; a
    KeyError says that it has none. The wrapper must not keep a run or an object of the user's alive.
    """
    key = id(owner), name
    users = _users.setdefault(key, [])
    users.append(users[0] if users else _put(owner, name, make))

    def drop() -> None:
        remove = users.pop()
        if not users:
            del _users[key]
            remove()

    undo.callback(drop)


def _put(owner: Any, name: Any, make: Callable[[Any], Callable[..., Any]]) -> Callable[[], None]:
    table = owner if isinstance(owner, dict) else vars(owner)
    put = owner.__setitem__ if isinstance(owner, dict) else functools.partial(setattr, owner)
    original = table[name]
    wrapper = make(original)
    put(name, wrapper)

    def remove() -> None:
        if table[name] is wrapper:  # otherwise other code has wrapped it since, and keeps it
            put(name, original)

    return remove


class _Listener(NamedTuple):
    begins: Begins
    failed: Failed | None


_listeners: dict[tuple[int, str], list[_Listener]] = {}


def listen(undo: ExitStack, owner: Any, name: str, begins: Begins, *, failed: Failed | None = None) -> None:
    """Have *begins* called before each call of ``owner.name`` until *undo* is closed, and what it returns after it.

    The function is compiled as it would be without us. *begins* gets the same arguments, on a class the instance first;
    who listens last is called first. *failed* gets what *begins*, or what it returned, raised; without it these raise
    nothing but what is the user's.
    """
    listeners = _listeners.setdefault((id(owner), name), [])
    wrap(owner, name, functools.partial(_heard, listeners), undo)
    listeners.append(one := _Listener(begins, failed))
    # Who still holds the wrapper runs the function alone, and keeps nothing else alive.
    undo.callback(listeners.remove, one)


def _heard(listeners: list[_Listener], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        hearing = []
        for each in reversed(listeners):  # a comprehension has a frame of its own, which torch would compile
            hearing.append((each, _ask(each.failed, each.begins, args, kwargs)))
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            for each, ends in hearing:
                _ask(each.failed, ends, (None, error), {})
            raise
        for each, ends in hearing:
            _ask(each.failed, ends, (result, None), {})
        return result

    return hide_around(call, _ask)


def _ask(failed: Failed | None, ours: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    try:
        return None if ours is None else ours(*args, **kwargs)
    except Exception as error:
        if failed is None:
            raise
        failed(error)
        return None
