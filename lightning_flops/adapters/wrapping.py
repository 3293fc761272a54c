"""Functions of others' classes, modules and tables, wrapped for as long as needed, and the listeners to their calls.

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

from lightning_flops.measure.torch_private.needed import hide_around
from lightning_flops.measure.torch_private.optional import iterator_class

_users: dict[tuple[int, Any], list[Callable[[], None]]] = {}
"""By owner and name: how the wrapper is removed, once for each who needs it."""


def wrap(owner: Any, name: Any, make: Callable[[Any], Callable[..., Any]], undo: ExitStack) -> None:
    """Have what *make* returns in the place of a function until *undo* is closed; all who need it share one wrapper.

    *owner* is a class or a module that has the function as the attribute *name*, or a dict that has it as a value. The
    wrapper must not keep a run or an object of the user's alive.
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
    """Have *listener*, which is held weakly, hear of calls on its run's training thread until *undo* is closed.

    *begins* gets the arguments before the function does, *ends* what it has returned, or None where it has raised;
    where *raises* is given it gets what was raised. All are safe methods of the listener's. *owner* is as for ``wrap``;
    of a class, the first of its bases that has the function.
    """
    if isinstance(owner, type):
        owner = next(kind for kind in owner.__mro__ if name in vars(kind))
    listeners = _listeners.setdefault((id(owner), name), [])
    listeners.append(one := _Listener(weakref.ref(listener), begins, ends, raises))
    undo.callback(listeners.remove, one)
    wrap(owner, name, functools.partial(_heard, listeners), undo)


def hear_fetches(listener: Any, undo: ExitStack) -> None:
    """Have *listener* hear of the batches that any DataLoader is asked for, by ``fetch_begins`` and ``fetch_ends``."""
    if iterator_class is not None:
        kind = type(listener)
        hear(listener, iterator_class, "__next__", undo, begins=kind.fetch_begins, ends=kind.fetch_ends)


def hear_backwards(listener: Any, undo: ExitStack) -> None:
    """Have *listener* hear where ``loss.backward()`` ends, by ``backward_begins`` and ``backward_ends``."""
    kind = type(listener)
    hear(listener, torch.autograd, "backward", undo, begins=kind.backward_begins, ends=kind.backward_ends)


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


def _all_begin(listeners: list[_Listener], args: Any, kwargs: Any) -> list[tuple[Any, _Listener]]:
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
