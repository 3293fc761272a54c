"""Modules compiled in place: which of them is running."""

from __future__ import annotations

import sys

from torch import nn

from lightning_flops.instrument.autograd_state import calling_modules
from lightning_flops.instrument.module_scope import ModuleNames


class CompiledRegions:
    """The modules of one model that were compiled in place.

    Args:
        names: the names of its modules.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._known: frozenset[nn.Module] = frozenset()
        self.in_place = False
        """Whether any module was compiled in place, by ``module.compile()``: no hook fires inside such a module."""

    def refresh(self) -> None:
        """Looks for modules compiled in place; a model may be compiled at any time."""
        modules = frozenset(self._names.modules()) if "torch._dynamo" in sys.modules else frozenset()
        self.in_place = any(module.__dict__.get("_compiled_call_impl") is not None for module in modules)
        self._known = modules if self.in_place else frozenset()

    def running_module(self) -> nn.Module | None:
        """The model's module that is running, hooks or not; a compiler's own graph modules are looked past."""
        return next((module for module in calling_modules() if module in self._known), None)


def autograd_is_compiled() -> bool:
    """Whether backward passes are compiled too, so that a hook on a node would compile them anew."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))
