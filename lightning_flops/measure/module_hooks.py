"""Torch's global module hooks, put up for a while and out of the compiler's sight."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_flops.measure.patches import Failed, guarded, listen
from lightning_flops.measure.torch_private.needed import hide
from lightning_flops.measure.torch_private.optional import READS_MODULE, compiler_callbacks, torchscript
from lightning_flops.signals import Undo

_IGNORED = re.compile(r"Using `torch.compile\(module\)` when there are global hooks")
"""What torch warns users of ``torch.compile(module)`` about hooks that are not theirs."""


def put_up_hooks(
    undo: Undo,
    on_enter: Callable[[nn.Module, Any], None],
    on_leave: Callable[[nn.Module, Any, Any], None],
    on_compiled: Callable[[], None] | None = None,
    *,
    failed: Failed,
) -> None:
    """Calls *on_enter* before every module's forward and *on_leave* after it, also after one that raised.

    They run in the user's step: what one of them raises goes to *failed*.

    While torch compiles something the hooks are down: compiled code that had seen them would break its graph at them,
    and would be compiled again as soon as they are gone.

    *undo* takes them down again. *on_compiled* is called when torch has compiled something.
    """
    handles: list[Any] = []

    def put_up() -> None:
        if not handles:
            handles.append(register_module_forward_pre_hook(partial(guarded, failed, on_enter)))
            leaves = partial(guarded, failed, on_leave)
            handles.append(register_module_forward_hook(leaves, always_call=True))

    def take_down() -> None:
        while handles:
            handles[-1].remove()
            handles.pop()

    def has_compiled(*reason: Any) -> None:
        put_up()
        guarded(failed, on_compiled)

    hide(put_up)
    hide(take_down)
    _silence_hook_warning(undo)
    undo.callback(take_down)
    around_compilations(undo, lambda *reason: take_down(), has_compiled)
    put_up()


def around_compilations(undo: Undo, begins: Callable[..., None], ends: Callable[..., None]) -> None:
    """Calls *begins* before torch compiles something and *ends* after it, until *undo* is closed.

    They are called with torch's reason; with nothing before torch 2.8.
    """
    if (compiler := compiler_callbacks()) is not None:
        for callback in (begins, ends):
            hide(callback)  # torch holds a lock around these calls, and would take it again to compile them
        undo.callback(_take_out, compiler.remove_start_callback, begins)
        compiler.register_start_callback(begins)
        undo.callback(_take_out, compiler.remove_end_callback, ends)
        compiler.register_end_callback(ends)


def around_scripting(undo: Undo, begins: Callable[[], None], ends: Callable[[], None]) -> None:
    """Calls *begins* before TorchScript is made of a module, with the hooks on it, and *ends* after it, until *undo*.

    Torch can make none of a hook that is ours.
    """

    def reads(*_: Any, **__: Any) -> Callable[..., None]:
        begins()
        return lambda result, error: ends()

    if hasattr(torchscript, READS_MODULE):
        listen(undo, torchscript, READS_MODULE, reads)


def _take_out(remove: Callable[[Any], None], callback: Callable[..., None]) -> None:
    with suppress(ValueError):  # it is not there
        remove(callback)


def _silence_hook_warning(undo: Undo) -> None:
    """Keeps torch from warning users of ``torch.compile(module)`` about hooks that are not theirs.

    The functions of ``warnings`` that change filters would make Python forget which warnings it has shown.
    """
    own: Any = ("ignore", _IGNORED, Warning, None, 0)
    warnings.filters.insert(0, own)  # type: ignore[attr-defined]
    # The user may put others in the place of the list.
    undo.callback(_take_out, lambda one: warnings.filters.remove(one), own)  # type: ignore[attr-defined]
