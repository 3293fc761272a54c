"""Which of a model's modules are compiled, and what their compiled code hides from the dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from torch import nn

from lightning_flops.instrument.autograd_state import calling_modules
from lightning_flops.instrument.module_scope import named_modules
from lightning_flops.records import UncountedOperator

_TEMPLATE_MARKS = ("triton_tem_", "cpp_CppMicroGemm", "CppGemmTemplate", "cutlass_", "_flex_attention")
"""What inductor's generated code calls the kernels that it writes for matrix products and attention itself."""


class CompiledRegions:
    """The compiled modules of one model."""

    def __init__(self, root: nn.Module | None) -> None:
        self._root = root
        self._names: dict[str, nn.Module] = {}
        self._known: frozenset[nn.Module] = frozenset()
        self.in_place = False
        """Whether any module was compiled in place, by ``module.compile()``: no hook fires inside such a module."""

    def refresh(self) -> None:
        """Looks for compiled modules; a model may be compiled at any time."""
        self._names = {}
        self.in_place = False
        if self._root is None or "torch._dynamo" not in sys.modules:
            return
        for name, module in named_modules(self._root):
            in_place = getattr(module, "_compiled_call_impl", None) is not None
            self.in_place |= in_place
            if in_place or "_orig_mod" in module._modules:
                self._names[name] = module
        if self.in_place:
            self._known = frozenset(self._root.modules())

    def running_module(self) -> nn.Module | None:
        """The model's module that is running, hooks or not; a compiler's own graph modules are looked past."""
        return next((module for module in calling_modules() if module in self._known), None)

    def hidden(self, called: Iterable[str]) -> dict[str, UncountedOperator]:
        """Kernels that compiled code calls without the dispatcher, and that therefore nobody could count."""
        return {}


def autograd_is_compiled() -> bool:
    """Whether backward passes are compiled too, so that a hook on a node would compile them anew."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))
