"""Functions of others' classes, modules and tables, wrapped for as long as somebody needs it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

_users: dict[tuple[int, Any], list[Callable[[], None]]] = {}
"""By owner and name: how the wrapper is removed, once for each who needs it."""


def wrap(owner: Any, name: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]], undo: ExitStack) -> None:
    """Have what *make* returns in the place of a function until *undo* is closed; all who need it share one wrapper.

    Args:
        owner: a class or a module that has the function as an attribute, or a dict that has it as a value.
        name: of the function, or its key.
        make: gets the function, and returns a wrapper that holds no run and no object of the user's alive.
        undo: of the one who needs it.
    """
    users = _users.setdefault((id(owner), name), [])
    users.append(users[0] if users else _put(owner, name, make))
    undo.callback(_drop, (id(owner), name))


def _drop(key: tuple[int, Any]) -> None:
    users = _users[key]
    remove = users.pop()
    if not users:
        del _users[key]
        remove()


def _put(owner: Any, name: Any, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Callable[[], None]:
    table = owner if isinstance(owner, dict) else vars(owner)
    original = table[name]
    wrapper = make(original)
    _set(owner, name, wrapper)

    def remove() -> None:
        if table[name] is wrapper:  # otherwise somebody has wrapped it since, and keeps it
            _set(owner, name, original)

    return remove


def _set(owner: Any, name: Any, function: Callable[..., Any]) -> None:
    if isinstance(owner, dict):
        owner[name] = function
    else:
        setattr(owner, name, function)
