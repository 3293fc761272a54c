"""Torch's global hooks of modules and of optimizers' steps, put up for a while and out of the compiler's sight.

Those of optimizers may also be removed from inside of a hook. If one is removed while torch calls them, torch raises
into the user's step, unless the last one is running.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_flops.measure.patches import Failed, guarded, listen
from lightning_flops.measure.torch_private.needed import hide
from lightning_flops.measure.torch_private.optional import (
    READS_MODULE,
    compiler_callbacks,
    leave_compiled_code,
    torchscript,
)
from lightning_flops.signals import Undo

#: What torch warns users of ``torch.compile(module)`` about hooks that are not theirs.
_IGNORED = re.compile(r"Using `torch.compile\(module\)` when there are global hooks")


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


OnStep = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]  #: Gets an optimizer and the arguments of its step.

_running: list[Any] = []  #: The handles of our hooks that torch is calling now, on all threads.

_retired: list[Any] = []  #: The handles of hooks that do nothing any more, and could not be removed yet.

#: Wrappers around an optimizer that are looked into: an object that answers to any name never comes to an end.
_MOST_WRAPPERS = 5


def with_inner(optimizer: Any) -> list[Any]:
    """*optimizer*, the one that it is put around, the one inside that, and so on: Lightning's, DeepSpeed's, torch's."""
    found = [optimizer]
    while len(found) <= _MOST_WRAPPERS and (inner := getattr(found[-1], "optimizer", None)) is not None:
        found.append(inner)
    return found


class OptimizerHooks:
    """Calls *begins* before every step of every optimizer, and *ends* after it, if it has returned.

    *failed* gets what these two raised. Torch fires twice if a subclass's step calls its parent's.
    """

    def __init__(self, begins: OnStep, ends: OnStep, *, failed: Callable[[Exception], None]) -> None:
        self._calls = (begins, ends)
        self._failed = failed
        self._handles: list[Any] = []
        self._is_up = False

    def put_up(self) -> None:
        """Call us from here on."""
        remove_retired()
        self._is_up = True
        self._handles = [register_optimizer_step_pre_hook(self._before), register_optimizer_step_post_hook(self._after)]

    def remove(self) -> None:
        """Call us no more. If torch goes through its hooks now, ours do nothing, and are removed at a later step."""
        if self._is_up:
            _retired.extend(self._handles)
            self._is_up = False
        remove_retired()

    def _before(self, *step: Any) -> None:
        self._run(0, *step)

    def _after(self, *step: Any) -> None:
        self._run(1, *step)

    def _run(self, place: int, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leave_compiled_code()  # a step that is compiled has our hooks in it
        handle = self._handles[place]
        _running.append(handle)
        try:
            if self._is_up:
                guarded(self._failed, self._calls[place], optimizer, args, kwargs)
            else:
                remove_retired()
        finally:
            _running.remove(handle)


hide(OptimizerHooks._before)
hide(OptimizerHooks._after)


def remove_retired() -> None:
    """Remove what could not be removed while torch went through a table."""
    if all(map(_is_last, _running)):
        while _retired:
            _retired[-1].remove()  # it is there until it is removed, whatever interrupts that
            _retired.pop()


def _is_last(handle: Any) -> bool:
    """Whether torch calls no hook after this one; also true if it was removed because of that."""
    table = handle.hooks_dict_ref()
    return not table or handle.id not in table or next(reversed(table)) == handle.id
