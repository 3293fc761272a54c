"""Code that torch.compile made: whose it is, what its backwards repeat, and which of its kernels cannot be seen.

A compiled region runs one graph backward, in which nothing is marked at run time. But the compiler keeps the graph, and
every gradient depends on the incoming gradients: a product that does not is one of the forward's, computed again, as
activation checkpointing asks for. Its size follows from the shapes with which the graph is called.
"""

from __future__ import annotations

import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from lightning_flops.instrument.counting.attribution import Threads, ThreadState
from lightning_flops.instrument.counting.compiled_flex import flex_calls
from lightning_flops.instrument.counting.formulas import Unreadable, lookup
from lightning_flops.instrument.counting.totals import Totals
from lightning_flops.instrument.module_scope import ModuleNames
from lightning_flops.instrument.patches import listening, replace
from lightning_flops.instrument.torch_private import compiler
from lightning_flops.instrument.torch_private.autograd import calling_modules, sequence_number
from lightning_flops.instrument.torch_private.dispatch import modes_off, new_fake_mode
from lightning_flops.instrument.torch_private.operators import HigherOrderOperator, OpOverload
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

_INCOMING_GRADIENT = "tangents"
"""Start of the names of a backward graph's inputs that are gradients."""

_DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\((.*?)^'''", re.MULTILINE | re.DOTALL)
"""A kernel in inductor's generated code: its name, and its source up to the closing quotes."""

_TEMPLATE = re.compile(r"triton_tem_|micro_gemm|cutlass_|flex_attention")
"""What stands in the name or the source of a kernel that multiplies, and in no other."""

FlopsOf = Callable[[Any], int]
CountUnseen = Callable[[Any, tuple[Any, ...]], bool]


def watch(
    undo: ExitStack,
    target: Any,
    name: str,
    failed: Callable[[Exception], None],
    *,
    before: Callable[..., Callable[[], None] | None] | None = None,
    after: Callable[..., None] | None = None,
) -> None:
    """Has us called before or after a function of torch's, which is compiled as without us."""
    replace(
        undo,
        target,
        name,
        lambda original: compiler.hide_around(
            listening(original, before=before, after=after, failed=failed), before, after
        ),
    )


class CompiledCode:
    """What one counter knows of compiled code; *flops_of* gives the FLOPs that are counted for a formula's answer."""

    def __init__(self, names: ModuleNames, threads: Threads, totals: Totals, flops_of: FlopsOf) -> None:
        self._names = names
        self._threads = threads
        self._totals = totals
        self._flops_of = flops_of
        self._undo = ExitStack()
        self._watched: set[Any] = set()
        self._repeated: dict[Any, Counter[int] | None] = {}
        self._modules: frozenset[nn.Module] = frozenset()
        self._count_unseen: CountUnseen | None = None
        self.in_place = False
        """Whether any module was compiled in place, by ``module.compile()``: no hook fires inside such a module."""

    def begin(self, count_unseen: CountUnseen) -> None:
        """Looks for modules compiled in place; a model may be compiled at any time.

        Until ``close``, *count_unseen* counts a call of an operator that no dispatcher sees, and says whether it did.
        """
        self._count_unseen = count_unseen
        modules = frozenset(self._names.modules()) if compiler.was_used() else frozenset()
        self.in_place = any(map(compiler.is_compiled_in_place, modules))
        self._modules = modules if self.in_place else frozenset()
        self.watch_graphs()

    def watch_graphs(self) -> None:
        """From now on, counts or lists the kernels of inductor's own that multiply: no dispatcher sees them run."""
        kind = compiler.class_of_generated_graphs()
        if kind is not None and kind not in self._watched:
            self._watched.add(kind)
            watch(
                self._undo,
                kind,
                "__call__",
                partial(self._totals.failed, "a compiled kernel"),
                before=self._graph_runs,
            )

    def _graph_runs(self, graph: Any, inputs: Any) -> None:
        counted = False
        try:
            for called, args in flex_calls(str(getattr(graph, "inductor_post_grad_graph_str", "")), inputs):
                counted = self._count_unseen is not None and self._count_unseen(called, args)
        except Unreadable:
            logger.debug("flex attention in a compiled graph could not be read", exc_info=True)
        for kernel in _templates_in(str(getattr(graph, "source_code", ""))):
            if not (counted and "flex_attention" in kernel):
                self.list_unseen(f"inductor.{kernel}")

    def list_unseen(self, name: str) -> None:
        """Work of which the dispatcher sees nothing runs: it is listed under the module that is running."""
        state = self._threads.here()
        if not state.paused:
            module, phase = state.place(True)
            if phase == "forward" and self.in_place:
                module = self.running_region(state, module)
            self._totals.list(name, module, 0, True)

    def close(self) -> None:
        """Looks at nothing any more, and leaves what torch made as it was."""
        self._undo.close()
        self._count_unseen = None
        self._watched.clear()
        self._repeated.clear()

    def running_region(self, state: ThreadState, caller: str) -> str:
        """Name of the running module, hooks or not, where compiled code of a module called *caller* may run."""
        region = next((module for module in calling_modules() if module in self._modules), None)
        name = None if region is None else self._names.name_for(region, caller)
        if name is None or name == caller:
            return caller
        if not torch.is_grad_enabled():  # the region has only one autograd node, and it was made just before
            state.insert(sequence_number() - 1, name)
        return name

    def watch(self, function: Any) -> None:
        """Looks at the backwards of *function* from now on, if it is a compiled region's ``autograd.Function``."""
        if function in self._watched:
            return
        self._watched.add(function)
        if compiler.is_compiled(function):
            failed = partial(self._totals.failed, "the beginning of a compiled backward")
            compiler.hide(self._begins)
            watch(self._undo, function, compiler.BACKWARD_ENTRY, failed, before=partial(self._begins, function))

    def _begins(self, function: Any, context: Any, inputs: list[Any]) -> Callable[[], None]:
        """A compiled backward starts with these inputs; returns what to call when it has ended."""
        key = (function, tuple(map(_described, inputs)))
        if key not in self._repeated:
            try:
                self._repeated[key] = repeated_products(compiler.backward_graph(function), inputs, self._flops_of)
            except Exception:
                # Any operator of the user's may be in it, and raise on tensors without values.
                logger.debug("the graph of a compiled backward could not be read", exc_info=True)
                self._repeated[key] = None
        products = self._repeated[key]
        state = self._threads.here()
        outer, state.to_repeat = state.to_repeat, Counter(products or {})
        before = self._totals.flops["backward"]

        def ends() -> None:
            missing, state.to_repeat = state.to_repeat, outer
            unread = products is None and self._totals.flops["backward"] > before
            if unread or any(count > 0 for count in missing.values()):
                module = state.place(True)[0]
                self._totals.note(
                    f"What the compiled backward of {module or 'the root'} repeats of its forward could not be read "
                    "apart, not all of it at least: it counts as backward here, not as recompute."
                )

        return ends


@functools.lru_cache(maxsize=256)
def _templates_in(source: str) -> tuple[str, ...]:
    """Inductor's own kernels for matrix products and attention in a source that it has generated."""
    return tuple(
        match[1] for match in _DEFINITION.finditer(source) if _TEMPLATE.search(match[1]) or _TEMPLATE.search(match[2])
    )


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.device
    return value if isinstance(value, (int, float, bool)) else type(value)


def repeated_products(graph: torch.fx.Graph, inputs: Iterable[Any], flops_of: FlopsOf) -> Counter[int]:
    """How often a backward graph runs a product of so many FLOPs that does not depend on the incoming gradients.

    Of what it is called with only the shapes matter: nothing is computed.

    Raises:
        LookupError: the graph names no incoming gradient.
        Exception: whatever one of its operators raises on tensors without values.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    dependent = {node for node in placeholders if node.name.startswith(_INCOMING_GRADIENT)}
    if not dependent:
        raise LookupError("the graph names none of its inputs as an incoming gradient")
    products = set()
    for node in graph.nodes:
        if node.op == "call_function":
            if not dependent.isdisjoint(node.all_input_nodes):
                dependent.add(node)
            elif isinstance(node.target, (OpOverload, HigherOrderOperator)) and lookup(node.target).kind == "formula":
                products.add(node)
    needed = set(products)
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    given = dict(zip(placeholders, inputs, strict=True))
    return _sizes(graph, given, needed, products, flops_of) if products else Counter()


def _sizes(
    graph: torch.fx.Graph, inputs: dict[Any, Any], needed: set[Any], products: set[Any], flops_of: FlopsOf
) -> Counter[int]:
    """FLOPs of the nodes *products*, whose sources are *needed*, from fake tensors of the inputs' shapes."""
    sizes: Counter[int] = Counter()
    values: dict[Any, Any] = {}
    with modes_off(), torch.no_grad(), new_fake_mode() as mode:
        for node in graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                value = inputs[node]
                values[node] = mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            elif node.op == "get_attr":
                values[node] = operator.attrgetter(str(node.target))(graph.owning_module)
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = out = node.target(*args, **kwargs)
                if node in products:
                    sizes[flops_of(lookup(node.target).compute(args, kwargs, out))] += 1
    del sizes[0]
    return sizes
