"""Torch's global hooks of modules and of optimizers' steps, up while anybody hears them, out of the compiler's sight.

All who hear one kind share its two hooks. They may cease to do so from inside of one: where torch goes through a table
of hooks, and would raise into the user's step if one went, the two stay, hear of nothing, and go at a later step.
"""

from __future__ import annotations

import re
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_flops.measure.patches import Failed, guarded, listen
from lightning_flops.measure.torch_private.needed import (
    ENDS_CALL,
    EVAL_FRAME,
    InferenceMode,
    hide,
    is_in_compiled_call,
    set_flag_of_modes,
)
from lightning_flops.measure.torch_private.optional import (
    READS_MODULE,
    compiler_callbacks,
    leave_compiled_code,
    torchscript,
)
from lightning_flops.signals import Undo

#: What torch warns users of ``torch.compile(module)`` about hooks that are not theirs.
_IGNORED = re.compile(r"Using `torch.compile\(module\)` when there are global hooks")


class _Hooks:
    """Two of torch's global hooks, before and after something, and who hears of it."""

    def __init__(self, *registers: Callable[..., Any], are_copied: bool) -> None:
        self._registers = registers
        self._are_copied = are_copied  # torch goes through a copy of its hooks, but where something has raised
        self._handles: list[Any] = []
        self._hearers: list[tuple[Any, ...]] = []  # what is called before, what after, and what gets their failures
        self._calling: list[Any] = []  # the handles of our hooks that torch is calling now, on all threads

    def hear(self, undo: Undo, *hearer: Any) -> None:
        """Call *hearer* until *undo* is closed."""

        def drop() -> None:
            with suppress(ValueError):  # one call of a list's: another thread may change it, too
                self._hearers.remove(hearer)
            self._go_unheard()

        undo.callback(drop)
        self._hearers.append(hearer)
        self.put_up()

    def put_up(self, *_: Any) -> None:
        """Have torch call us, if anybody hears it."""
        if not self._hearers or self._handles:
            return
        self._handles = handles = list[Any]()
        for place, register in enumerate(self._registers):
            handles.append(register(partial(self._call, handles, place)))
        if handles is not self._handles:  # another thread has put up its own at the same moment: they hear for all
            _remove(handles)

    def take_down(self, *_: Any) -> None:
        """Have torch call us no more."""
        _remove(self._handles)

    def _go_unheard(self) -> None:
        are_safe = self._are_copied and sys.exc_info()[0] is None
        if not self._hearers and (are_safe or all(map(_is_last, self._calling))):
            self.take_down()
            self.put_up()  # if another thread has begun to hear meanwhile

    def _call(self, handles: list[Any], place: int, *given: Any) -> None:
        leave_compiled_code()  # an optimizer's step that is compiled has our hooks in it
        if handles is not self._handles:
            return
        calling = handles[place : place + 1]
        self._calling += calling
        try:
            for hearer in [*self._hearers]:
                if hearer in self._hearers:  # another one may have dropped it
                    guarded(hearer[2], hearer[place], *given)
            self._go_unheard()
        finally:
            for one in calling:
                self._calling.remove(one)


hide(_Hooks._call)

_modules = _Hooks(
    register_module_forward_pre_hook, partial(register_module_forward_hook, always_call=True), are_copied=True
)
_steps = _Hooks(register_optimizer_step_pre_hook, register_optimizer_step_post_hook, are_copied=False)


def _remove(handles: list[Any]) -> None:
    while handles:
        handles[-1].remove()  # it is there until it is removed, whatever interrupts that
        handles.pop()


def _is_last(handle: Any) -> bool:
    """Whether torch calls no hook after this one; also true if it was removed because of that."""
    table = handle.hooks_dict_ref()
    return not table or handle.id not in table or next(reversed(table)) == handle.id


def hear_modules(
    undo: Undo,
    on_enter: Callable[[nn.Module, Any], None],
    on_leave: Callable[[nn.Module, Any, Any], None] | None,
    *,
    failed: Failed,
) -> None:
    """Calls *on_enter* before every module's forward and *on_leave* after it, also after one that raised, until *undo*.

    They run in the user's step: what one of them raises goes to *failed*.

    While torch compiles something the hooks are down: compiled code that had seen them would break its graph at them,
    and would be compiled again as soon as they are gone.
    """
    # Torch would warn users of ``torch.compile(module)`` about hooks that are not theirs. The functions of ``warnings``
    # that change filters would make Python forget which warnings it has shown.
    ignored: Any = ("ignore", _IGNORED, Warning, None, 0)
    warnings.filters.insert(0, ignored)  # type: ignore[attr-defined]
    # The user may put others in the place of the list.
    undo.callback(_take_out, lambda one: warnings.filters.remove(one), ignored)  # type: ignore[attr-defined]
    _modules.hear(undo, on_enter, on_leave, failed)
    around_compilations(undo, _modules.take_down, _modules.put_up)


