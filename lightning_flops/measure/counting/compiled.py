"""Code that torch.compile made: whose it is, what it multiplies, and what its backwards repeat.

Inductor's kernels are seen by no dispatcher, or not all of them are: its graphs are counted from their text. Where that
cannot be read, what the dispatcher sees counts, and kernels of templates are listed. Other backends run their graph's
operators one by one: these are counted as they come, and the line that runs says whether it repeats the forward.
"""

from __future__ import annotations

import functools
import linecache
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_flops.measure.counting.attribution import Threads, ThreadState
from lightning_flops.measure.counting.graph_text import lines_that_repeat
from lightning_flops.measure.counting.totals import Totals
from lightning_flops.measure.module_scope import ModuleNames
from lightning_flops.measure.patches import Ends, listen
from lightning_flops.measure.tensor_lives import TensorLives
from lightning_flops.measure.torch_private import optional
from lightning_flops.measure.torch_private.needed import calling_modules, current_node, sequence_number
from lightning_flops.signals import Undo
from lightning_flops.units import package_logger

logger = package_logger(__name__)

_DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\((.*?)^'''", re.MULTILINE | re.DOTALL)
"""A kernel in inductor's generated code: its name, and its source up to the closing quotes."""

_TEMPLATE = re.compile(r"triton_tem_|micro_gemm|cutlass_|flex_attention")
"""What stands in the name or the source of a kernel that multiplies, and in no other."""

ReadGraph = Callable[[str, Any], Callable[[], object]]
"""Takes a graph's text and what it is called with; returns what counts this call. It raises if it cannot read them."""


class CompiledCode:
    """What one counter knows of compiled code."""

    def __init__(self, names: ModuleNames, threads: Threads, totals: Totals, lives: TensorLives | None = None) -> None:
        self._names = names
        self._threads = threads
        self._totals = totals
        self._undo = Undo()
        self._watched: set[Any] = set()
        self._read_graph: ReadGraph | None = None
        self._is_counted_here: Callable[[], bool] | None = None
        self._lives = lives  # what a graph of inductor's allocates no operator shows
        self.modules: frozenset[nn.Module] = frozenset()
        """The model's, if one was compiled in place, by ``module.compile()``: no hook fires inside such a module."""

    def begin(self, read_graph: ReadGraph, is_counted_here: Callable[[], bool]) -> None:
        """Until ``close``, graphs are counted by *read_graph*, where what runs on the calling thread is counted."""
        self._read_graph, self._is_counted_here = read_graph, is_counted_here
        modules = frozenset(self._names.modules()) if optional.was_used() else frozenset()
        self.modules = modules if any(map(optional.is_compiled_in_place, modules)) else frozenset()
        self.watch_graphs()

    def watch_graphs(self) -> None:
        """From now on, counts what inductor has made, if there is anything."""
        kind = optional.class_of_generated_graphs()
        if kind is not None and kind not in self._watched:
            self._watched.add(kind)
            failed = partial(self._totals.failed, "a compiled graph")
            listen(self._undo, kind, "__call__", self._graph_runs, failed=failed)

    def _graph_runs(self, graph: Any, inputs: Any) -> Ends | None:
        """A graph is called; returns what counts the call when it has ended."""
        state = self._threads.state
        counts = self._is_counted_here is not None and self._is_counted_here()
        if self._read_graph is None or state.paused or state.by_graph or not counts:
            return None
        if self._lives is not None:
            self._lives.has_unseen = True
        try:
            count = self._read_graph(str(getattr(graph, "inductor_post_grad_graph_str", "")), inputs)
        except Exception:
            logger.debug("the text of a compiled graph could not be read", exc_info=True)
            for kernel in _templates_in(str(getattr(graph, "source_code", ""))):
                self.list_unseen(f"inductor.{kernel}")
            return None
        state.by_graph = True

        def ends(result: Any, error: BaseException | None) -> None:
            still, state.by_graph = state.by_graph, False
            if still and error is None:
                count()

        return ends

    def list_unseen(self, name: str) -> None:
        """Work of which the dispatcher sees nothing runs: it is listed under the module that is running."""
        state = self._threads.state
        if not state.paused:
            module, phase = state.place(True)
            self._totals.list(name, self.running_region(state, module, phase), True)

    def close(self) -> None:
        """Looks at nothing any more, and leaves what torch made as it was."""
        self._undo.close()
        self._read_graph = self._is_counted_here = None
        self._watched.clear()

    def running_region(self, state: ThreadState, caller: str, phase: str) -> str:
        """Name of the running module, hooks or not, where compiled code of a module called *caller* may run."""
        if not self.modules or phase not in ("forward", "recompute"):
            return caller
        region = next((module for module in calling_modules() if module in self.modules), None)
        name = None if region is None else self._names.name_for(region, caller)
        if name is None or name == caller:
            return caller
        if not torch.is_grad_enabled():  # the region has only one autograd node, and it was made just before
            state.insert(sequence_number() - 1, name)
        return name

    def repeats_forward(self, module: str) -> bool | None:
        """Whether the operator that runs in a compiled backward is one of the forward's again, by the line it is in.

        None: another backward runs.
        """
        if not optional.is_compiled(current_node()):
            return None
        frame = optional.graph_frame()
        lines = [] if frame is None else linecache.getlines(frame.f_code.co_filename, frame.f_globals)
        repeating = lines_that_repeat("".join(lines))
        if frame is not None and repeating is not None:
            return lines[frame.f_lineno - 1].rstrip("\n") in repeating
        self.note_unread(module)
        return False

    def note_unread(self, module: str) -> None:
        """What a compiled backward repeats is not known."""
        self._totals.note(
            f"What the compiled backward of {module or 'the root'} repeats of its forward could not be read apart: it "
            "counts as backward here, not as recompute."
        )


@functools.lru_cache(maxsize=256)
def _templates_in(source: str) -> tuple[str, ...]:
    """Inductor's own kernels for matrix products and attention in a source that it has generated."""
    return tuple(
        match[1] for match in _DEFINITION.finditer(source) if _TEMPLATE.search(match[1]) or _TEMPLATE.search(match[2])
    )
