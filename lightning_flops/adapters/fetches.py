"""The wait for data in any loop over torch's DataLoaders: one wrapper of their iterators' ``__next__``.

It is on while a run needs it, on the class, so nothing of ours is on a loader or an iterator of the user's.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from lightning_flops.instrument.torch_private.loading import iterator_class
from lightning_flops.run.run import Run


class Listener(Protocol):
    """Hears of fetches; its methods are ``safe``."""

    @property
    def run(self) -> Run | None:
        """The run whose training thread fetches."""

    def fetch_begins(self, iterator: Any) -> None:
        """A DataLoader's *iterator* is asked for a batch."""

    def fetch_ends(self, batch: Any) -> None:
        """It has delivered *batch*; None: it is at its end, or has raised."""


_listeners: list[weakref.ref[Listener]] = []
_undo: list[Callable[[], None]] = []


def hear_fetches(listener: Listener, undo: ExitStack) -> None:
    """Have *listener* hear of the fetches on its run's training thread until *undo* is closed; held weakly."""
    one = weakref.ref(listener)
    _listeners.append(one)
    undo.callback(_drop, one)
    kind = iterator_class()
    if not _undo and kind is not None:
        _undo.append(_wrap(kind))


def _drop(one: weakref.ref[Listener]) -> None:
    if one in _listeners:
        _listeners.remove(one)
    if not _listeners and _undo:
        _undo.pop()()


def _wrap(kind: type) -> Callable[[], None]:
    original = kind.__next__  # type: ignore[attr-defined]

    @functools.wraps(original)
    def next_batch(iterator: Any) -> Any:
        here = threading.get_ident()
        hearing = []
        for reference in _listeners:
            one = reference()
            if one is not None and one.run is not None and one.run.thread == here:
                hearing.append(one)
                one.fetch_begins(iterator)
        batch = None
        try:
            batch = original(iterator)
            return batch
        finally:
            for one in hearing:
                one.fetch_ends(batch)

    kind.__next__ = next_batch  # type: ignore[attr-defined]

    def undo() -> None:
        if kind.__next__ is next_batch:  # type: ignore[attr-defined]
            kind.__next__ = original  # type: ignore[attr-defined]

    return undo
