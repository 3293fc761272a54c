"""Loaders of accelerate, which fetch a batch before they hand over the one before it."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_LOADERS = "accelerate.data_loader"

_OURS = __name__.partition(".")[0] + "."


@dataclass(slots=True)
class _Held(Generic[T]):
    """What one iterator has delivered, and its loader has not handed over."""

    latest: list[T] = field(default_factory=list)
    """One batch at most."""
    hands_over: bool = True
    """A batch that is handed over is one that was fetched; otherwise the loader makes it of several."""


class ReadAhead(Generic[T]):
    """Tells which batch a loop gets when a DataLoader inside another loader delivers one."""

    def __init__(self) -> None:
        self.is_needed = False
        """An iterator is read ahead."""
        self._held: weakref.WeakKeyDictionary[Any, _Held[T]] = weakref.WeakKeyDictionary()

    def looks_at(self, iterator: Any) -> None:
        """Find out who asks *iterator* for a batch, which is about to fetch it."""
        module = sys.modules.get(_LOADERS)
        if module is None or self._held_of(iterator) is not None:
            return
        frame = innermost_not_ours()
        asking = None if frame is None else frame.f_code
        if asking in _codes(module, (("DataLoaderShard", "__iter__"),)):
            held: _Held[T] = _Held()
        elif asking in _codes(
            module, (("DataLoaderDispatcher", "__iter__"), ("DataLoaderDispatcher", "_fetch_batches"))
        ):
            held = _Held(hands_over=False)
        else:
            return
        with contextlib.suppress(TypeError):  # an iterator of C
            self._held[iterator] = held
            self.is_needed = True

    def handed_over(self, iterator: Any, fetched: T | None) -> T | None:
        """What the loop gets now that *iterator* has delivered *fetched*; None: nothing that is known.

        Args:
            iterator: a DataLoader's.
            fetched: None if it has no more.
        """
        held = self._held_of(iterator)
        if held is None:
            return fetched
        if not held.hands_over:
            return None
        before, held.latest = held.latest, [] if fetched is None else [fetched]
        return before[0] if before else None

    def _held_of(self, iterator: Any) -> _Held[T] | None:
        try:
            return self._held.get(iterator)
        except TypeError:  # an iterator of C
            return None


def innermost_not_ours() -> FrameType | None:
    """The frame of the innermost function on the stack that is not in this package."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(_OURS):
        frame = frame.f_back
    return frame


def _codes(module: Any, names: Iterable[tuple[str, str]]) -> list[CodeType]:
    """The code of these methods, of those that *module* has."""
    methods = (getattr(getattr(module, kind, None), name, None) for kind, name in names)
    return [code for method in methods if (code := getattr(method, "__code__", None)) is not None]
