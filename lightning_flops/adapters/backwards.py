"""Every backward of a program: wrappers of ``torch.autograd.backward``, where ``loss.backward()`` ends, and of grad."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from lightning_flops.adapters.wrapping import wrap
from lightning_flops.instrument.torch_private.compiler import hide_around
from lightning_flops.run.run import Run


class Listener(Protocol):
    """Hears of backwards; its methods are ``safe``."""

    run: Run
    """The run whose training thread goes backward."""

    def backward_begins(self, entry: str) -> None:
        """Autograd is about to run, through the function of this name."""

    def backward_ends(self) -> None:
        """Autograd has run, or has raised."""


_listeners: dict[str, list[weakref.ref[Listener]]] = {"backward": [], "grad": []}


def hear_backwards(listener: Listener, undo: ExitStack, *, entries: Sequence[str] = ("backward",)) -> None:
    """Have *listener* hear of the backwards on its run's training thread until *undo* is closed; held weakly."""
    one = weakref.ref(listener)
    for entry in entries:
        _listeners[entry].append(one)
        undo.callback(_listeners[entry].remove, one)
        wrap(torch.autograd, entry, _heard, undo)


def _heard(original: Callable[..., Any]) -> Callable[..., Any]:
    entry = original.__name__

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        hearing = _all_begin(entry)
        try:
            return original(*args, **kwargs)
        finally:
            _all_end(hearing)

    return hide_around(backward, _all_begin, _all_end)


def _all_begin(entry: str) -> list[Listener]:
    here, found = threading.get_ident(), (reference() for reference in _listeners.get(entry, ()))
    hearing = [one for one in found if one is not None and one.run.thread == here]
    for one in hearing:
        one.backward_begins(entry)
    return hearing


def _all_end(hearing: list[Listener]) -> None:
    for one in hearing:
        one.backward_ends()
