"""Functions of others' classes, modules and tables, wrapped for as long as needed, and what is called around them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lightning_flops.measure.torch_private.needed import hide
from lightning_flops.signals import Undo

#: Gets what a function has returned, None if it raised, and what it has raised.
Ends = Callable[[Any, BaseException | None], object]
Failed = Callable[[Exception], object]


#: By owner and name: who listens to a function, and how its wrapper, which all of them share, is removed.
_wrapped: dict[tuple[int, Any], tuple[list[Any], Callable[[], None]]] = {}


def listen(
    undo: Undo,
    owner: Any,
    name: Any,
    begins: Any,
    *,
    failed: Failed | None = None,
    around: Callable[[list[Any], Callable[..., Any]], Callable[..., Any]] | None = None,
) -> None:
    """Have *begins* called before each call of a function until *undo* is closed, and what it returns after it.

    *owner* is a class, whose own function it is or that of its first base that has it, or a module that has the
    function as the attribute *name*, or a dict that has it as a value; a KeyError says that it has none. The function
    is compiled as it would be without us. *begins* gets its arguments, on a class the instance first; who listens last
    is called first. *failed* gets what *begins*, or what it returned, raised; without it these raise nothing but what
    is the user's. With *around*, all listeners to the function are what its wrappers take, and *begins* is one of them.
    """
    if isinstance(owner, type):
        owner = next((kind for kind in owner.__mro__ if name in vars(kind)), owner)
    is_quiet = around is not None or (failed is None and hide(begins))
    key, one = (id(owner), name), begins if is_quiet else functools.partial(_guarding, failed, begins)

    def drop() -> None:
        listeners, remove = _wrapped.get(key, ([one], lambda: None))
        # Who still holds the wrapper runs the function alone, and keeps nothing else alive.
        listeners[:] = [each for each in listeners if each is not one]
        if not listeners:
            remove()
            _wrapped.pop(key, None)  # last: what is interrupted before is called again

    undo.callback(drop)  # first, so that whatever is raised from here on leaves nothing behind
    if key not in _wrapped:
        table = owner if isinstance(owner, dict) else vars(owner)
        put = owner.__setitem__ if isinstance(owner, dict) else functools.partial(setattr, owner)
        listeners, original = list[Any](), table[name]
        wrapper: Any = (around or _heard)(listeners, original)
        if isinstance(owner, ModuleType):  # which may have it from another one; a pickle asks where it stands
            wrapper.__module__, wrapper.__qualname__ = owner.__name__, name

        def remove() -> None:
            if table[name] is wrapper:  # otherwise other code has wrapped it since, and keeps it
                put(name, original)

        _wrapped[key] = listeners, remove
        put(name, wrapper)
    _wrapped[key][0].append(one)


def _heard(listeners: list[Callable[..., Ends | None]], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        hearing = []
        for begins in reversed(listeners):  # a comprehension has a frame of its own, which torch would compile
            hearing.append(begins(*args, **kwargs))
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            for ends in hearing:
                if ends is not None:
                    ends(None, error)
            raise
        for ends in hearing:
            if ends is not None:
                ends(result, None)
        return result

    hide(call, alone=True)  # what it is around is compiled as it would be without us
    return call


def _guarding(failed: Failed | None, begins: Callable[..., Ends | None], /, *args: Any, **kwargs: Any) -> Ends | None:
    ends = guarded(failed, begins, *args, **kwargs)
    return None if ends is None else functools.partial(guarded, failed, ends)


def guarded(failed: Failed | None, ours: Callable[..., Any] | None, /, *args: Any, **kwargs: Any) -> Any:
    """What *ours* answers. It runs in the user's step: what it raises goes to *failed*, if there is one.

    Where a forward that found no room has ended there is none for us, nor for words about it.
    """
    try:
        return None if ours is None else ours(*args, **kwargs)
    except Exception as error:
        if failed is None:
            raise
        if not isinstance(error, RecursionError):
            failed(error)
        return None


hide(_guarding)
hide(guarded)
