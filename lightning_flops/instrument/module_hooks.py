"""Torch's global module hooks, put up for a while and out of the compiler's sight."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from lightning_flops.instrument.stack_room import stack_room
from lightning_flops.instrument.torch_private.compiler import compiler_callbacks, hidden
from lightning_flops.instrument.torch_private.modules import is_last_global_hook

EnterHook = Callable[[nn.Module, Any], None]
LeaveHook = Callable[[nn.Module, Any, Any], None]

_FRAMES = 6
"""Of ours, at most, on the stack above a model's deepest one: the hooks', or a dispatch mode's."""

_HOOK_WARNING = ("ignore", re.compile(r"Using `torch.compile\(module\)` when there are global hooks"), Warning, None, 0)
"""The filter against torch's warning, as ``warnings.filters`` holds it."""


@contextmanager
def module_hooks(
    on_enter: EnterHook, on_leave: LeaveHook, on_compiled: Callable[[], None]
) -> Iterator[Callable[[], bool]]:
    """Calls *on_enter* before every module's forward and *on_leave* after it, also after one that raised.

    Calls *on_compiled* whenever torch has compiled something. None of the three may raise: they run in the user's step.

    While torch compiles something the hooks are down: compiled code that had seen them would break its graph at them,
    and would be compiled again as soon as they are gone.

    What is entered says, when asked, whether *on_leave* is the last of torch's hooks: whoever is called by it may then
    take it away there and then, though torch is going through them.
    """
    compiler = compiler_callbacks()
    deeper, back = stack_room.deeper, stack_room.back

    def enters(module: nn.Module, args: Any) -> None:
        deeper()
        on_enter(module, args)

    def leaves(module: nn.Module, args: Any, output: Any) -> None:
        try:
            on_leave(module, args, output)
            back()
        except RecursionError:
            # There is no room for us after a forward that found none. Torch would warn of ours, which a program that
            # makes warnings errors would get in place of its own.
            return

    # A compiler that reads the hooks into its graph looks past marks on their code, though not past torch's wrappers.
    disable: Any = torch.compiler.disable if compiler is None else hidden
    enter, leave = disable(enters), disable(leaves)

    def before(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            enter(module, args)

    def after(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            leave(module, args, output)

    handles: list[Any] = []

    def put_up() -> None:
        if not handles:
            # A torch that does not say when it compiles sees the hooks, and folds the second kind to nothing.
            unseen = compiler is not None
            handles.append(register_module_forward_pre_hook(enter if unseen else before))
            handles.append(register_module_forward_hook(leave if unseen else after, always_call=True))

    def is_last() -> bool:
        return bool(handles) and is_last_global_hook(handles[-1])

    def take_down(reason: Any = None) -> None:
        while handles:
            handles.pop().remove()

    def compiled(reason: Any) -> None:
        put_up()
        on_compiled()

    if compiler is not None:
        compiler.register_start_callback(take_down)
        compiler.register_end_callback(compiled)
    put_up()
    try:
        with _silenced_hook_warning(), stack_room.open(_FRAMES):
            yield is_last
    finally:
        if compiler is not None:
            compiler.remove_start_callback(take_down)
            compiler.remove_end_callback(compiled)
        take_down()


@contextmanager
def _silenced_hook_warning() -> Iterator[None]:
    """Keeps torch from telling users of ``torch.compile(module)`` about hooks that are not theirs.

    Each one inside has a filter of its own, and takes one away, so that they may leave in any order.
    """
    filters: Any = warnings.filters
    filters.insert(0, _HOOK_WARNING)
    warnings._filters_mutated()  # type: ignore[attr-defined]
    try:
        yield
    finally:
        filters = warnings.filters
        if _HOOK_WARNING in filters:
            filters.remove(_HOOK_WARNING)
            warnings._filters_mutated()  # type: ignore[attr-defined]
