"""Torch's global module hooks, put up for a while and out of the compiler's sight."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_flops import host_clock
from lightning_flops.instrument.border import Failed, UndoLedger, remove_hooks
from lightning_flops.instrument.torch_private.compiler import compiler_callbacks, hidden, hide, wrapped
from lightning_flops.instrument.torch_private.modules import is_last_global_hook
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

EnterHook = Callable[[nn.Module, Any], None]
LeaveHook = Callable[[nn.Module, Any, Any], None]

_IGNORED = re.compile(r"Using `torch.compile\(module\)` when there are global hooks")
"""What torch tells users of ``torch.compile(module)`` about hooks that are not theirs."""


@contextmanager
def module_hooks(on_enter: EnterHook, on_leave: LeaveHook) -> Iterator[Callable[[], bool]]:
    """The hooks of ``put_up_hooks`` inside; what fails in one of the two is said once in the log."""
    undo = UndoLedger()
    said: list[str] = []

    def say(where: str, error: Exception) -> None:
        if not said:
            said.append(where)
            logger.warning("profiling failed in %s", where, exc_info=error)

    try:
        yield put_up_hooks(undo, on_enter, on_leave, _ignore, failed=say)
    finally:
        try:
            undo.close()
        except BaseException:
            undo.close()  # for what an interrupt kept from its end
            raise


def put_up_hooks(
    undo: UndoLedger, on_enter: EnterHook, on_leave: LeaveHook, on_compiled: Callable[[float], None], *, failed: Failed
) -> Callable[[], bool]:
    """Calls *on_enter* before every module's forward and *on_leave* after it, also after one that raised.

    Calls *on_compiled* whenever torch has compiled something. They run in the user's step: what one of the three raises
    goes to *failed*.

    While torch compiles something the hooks are down: compiled code that had seen them would break its graph at them,
    and would be compiled again as soon as they are gone.

    Args:
        undo: takes them down again.
        on_enter: gets the module and its positional arguments.
        on_leave: gets the module, its positional arguments and its output.
        on_compiled: gets how many seconds that took.
        failed: is told where one of them failed; it raises nothing.

    Returns:
        What says, when asked, whether *on_leave* is the last of torch's hooks: whoever is called by it may then take it
        away there and then, though torch is going through them.
    """
    compiler = compiler_callbacks()

    def enters(module: nn.Module, args: Any) -> None:
        try:
            on_enter(module, args)
        except Exception as error:
            failed("a module's forward pre-hook", error)

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        try:
            on_leave(module, args, output)
        except RecursionError:
            # There is no room for us after a forward that found none, nor for words about it.
            return
        except Exception as error:
            failed("a module's forward hook", error)

    # A compiler that reads the hooks into its graph looks past marks on their code, though not past torch's wrappers.
    kept_out = wrapped if compiler is None else hidden
    enter, leave = kept_out(enters), kept_out(leaves)

    def before(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            enter(module, args)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            leave(module, args, output)

    handles: list[Any] = []
    still_open = [True]
    compiles_since: list[float] = []

    def put_up() -> None:
        if still_open and not handles:
            # A torch that does not say when it compiles sees the hooks, and folds the second kind to nothing.
            unseen = compiler is not None
            handles.append(register_module_forward_pre_hook(enter if unseen else before))
            handles.append(register_module_forward_hook(leave if unseen else after, always_call=True))

    def is_last() -> bool:
        return bool(handles) and is_last_global_hook(handles[-1])

    def compiles(reason: Any) -> None:
        try:
            remove_hooks(handles)
            compiles_since[:] = [host_clock.now()]
        except Exception as error:
            failed("code that is compiled", error)

    def compiled(reason: Any) -> None:
        try:
            put_up()
            on_compiled(host_clock.now() - compiles_since.pop() if compiles_since else 0.0)
        except Exception as error:
            failed("code that was just compiled", error)

    _silence_hook_warning(undo)
    undo.add(partial(remove_hooks, handles))
    undo.add(still_open.clear)
    if compiler is not None:
        for callback in (compiles, compiled):
            hide(callback)  # torch holds a lock around these calls, and would take it again to compile them
        undo.add(partial(_take_out, compiler.remove_start_callback, compiles))
        compiler.register_start_callback(compiles)
        undo.add(partial(_take_out, compiler.remove_end_callback, compiled))
        compiler.register_end_callback(compiled)
    put_up()
    return is_last


def _ignore(seconds: float) -> None:
    pass


def _take_out(remove: Callable[[Any], None], callback: Callable[[Any], None]) -> None:
    with suppress(ValueError):  # it is not there
        remove(callback)


def _silence_hook_warning(undo: UndoLedger) -> None:
    """Keeps torch from telling users of ``torch.compile(module)`` about hooks that are not theirs.

    Each one inside has a filter of its own, as ``warnings.filters`` holds it, so that they may leave in any order. The
    functions of ``warnings`` that change filters make Python forget which warnings it has shown: the user would see
    each of them again. A filter that ignores something needs no forgetting.
    """
    own = ("ignore", _IGNORED, Warning, None, 0)

    def remove() -> None:
        filters: Any = warnings.filters
        for place, found in enumerate(filters):
            if found is own:
                del filters[place]
                break

    undo.add(remove)
    filters: Any = warnings.filters
    filters.insert(0, own)
