"""Functions of others' classes, modules and tables, wrapped for as long as somebody needs it, and who hears of calls.

Nothing of ours is on an object of the user's: a wrapper is on a class or a module, and finds those who listen.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from lightning_flops.instrument.torch_private.compiler import hide_around
from lightning_flops.instrument.torch_private.loading import iterator_class

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
    put = owner.__setitem__ if isinstance(owner, dict) else functools.partial(setattr, owner)
    put(name, wrapper)

    def remove() -> None:
        if table[name] is wrapper:  # otherwise somebody has wrapped it since, and keeps it
            put(name, original)

    return remove


# ---- who hears of calls


class _Listener(NamedTuple):
    """An object with a ``run``, and what hears of calls on the run's thread."""

    one: weakref.ref[Any]
    begins: Callable[..., object] | None
    ends: Callable[[Any, Any], object] | None
    raises: Callable[[Any, BaseException], object] | None


_listeners: dict[tuple[int, str], list[_Listener]] = {}


def hear(
    listener: Any,
    owner: Any,
    name: str,
    undo: ExitStack,
    *,
    begins: Callable[..., object] | None = None,
    ends: Callable[[Any, Any], object] | None = None,
    raises: Callable[[Any, BaseException], object] | None = None,
) -> None:
    """Have *listener*, which is held weakly, hear of the calls of a function until *undo* is closed.

    Args:
        listener: has a ``run``, on whose training thread it hears.
        owner: as for ``wrap``; of a class, the first of its bases that has the function.
        name: of the function.
        undo: ends it.
        begins: a safe method of the listener's that gets the arguments before the function does.
        ends: one that gets what the function has returned; None where it has raised.
        raises: one that gets what the function has raised, in the place of *ends*.
    """
    if isinstance(owner, type):
        owner = next(kind for kind in owner.__mro__ if name in vars(kind))
    listeners = _listeners.setdefault((id(owner), name), [])
    listeners.append(one := _Listener(weakref.ref(listener), begins, ends, raises))
    undo.callback(listeners.remove, one)
    wrap(owner, name, functools.partial(_heard, listeners), undo)


def hear_fetches(listener: Any, undo: ExitStack) -> None:
    """Have *listener* hear of the batches that any DataLoader is asked for, by ``fetch_begins`` and ``fetch_ends``."""
    if (kind := iterator_class()) is not None:
        hear(listener, kind, "__next__", undo, begins=type(listener).fetch_begins, ends=type(listener).fetch_ends)


def hear_backwards(listener: Any, undo: ExitStack) -> None:
    """Have *listener* hear where ``loss.backward()`` ends, by ``backward_begins`` and ``backward_ends``."""
    begins, ends = type(listener).backward_begins, type(listener).backward_ends
    hear(listener, torch.autograd, "backward", undo, begins=begins, ends=ends)


def _heard(listeners: list[_Listener], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        hearing = _all_begin(listeners, args, kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            _all_end(hearing, None, error)
            raise
        _all_end(hearing, result, None)
        return result

    return hide_around(call, _all_begin, _all_end)


def _all_begin(
    listeners: list[_Listener], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Any, _Listener]]:
    here, hearing = threading.get_ident(), []
    for each in tuple(listeners):
        one = each.one()
        if one is not None and one.run is not None and one.run.thread == here:
            hearing.append((one, each))
            if each.begins is not None:
                each.begins(one, *args, **kwargs)
    return hearing


def _all_end(hearing: list[tuple[Any, _Listener]], result: Any, error: BaseException | None) -> None:
    for one, each in hearing:
        if error is not None and each.raises is not None:
            each.raises(one, error)
        elif each.ends is not None:
            each.ends(one, result)
