"""Which of a model's modules are compiled, and what their compiled code hides from the dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn

from lightning_flops.instrument.autograd_state import calling_modules
from lightning_flops.instrument.module_scope import ModuleNames
from lightning_flops.records import UncountedOperator


class CompiledRegions:
    """The compiled modules of one model.

    Args:
        names: the names of its modules.
    """

    def __init__(self, names: ModuleNames) -> None:
        self._names = names
        self._compiled: list[nn.Module] = []
        self._known: frozenset[nn.Module] = frozenset()
        self.in_place = False
        """Whether any module was compiled in place, by ``module.compile()``: no hook fires inside such a module."""

    def refresh(self) -> None:
        """Looks for compiled modules; a model may be compiled at any time."""
        self._compiled = []
        self.in_place = False
        if "torch._dynamo" not in sys.modules:
            return
        for module in self._names.modules():
            if module.__dict__.get("_compiled_call_impl") is not None:
                self.in_place = True
                self._compiled.append(module)
            elif "_orig_mod" in module._modules:
                self._compiled.append(module)
        if self.in_place:
            self._known = frozenset(self._names.modules())

    def running_module(self) -> nn.Module | None:
        """The model's module that is running, hooks or not; a compiler's own graph modules are looked past."""
        return next((module for module in calling_modules() if module in self._known), None)

    def hidden(self, calls: Mapping[str, int]) -> dict[str, UncountedOperator]:
        """CUDA graphs that inductor replays: a replay dispatches nothing, and does not tell when it runs.

        They are listed, as heavy, as soon as there are any in this process, under the compiled modules that ran; under
        the root where only functions are compiled.

        Args:
            calls: how often each module was called.
        """
        if not calls or not _cuda_graphs_are_recorded():
            return {}
        compiled = {self._names.name_for(module, "") for module in self._compiled}
        names = sorted(name for name in compiled if name is not None and calls.get(name)) or [""]
        count = sum(calls.get(name, 0) for name in names)
        listed = UncountedOperator(calls=count, modules=tuple(names), output_elements=0, heavy=True)
        return {"inductor.cuda_graph": listed}


def _cuda_graphs_are_recorded() -> bool:
    """Whether inductor replays CUDA graphs: a replay dispatches nothing."""
    try:
        containers = sys.modules["torch._inductor.cudagraph_trees"].local.tree_manager_containers
        return any(container.tree_manager is not None for container in containers.values())
    except (KeyError, AttributeError):
        return False


def autograd_is_compiled() -> bool:
    """Whether backward passes are compiled too, so that a hook on a node would compile them anew."""
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled, "compiled_autograd_enabled", False))
