"""Torch's hooks before and after the steps of every optimizer, which may also be removed from inside of a hook.

torch goes through its table of hooks while it calls them. If one is removed meanwhile, torch raises into the user's
step, unless the hook that is running is the last one of the table. Our hooks are removed inside of a hook when
something of ours fails there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_flops.instrument.torch_private.compiler import hide, leave_compiled_code

Heard = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None]
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
    while len(found) <= _MOST_WRAPPERS:
        inner = getattr(found[-1], "optimizer", None)
        if inner is None or any(inner is one for one in found):
            break
        found.append(inner)
    return found


class OptimizerHooks:
    """Hears of every step of every optimizer. Torch fires twice if a subclass's step calls its parent's.

    Args:
        begins: is called before the step; None: nobody needs to know.
        ends: is called after it, if it has returned.
        failed: is told what these two raised, and what was raised here; it never raises an ``Exception``.
        but: optimizers whose steps are not heard of; they live as long as this.
    """

    def __init__(
        self, begins: Heard | None, ends: Heard, *, failed: Callable[[Exception], None], but: Iterable[Any] = ()
    ) -> None:
        self._but = frozenset(map(id, but))
        self._begins = begins
        self._ends: Heard | None = ends
        self._failed = failed
        self._hears_begins = begins is not None  # a hook of ours costs a small step nearly a microsecond
        self._handles: list[Any] = []
        self._hooks: list[Any] = []
        """The same, that of ``_after`` first; also when they are removed."""

    def put_up(self) -> None:
        """Hear of the steps from here on."""
        _remove_retired()
        self._handles.append(register_optimizer_step_post_hook(self._after))
        if self._hears_begins:
            self._handles.append(register_optimizer_step_pre_hook(self._before))
        self._hooks = self._handles[:]

    def remove(self) -> None:
        """Hear of no step any more; may be called twice.

        If torch goes through them now, they do nothing any more, and are removed at a later step, or when hooks of ours
        are put up or removed.
        """
        self._begins = self._ends = None
        _retired.extend(self._handles)
        self._handles.clear()
        _remove_retired()

    def _before(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._run(self._begins, 1, optimizer, args, kwargs)

    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._run(self._ends, 0, optimizer, args, kwargs)

    def _run(self, heard: Heard | None, place: int, optimizer: Any, args: tuple[Any, ...], kwargs: Any) -> None:
        if id(optimizer) in self._but:
            return
        leave_compiled_code()  # a step that is compiled has our hooks in it
        with calling(self._hooks[place]):
            try:
                if heard is None:
                    _remove_retired()
                else:
                    heard(optimizer, args, kwargs)
            except Exception as error:
                self._failed(error)


hide(OptimizerHooks._before)
hide(OptimizerHooks._after)


@contextmanager
def calling(handle: Any) -> Iterator[None]:
    """Inside, torch calls the hook of *handle*, and goes through a table of hooks, which none is removed from."""
    _running.append(handle)
    try:
        yield
    finally:
        _running.remove(handle)


def remove_retired() -> None:
    """Remove what could not be removed while torch went through a table."""
    _remove_retired()


def _remove_retired() -> None:
    if all(map(_is_last, _running)):
        while _retired:
            _retired[-1].remove()
            _retired.pop()


def _is_last(handle: Any) -> bool:
    """Whether torch calls no hook after this one; also true if it was removed because of that."""
    table = handle.hooks_dict_ref()
    return not table or handle.id not in table or next(reversed(table)) == handle.id
