"""The hooks of a loop's adapter: torch's public ones of models and optimizers, and a wrapper of autograd's two entries.

Each holds the adapter weakly, and tells it of what happens on the thread that trains.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_flops.adapters.wrapping import wrap
from lightning_flops.instrument.torch_private.compiler import compiler_callbacks, hide, hide_around, was_used, wrapped

if TYPE_CHECKING:
    from lightning_flops.adapters.loop import LoopRun


class Hook:
    """A hook of ours on a module or an optimizer of the user's, which holds the adapter weakly.

    In a pickle or a copy of what it is on, it is a function of the standard library's that does nothing.
    """

    def __init__(self, adapter: LoopRun, tell: Callable[..., None]) -> None:
        self._adapter = weakref.ref(adapter)
        self._tell = tell

    def __call__(self, *args: Any) -> None:
        """Tell the adapter, if it is there and this is the thread that trains, or autograd's for it."""
        adapter = self._adapter()
        if adapter is not None and (adapter.place.backwards or adapter.run.thread == threading.get_ident()):
            self._tell(adapter, *args)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")


hide(Hook.__call__)


def hook_optimizers(optimizers: Sequence[Any], begins: Any, ends: Any, undo: ExitStack) -> None:
    """Have *begins* and *ends* called around the steps of *optimizers*, or of any where there are none."""
    if was_used():  # an update that is compiled would have them in its graph
        begins, ends = wrapped(begins.__call__), wrapped(ends.__call__)
    if not optimizers:
        undo.callback(register_optimizer_step_pre_hook(begins).remove)
        undo.callback(register_optimizer_step_post_hook(ends).remove)
    for optimizer in optimizers:
        undo.callback(optimizer.register_step_pre_hook(begins).remove)
        undo.callback(optimizer.register_step_post_hook(ends).remove)


def hook_models(models: Sequence[nn.Module], enters: Any, leaves: Any, undo: ExitStack) -> None:
    """Have *enters* and *leaves* called around the forwards of *models*.

    While torch compiles, the hooks are down: code that had seen them would break its graph there.
    """
    handles: list[Any] = []

    def put_up(*_: Any) -> None:
        if not handles:
            for model in models:
                handles.append(model.register_forward_pre_hook(enters, prepend=True, with_kwargs=True))
                handles.append(model.register_forward_hook(leaves, always_call=True))

    def take_down(*_: Any) -> None:
        while handles:
            handles.pop().remove()

    undo.callback(take_down)
    put_up()
    compiler = compiler_callbacks() if was_used() else None
    if compiler is not None:
        for function in (take_down, put_up):  # torch calls them inside of compiled code, too, and holds its lock then
            hide(function)
        undo.callback(compiler.remove_start_callback, take_down)
        undo.callback(compiler.remove_end_callback, put_up)
        compiler.register_start_callback(take_down)
        compiler.register_end_callback(put_up)


_hearing: list[weakref.ref[LoopRun]] = []
"""Adapters of the loops that go on."""


def hear_backwards(adapter: LoopRun, undo: ExitStack) -> None:
    """Have *adapter* hear of calls of autograd on its thread until *undo* is closed."""
    one = weakref.ref(adapter)
    _hearing.append(one)
    undo.callback(_hearing.remove, one)
    for name in ("backward", "grad"):
        wrap(torch.autograd, name, _heard, undo)


def _heard(original: Callable[..., Any]) -> Callable[..., Any]:
    of_loss = original.__name__ == "backward"

    def begins() -> list[LoopRun]:
        here = threading.get_ident()
        found = [one for reference in _hearing if (one := reference()) is not None and one.run.thread == here]
        for one in found:
            one.backward_begins(of_loss=of_loss)
        return found

    @functools.wraps(original)
    def autograd(*args: Any, **kwargs: Any) -> Any:
        found = begins()
        try:
            return original(*args, **kwargs)
        finally:
            _ends(found)

    return hide_around(autograd, begins, _ends)


def _ends(hearing: list[LoopRun]) -> None:
    for one in hearing:
        one.backward_ends()