def hear_steps(undo: Undo, begins: Callable[..., None], ends: Callable[..., None], *, failed: Failed) -> None:
    """Calls *begins* before every step of every optimizer, and *ends* after one that returned, until *undo* is closed.

    They get the optimizer, and the arguments of its step as a tuple and as a dict. *failed* gets what these two raised.
    Torch calls twice if a subclass's step calls its parent's.
    """
    _steps.hear(undo, begins, ends, failed)


def around_compilations(undo: Undo, begins: Callable[..., None], ends: Callable[..., None]) -> None:
    """Calls *begins* before torch compiles something and *ends* after it, until *undo* is closed.

    They are called with torch's reason; with nothing before torch 2.8.
    """
    if (compiler := compiler_callbacks()) is not None:
        for callback, when in ((begins, "start"), (ends, "end")):
            hide(callback)  # torch holds a lock around these calls, and would take it again to compile them
            undo.callback(_take_out, getattr(compiler, f"remove_{when}_callback"), callback)
            getattr(compiler, f"register_{when}_callback")(callback)


def around_scripting(undo: Undo, begins: Callable[..., None], ends: Callable[..., None]) -> None:
    """Calls *begins* before TorchScript is made of a module, with the hooks on it, and *ends* after it, until *undo*.

    Torch can make none of a hook that is ours.
    """

    def reads(*_: Any, **__: Any) -> Callable[..., None]:
        begins()
        return ends

    hide(ends)
    if hasattr(torchscript, READS_MODULE):
        listen(undo, torchscript, READS_MODULE, reads)


def _take_out(remove: Callable[[Any], None], callback: Callable[..., None]) -> None:
    with suppress(ValueError):  # it is not there
        remove(callback)


class FlagOfModes:
    """Sets torch's flag for a thread's dispatch modes right where the end of something sets it wrong.

    When an inference mode ends, or a compiled call, torch sets it to what it was when that began, whatever was pushed
    or removed in between.
    """

    def __init__(self) -> None:
        self._undo = Undo()
        self._open = weakref.WeakSet[Any]()  # the inference modes that have begun since we listen, and have not ended
        self._is_used = False
        self._threads: set[int] = set()  # those that were inside of something when a counter left it

    def keep_right(self, undo: Undo) -> None:
        """From now until *undo* is closed, and until what runs then has ended."""
        self._is_used = True
        undo.callback(self._is_left)
        self._listen()

    def _listen(self) -> None:
        if not self._undo:
            listen(self._undo, InferenceMode, "__enter__", self._begins)
            listen(self._undo, InferenceMode, "__exit__", self._ends)
        if is_in_compiled_call(0) and hasattr(sys.modules[EVAL_FRAME], ENDS_CALL):
            listen(self._undo, sys.modules[EVAL_FRAME], ENDS_CALL, lambda *_: partial(self._ended, 1))

    def _is_left(self) -> None:
        self._is_used = False
        self._threads.add(threading.get_ident())
        self._listen()
        self._ended(0)

    def _begins(self, context: Any) -> None:
        weakref.finalize(context, self._ended, 0)  # the compiler ends none where it gives up; before it leaves the set
        self._open.add(context)

    def _ends(self, context: Any, *_: Any) -> Callable[..., None]:
        self._open.discard(context)
        return partial(self._ended, 0)

    def _ended(self, calls: int, *_: Any) -> None:
        """An inference mode has ended, or so many calls of the compiler's, which are still on the stack."""
        set_flag_of_modes()
        if not (torch.is_inference_mode_enabled() or is_in_compiled_call(calls)):
            self._threads.discard(threading.get_ident())
        if not (self._is_used or self._open or self._threads):
            self._undo.close()


hide(FlagOfModes._ended)


#: Wrappers around an optimizer that are looked into: an object that answers to any name never comes to an end.
_MOST_WRAPPERS = 5


def with_inner(optimizer: Any) -> list[Any]:
    """*optimizer*, the one that it is put around, the one inside that, and so on: Lightning's, DeepSpeed's, torch's."""
    found = [optimizer]
    while len(found) <= _MOST_WRAPPERS and (inner := getattr(found[-1], "optimizer", None)) is not None:
        found.append(inner)
    return found
