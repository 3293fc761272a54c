"""Replaces functions of other people's objects, classes and modules for a while, so that they run our code."""

from __future__ import annotations

import copy
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

from lightning_flops.instrument.border import UndoLedger
from lightning_flops.instrument.torch_private.compiler import hide

Make = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Gets a function, and returns what runs in place of it."""

_PATCH = "__lightning_flops_patch__"
"""Attribute of a function of ours that holds its ``_Patch``."""


class _OnInstance:
    """A callable in place of a method of one instance. Pickles and copies replace it by the method."""

    def __init__(self, original: Callable[..., Any], call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, original)
        self._original = original
        self._call = call

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self._original,),)  # it loads without this package

    def __copy__(self) -> Any:
        return self._original

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._original, memo)


class _Patch:
    """One replaced function. A class's and a module's are pickled by their name, as the function is."""

    def __init__(self, target: Any, name: str, make: Make) -> None:
        self.target = target
        self.name = name
        self.had = name in vars(target)
        self.previous = vars(target).get(name)
        self._original: Callable[..., Any] = getattr(target, name)
        self._inner: Callable[..., Any] | None = make(self._original)

        def call(*args: Any, **kwargs: Any) -> Any:
            # Who still holds this after it was undone runs the function alone.
            return (self._inner or self._original)(*args, **kwargs)

        hide(call, alone=True)
        shared = isinstance(target, (type, types.ModuleType))
        self.replacement: Any = functools.wraps(self._original)(call) if shared else _OnInstance(self._original, call)
        setattr(self.replacement, _PATCH, self)

    @property
    def alive(self) -> bool:
        return self._inner is not None

    def put_on(self) -> None:
        setattr(self.target, self.name, self.replacement)

    def undo(self) -> None:
        self._inner = None
        if vars(self.target).get(self.name) is not self.replacement:
            return  # other code has wrapped it since
        had, previous = self.had, self.previous
        # We may have replaced another one of ours, which was undone while we were on top of it.
        while isinstance(older := getattr(previous, _PATCH, None), _Patch) and not older.alive:
            had, previous = older.had, older.previous
        if had:
            setattr(self.target, self.name, previous)
        else:
            delattr(self.target, self.name)


class Patches:
    """Replaced functions of other people's instances, classes and modules; ``undo`` makes each as it was before."""

    def __init__(self) -> None:
        self._ledger = UndoLedger()

    def __bool__(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._ledger)

    def replace(self, target: Any, name: str, make: Make) -> None:
        """Make ``target.name`` of an instance, a class or a module run ``make(original)``.

        On a class, *original* is the plain function, which gets the instance as its first argument. While a function of
        a class or a module is replaced, references to it that were taken before cannot be pickled.

        Raises:
            AttributeError: *target* has no such attribute.
        """
        patch = _Patch(target, name, make)
        self._ledger.add(patch.undo)
        patch.put_on()

    def undo(self) -> None:
        """Undo every replacement, the last one first. If one raises, the others are still undone."""
        self._ledger.close()
