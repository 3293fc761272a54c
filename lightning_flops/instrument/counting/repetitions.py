"""Where a backward repeats a part of a forward: activation checkpoints, and whatever works like one.

A backward runs with grad disabled. What repeats a forward in it must enable grad, or nothing that it computes could be
differentiated: ``with torch.enable_grad()`` inside a backward is where a repetition starts and ends, whoever wrote the
checkpoint. What runs inside is repeated, also where grad is off again: under ``torch.no_grad`` in the repeated code, in
the forward of an ``autograd.Function``, in compiled code.

Torch and DeepSpeed repeat a forward inside such a block and take gradients after it, so that what takes a gradient
inside was repeated too. In code that we do not know, which may differentiate on the spot what it has just computed,
such gradients are the backward's.

Code that switches grad on by a bare call of ``torch.set_grad_enabled(True)`` shows no end: of what it repeats, the
operators that run with grad enabled are known.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import CodeType
from typing import Any

import torch

from lightning_flops.instrument import border, patches
from lightning_flops.instrument.counting.thread_state import Repetition, ThreadState
from lightning_flops.instrument.torch_private.autograd import NO_GRAPH_TASK, checkpoint_codes, graph_task_id
from lightning_flops.instrument.torch_private.compiler import hide

_OWN_FILES = (__file__, border.__file__, patches.__file__)


class Repetitions:
    """Hears of blocks with grad enabled inside backwards, for one counter.

    Args:
        state: answers with the books of the thread it is asked on.
        switch_task: tells those books that another backward runs than a moment ago.
        failed: is told where this itself failed.
    """

    def __init__(
        self,
        *,
        state: Callable[[], ThreadState],
        switch_task: Callable[[ThreadState, int], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._state = state
        self._switch_task = switch_task
        self._failed = failed
        self._patches = patches.Patches()
        self._codes: frozenset[CodeType] = frozenset()

    def watch(self) -> None:
        """Listens from now on."""
        self._codes = checkpoint_codes()
        for manager in (torch.enable_grad, torch.set_grad_enabled):
            self._patches.replace(manager, "__enter__", self._heard_enter)
            self._patches.replace(manager, "__exit__", self._heard_exit)

    def close(self) -> None:
        """Listens no more, and leaves torch's classes as they were."""
        self._patches.undo()

    def _heard_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        failed = partial(self._failed, "the beginning of a repeated forward")
        enter = border.listening(original, after=self._begins, failed=failed)
        hide(enter)
        return enter

    def _heard_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        leave = border.listening(
            original, before=self._ends, failed=partial(self._failed, "the end of a repeated forward")
        )
        hide(leave)
        return leave

    def _begins(self, manager: Any) -> None:
        task = graph_task_id()
        if task == NO_GRAPH_TASK or not getattr(manager, "mode", True):
            return
        state = self._state()
        if task != state.task_id:
            self._switch_task(state, task)
        whole = self._by_checkpoint() or bool(state.repetitions and state.repetitions[-1].whole)
        state.repetitions.append(Repetition(manager, task, whole))
        state.replan()

    def _ends(self, manager: Any, *exception: Any) -> None:
        if graph_task_id() == NO_GRAPH_TASK:
            return
        state = self._state()
        for depth in range(len(state.repetitions) - 1, -1, -1):
            if state.repetitions[depth].manager is manager:
                del state.repetitions[depth:]
                state.replan()
                return

    def _by_checkpoint(self) -> bool:
        """Whether the code that enabled grad is a checkpoint's, as torch and DeepSpeed have them."""
        frame = sys._getframe(1)
        while frame.f_code.co_filename in _OWN_FILES and frame.f_back is not None:
            frame = frame.f_back
        return frame.f_code in self._codes
