"""Modules compiled in place: which of them is running."""

from __future__ import annotations

from torch import nn

from lightning_flops.instrument.module_scope import ModuleNames
from lightning_flops.instrument.torch_private import compiler
from lightning_flops.instrument.torch_private.autograd import calling_modules


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
        modules = frozenset(self._names.modules()) if compiler.was_used() else frozenset()
        self.in_place = any(map(compiler.is_compiled_in_place, modules))
        self._known = modules if self.in_place else frozenset()

    def running_module(self) -> nn.Module | None:
        """The model's module that is running, hooks or not; a compiler's own graph modules are looked past."""
        return next((module for module in calling_modules() if module in self._known), None)
