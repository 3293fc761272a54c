"""Every backward of a program: one wrapper of ``torch.autograd.backward``, where ``loss.backward()`` ends, too."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
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

    def backward_begins(self) -> None:
        """Autograd is about to run."""

    def backward_ends(self) -> None:
        """Autograd has run, or has raised."""


_listeners: list[weakref.ref[Listener]] = []


def hear_backwards(listener: Listener, undo: ExitStack) -> None:
    """Have *listener* hear of the backwards on its run's training thread until *undo* is closed; held weakly."""
    one = weakref.ref(listener)
    _listeners.append(one)
    undo.callback(_listeners.remove, one)
    wrap(torch.autograd, "backward", _heard, undo)


def _heard(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:
        hearing = _all_begin()
        try:
            return original(*args, **kwargs)
        finally:
            _all_end(hearing)

    return hide_around(backward, _all_begin, _all_end)


def _all_begin() -> list[Listener]:
    here, found = threading.get_ident(), (reference() for reference in _listeners)
    hearing = [one for one in found if one is not None and one.run.thread == here]
    for one in hearing:
        one.backward_begins()
    return hearing


def _all_end(hearing: list[Listener]) -> None:
    for one in hearing:
        one.backward_ends()
