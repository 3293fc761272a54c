"""What an adapter hears of: calls of a framework's functions on the training thread of its run."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from lightning_flops.measure.module_hooks import around_compilations, around_scripting
from lightning_flops.measure.patches import Ends, listen
from lightning_flops.measure.torch_private.needed import hide
from lightning_flops.measure.torch_private.optional import (
    CLIPS,
    has_compiled,
    iterator_class,
    leave_compiled_code,
    was_used,
)
from lightning_flops.run.run import failed
from lightning_flops.signals import Undo


class Hook:
    """A hook of ours on a module or an optimizer of the user's, which holds the adapter weakly.

    What *notify* raises ends our part of the run, as of a ``safe`` method.
    """

    def __init__(self, adapter: Any, notify: Callable[..., None]) -> None:
        self._adapter = weakref.ref(adapter)
        self._notify = notify

    def __call__(self, *args: Any) -> None:
        """Notify the adapter, if it is there, on the thread that trains."""
        leave_compiled_code()
        adapter = self._adapter()
        if adapter is None or adapter.run.closed or adapter.run.delivery.thread != threading.get_ident():
            return
        try:
            self._notify(adapter, *args)
        except Exception as error:
            failed(adapter.run, error)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (nullcontext(), "__exit__")  # in a pickle or a copy: the standard library's, and does nothing


hide(Hook.__call__)


def nothing(*_: Any) -> None:
    """Hear of nothing, as where torch calls no hook after a step that has raised."""


def hear(
    listener: Any,
    owner: Any,
    name: str,
    undo: Undo,
    *,
    begins: Callable[..., object] | None = None,
    ends: Callable[[Any, Any], object] | None = None,
    raises: Callable[[Any, BaseException], object] | None = None,
    of: object = None,
) -> None:
    """Have *listener*, which is held weakly, hear of calls on its run's training thread until *undo* is closed.

    *begins* gets the arguments before the function does, *ends* what it has returned, or None where it has raised;
    where *raises* is given it gets what was raised. What these raise ends our part of the run, as of ``safe`` methods.
    *owner* is as for ``listen``; of a class, *of* is the only instance whose calls are heard.
    """
    held, only = weakref.ref(listener), None if of is None else weakref.ref(of)

    def has_begun(*args: Any, **kwargs: Any) -> Ends | None:
        one = held()
        if one is None or one.run.closed or one.run.delivery.thread != threading.get_ident():
            return None
        if only is not None and not (args and args[0] is only()):
            return None
        if begins is not None:
            begins(one, *args, **kwargs)
        return has_ended

    def has_ended(result: Any, error: BaseException | None) -> None:
        one = held()
        if one is None or one.run.closed:
            return
        if error is not None and raises is not None:
            raises(one, error)
        elif ends is not None:
            ends(one, result)

    def has_failed(error: Exception) -> None:
        one = held()
        failed(None if one is None else one.run, error)

    listen(undo, owner, name, has_begun, failed=has_failed)


def hear_calls(
    listener: Any,
    models: Iterable[nn.Module],
    undo: Undo,
    *,
    begins: Callable[..., None],
    ends: Callable[..., None],
) -> None:
    """Have *listener* hear of the calls of *models*: *begins* gets the model, its arguments and the named ones."""
    handles: list[Any] = []
    enters, leaves = Hook(listener, begins), Hook(listener, ends)

    def put_up(*_: Any) -> None:
        for model in () if handles else models:
            handles.append(model.register_forward_pre_hook(enters, prepend=True, with_kwargs=True))
            handles.append(model.register_forward_hook(leaves, always_call=True))

    def take_down(*_: Any) -> None:
        while handles:
            handles[-1].remove()  # it is there until it is removed, whatever interrupts that
            handles.pop()

    undo.callback(take_down)
    put_up()
    around_scripting(undo, take_down, put_up)
    if was_used():  # code that had seen the hooks would break its graph there
        around_compilations(undo, take_down, put_up)


def hear_fetches(listener: Any, undo: Undo) -> None:
    """Have *listener* hear of the batches that any DataLoader is asked for, by ``fetch_begins`` and ``fetch_ends``."""
    if iterator_class is not None:
        heard: Any = type(listener)
        hear(listener, iterator_class, "__next__", undo, begins=heard.fetch_begins, ends=heard.fetch_ends)


def hear_around_updates(
    listener: Any, updated: Iterable[Any], undo: Undo, *, begins: Callable[..., None], ends: Callable[..., None]
) -> None:
    """Call *begins* and *ends* around what belongs to an update but is not its ``step``, until *undo* is closed.

    That is torch's and accelerate's clipping, and ``zero_grad`` and ``clip_grad_norm_`` of each model and optimizer of
    *updated*. What a compiled step may call is heard only where nothing was compiled: it would be compiled anew.
    """
    names, not_compiled = ("zero_grad", "clip_grad_norm_"), Undo()  # as FSDP's models have it
    accelerator = getattr(sys.modules.get("accelerate"), "Accelerator", object)

    def take_down(*_: Any) -> None:
        not_compiled.close()

    undo.callback(take_down)
    around_compilations(undo, take_down, nothing)
    own = [(type(one), name, one) for one in updated for name in names]
    for owner, name, of in [*own, *((*one, None) for one in [*CLIPS, (accelerator, "clip_grad_norm_")])]:
        is_never = owner is accelerator or isinstance(of, torch.optim.Optimizer)
        if hasattr(owner, name) and (is_never or not has_compiled()):
            hear(listener, owner, name, undo if is_never else not_compiled, begins=begins, ends=ends, of=of)
