"""Attributes set on somebody else's objects, modules and classes for a while, and taken off again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class _Patch:
    """One replaced attribute of one object."""

    def __init__(self, target: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self.target = target
        self.name = name
        self.had = name in vars(target)
        self.previous = vars(target).get(name)
        original = getattr(target, name)
        self.inner: Callable[..., Any] | None = make(original)

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            # Somebody may have wrapped us in turn and keep us beyond our time: then we are not there.
            return (self.inner or original)(*args, **kwargs)

        replacement.__lightning_flops_patch__ = self  # type: ignore[attr-defined]
        self.replacement = replacement
        setattr(target, name, replacement)

    @property
    def alive(self) -> bool:
        return self.inner is not None

    def undo(self) -> None:
        self.inner = None  # and let go of what it works for: whoever keeps us need not keep that
        attributes = vars(self.target)
        if attributes.get(self.name) is not self.replacement:
            return  # wrapped by somebody else since; what is left of us there calls the original
        had, previous = self.had, self.previous
        # What we replaced may be another patch of ours that was undone while we were on top of it.
        while (older := getattr(previous, "__lightning_flops_patch__", None)) is not None and not older.alive:
            had, previous = older.had, older.previous
        if isinstance(self.target, type):  # its namespace is written through it alone
            if had:
                setattr(self.target, self.name, previous)
            else:
                delattr(self.target, self.name)
        elif had:
            attributes[self.name] = previous
        else:
            del attributes[self.name]


class _Value:
    """One attribute of one instance that holds another value for a while."""

    def __init__(self, target: Any, name: str, value: Any) -> None:
        self.target = target
        self.name = name
        self.value = value
        self.had = name in vars(target)
        self.previous = vars(target).get(name)
        setattr(target, name, value)

    def undo(self) -> None:
        attributes = vars(self.target)
        if attributes.get(self.name) is not self.value:
            return  # somebody has set it since
        if self.had:
            attributes[self.name] = self.previous
        else:
            del attributes[self.name]


class Patches:
    """Replaced methods of other people's instances and classes; ``undo`` leaves each as it was found."""

    def __init__(self) -> None:
        self._patches: list[_Patch | _Value] = []

    def __bool__(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._patches)

    def replace(self, target: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Set ``target.name`` on the instance, module or class to ``make(original)``.

        On a class *original* is the plain function, which gets the instance as its first argument.

        Raises:
            AttributeError: *target* has no such attribute.
        """
        self._patches.append(_Patch(target, name, make))

    def set(self, target: Any, name: str, value: Any) -> None:
        """Set ``target.name`` on the instance to *value*, which nobody calls: a table, a setting."""
        self._patches.append(_Value(target, name, value))

    def undo(self) -> None:
        """Take every replacement off, the last one first."""
        while self._patches:
            self._patches.pop().undo()
