"""Which of a model's modules are compiled, and what their compiled code hides from the dispatcher."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from torch import nn

from lightning_flops.instrument.autograd_state import calling_modules
from lightning_flops.instrument.module_scope import ModuleNames
from lightning_flops.records import OperatorCell, UncountedOperator


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

    def notes(self, cells: Iterable[OperatorCell]) -> list[str]:
        """Sentences about what the counts of compiled modules may hide.

        A product has at most two gradients, each as large as itself, and attention has four for its two. A compiled
        backward that runs more than twice its forward repeats part of the forward, as activation checkpointing asks
        for; compiled code does not say which part.

        Args:
            cells: what was counted.
        """
        compiled = {self._names.name_for(module, "") for module in self._compiled}
        forward: dict[str, int] = {}
        backward: dict[str, int] = {}
        for cell in cells:
            sums = {"forward": forward, "backward": backward}.get(cell.phase)
            if sums is not None and cell.module in compiled:
                sums[cell.module] = sums.get(cell.module, 0) + cell.flops
        return [
            f"The compiled backward of {name or 'the root'} runs more than twice the FLOPs of its forward: it repeats "
            "part of the forward, and compiled code does not tell which. That part is counted as backward here, not as "
            "recompute, so model FLOPs and MFU are too high by it; hardware FLOPs and HFU are right."
            for name, flops in sorted(backward.items())
            if flops > 2 * forward.get(name, 0)
        ]


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
