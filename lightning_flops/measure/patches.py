"""Calls us before and after functions of torch's classes and modules, for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from lightning_flops.measure.torch_private.needed import hide, hide_around

Before = Callable[..., Callable[[], None] | None]
"""Gets a function's arguments. It may return what is to be called when the function has ended, also if it raised."""

_PATCH = "__lightning_flops_patch__"
"""Attribute of a function of ours that holds its ``_Patch``."""


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
        AttributeError: *target* has no such attribute.
    """
    undo.callback(_Patch(target, name, before, after, failed).undo)


class _Patch:
    """One replaced function. It is pickled by its name, as the original is."""

    def __init__(
        self,
        target: Any,
        name: str,
        before: Before | None,
        after: Callable[..., None] | None,
        failed: Callable[[Exception], None],
    ) -> None:
        self.target = target
        self.name = name
        self.before, self.after, self.failed = before, after, failed
        self.is_over = False
        self.had = name in vars(target)
        self.previous = vars(target).get(name)
        original = getattr(target, name)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            ends = None if self.before is None else self.ask(self.before, *args, **kwargs)
            try:
                result = original(*args, **kwargs)
            finally:
                if ends is not None:
                    self.ask(ends)
            if self.after is not None:
                self.ask(self.after, *args, **kwargs)
            return result

        self.replacement: Any = hide_around(call, before, after)
        setattr(call, _PATCH, self)
        setattr(target, name, call)

    def ask(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        try:
            return call(*args, **kwargs)
        except Exception as error:
            self.failed(error)
            return None

    def undo(self) -> None:
        # Who still holds the replacement runs the function alone, and keeps nothing else alive.
        self.before = self.after = None
        self.failed = lambda error: None
        self.is_over = True
        if vars(self.target).get(self.name) is not self.replacement:
            return  # other code has wrapped it since
        had, previous = self.had, self.previous
        # We may have replaced another one of ours, which was undone while we were on top of it.
        while isinstance(older := getattr(previous, _PATCH, None), _Patch) and older.is_over:
            had, previous = older.had, older.previous
        if had:
            setattr(self.target, self.name, previous)
        else:
            delattr(self.target, self.name)


hide(_Patch.ask)
