"""Marks that torch.profiler writes into a trace, one around every forward of a module."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

from torch import nn

from lightning_flops.instrument.module_scope import ModuleNames
from lightning_flops.instrument.torch_private.profiling import new_mark
from lightning_flops.records import module_mark


class ModuleMarks:
    """Marks the forward of every module below the root, on every thread, and those that a backward repeats."""

    def __init__(self, root: nn.Module) -> None:
        self._names = ModuleNames(root)
        self._texts: dict[str, str] = {}
        self._local = threading.local()

    def enter(self, module: nn.Module, args: Any) -> None:
        """A forward begins."""
        # enter and leave run for every module of the step, so they make few calls.
        try:
            stack = self._local.stack
        except AttributeError:
            stack = self._local.stack = []
        name = self._names.name_for(module, stack[-1][1] if stack else "")
        if name is None:
            return
        text = self._texts.get(name)
        if text is None:
            text = self._texts[name] = module_mark(name)
        # The mark of the phase is the root's. A second one would cross it: hooks of every module run before a module's
        # own, at both ends of a forward.
        mark = new_mark(text) if name else nullcontext()
        mark.__enter__()
        stack.append((module, name, mark))

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward ends."""
        stack: list[Any] = getattr(self._local, "stack", [])
        for depth in range(len(stack) - 1, -1, -1):
            if stack[depth][0] is module:
                # The forwards above it ended by an error that skips hooks.
                while len(stack) > depth:
                    stack.pop()[2].__exit__(None, None, None)
                return
