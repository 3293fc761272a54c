"""Torch's hooks before and after the steps of every optimizer, which may also be removed from inside of a hook.

If a hook is removed while torch calls them, torch raises into the user's step, unless the last one is running.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_flops.measure.patches import guarded
from lightning_flops.measure.torch_private.needed import hide
from lightning_flops.measure.torch_private.optional import leave_compiled_code

OnStep = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]
"""Gets an optimizer and the arguments of its step."""

_running: list[Any] = []
"""The handles of our hooks that torch is calling now, on all threads."""

_retired: list[Any] = []
"""The handles of hooks that do nothing any more, and could not be removed yet."""

_MOST_WRAPPERS = 5
"""Wrappers around an optimizer that are looked into: an object that answers to any name never comes to an end."""


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
