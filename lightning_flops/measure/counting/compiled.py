"""Code that torch.compile made: whose it is, what its backwards repeat, and which of its kernels cannot be seen.

A compiled region runs one graph backward, in which nothing is marked at run time. But the compiler keeps the graph, and
every gradient depends on the incoming gradients: a product that does not is one of the forward's, computed again, as
activation checkpointing asks for. Its size follows from the shapes with which the graph is called.
"""

from __future__ import annotations

import ast
import functools
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_flops.measure.counting.attribution import Threads, ThreadState
from lightning_flops.measure.counting.formulas.contract import Unreadable
from lightning_flops.measure.counting.formulas.registry import lookup
from lightning_flops.measure.counting.totals import Totals
from lightning_flops.measure.module_scope import ModuleNames
from lightning_flops.measure.patches import Ends, listen
from lightning_flops.measure.tensor_lives import TensorLives
from lightning_flops.measure.torch_private import optional
from lightning_flops.measure.torch_private.needed import (
    HigherOrderOperator,
    OpOverload,
    calling_modules,
    hide,
    modes_off,
    new_fake_mode,
    sequence_number,
)
from lightning_flops.signals import Undo
from lightning_flops.units import package_logger

logger = package_logger(__name__)

_INCOMING_GRADIENT = "tangents"
"""Start of the names of a backward graph's inputs that are gradients."""

_DEFINITION = re.compile(r"^(\w+) = async_compile\.\w+\((.*?)^'''", re.MULTILINE | re.DOTALL)
"""A kernel in inductor's generated code: its name, and its source up to the closing quotes."""

_TEMPLATE = re.compile(r"triton_tem_|micro_gemm|cutlass_|flex_attention")
"""What stands in the name or the source of a kernel that multiplies, and in no other."""

FlopsOf = Callable[[Any], int]
CountUnseen = Callable[[Any, tuple[Any, ...]], bool]


class CompiledCode:
    """What one counter knows of compiled code; *flops_of* gives the FLOPs that are counted for a formula's answer."""

    def __init__(self, names: ModuleNames, threads: Threads, totals: Totals, flops_of: FlopsOf) -> None:
        self._names = names
        self._threads = threads
        self._totals = totals
        self._flops_of = flops_of
        self._undo = Undo()
        self._watched: set[Any] = set()
        self._repeated: dict[Any, Counter[int] | None] = {}
        self._count_unseen: CountUnseen | None = None
        self._is_counted_here: Callable[[], bool] | None = None
        self.lives: TensorLives | None = None  # what a graph of inductor's allocates no operator shows
        self.modules: frozenset[nn.Module] = frozenset()
        """The model's, if one was compiled in place, by ``module.compile()``: no hook fires inside such a module."""

    def begin(self, count_unseen: CountUnseen, is_counted_here: Callable[[], bool]) -> None:
        """Until ``close``, *count_unseen* counts a call of an operator that no dispatcher sees; True if it did.

        *is_counted_here* says whether what runs on the calling thread is counted.
        """
        self._count_unseen, self._is_counted_here = count_unseen, is_counted_here
        modules = frozenset(self._names.modules()) if optional.was_used() else frozenset()
        self.modules = modules if any(map(optional.is_compiled_in_place, modules)) else frozenset()
        self.watch_graphs()

    def watch_graphs(self) -> None:
        """From now on, counts or lists the kernels of inductor's own that multiply: no dispatcher sees them run."""
        kind = optional.class_of_generated_graphs()
        if kind is not None and kind not in self._watched:
            self._watched.add(kind)
            failed = partial(self._totals.failed, "a compiled kernel")
            listen(self._undo, kind, "__call__", self._graph_runs, failed=failed)

    def _graph_runs(self, graph: Any, inputs: Any) -> None:
        counted = False
        if self._is_counted_here is None or not self._is_counted_here():
            return
        if self.lives is not None:
            self.lives.has_unseen = True
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
        state = self._threads.state
        if not state.paused:
            module, phase = state.place(True)
            if phase == "forward" and self.modules:
                module = self.running_region(state, module)
            self._totals.list(name, module, True)

    def close(self) -> None:
        """Looks at nothing any more, and leaves what torch made as it was."""
        self._undo.close()
        self._count_unseen = self._is_counted_here = None
        self._watched.clear()
        self._repeated.clear()

    def running_region(self, state: ThreadState, caller: str) -> str:
        """Name of the running module, hooks or not, where compiled code of a module called *caller* may run."""
        region = next((module for module in calling_modules() if module in self.modules), None)
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
        if optional.is_compiled(function):
            failed = partial(self._totals.failed, "the beginning of a compiled backward")
            hide(self._begins)
            listen(self._undo, function, optional.BACKWARD_ENTRY, partial(self._begins, function), failed=failed)

    def _begins(self, function: Any, context: Any, inputs: list[Any]) -> Ends:
        """A compiled backward starts with these inputs; returns what to call when it has ended."""
        key = (function, *(one if isinstance(one, int) else getattr(one, "shape", None) for one in inputs))
        if key not in self._repeated:
            try:
                self._repeated[key] = repeated_products(optional.backward_graph(function), inputs, self._flops_of)
            except Exception:
                # Any operator of the user's may be in it, and raise on tensors without values.
                logger.debug("the graph of a compiled backward could not be read", exc_info=True)
                self._repeated[key] = None
        products = self._repeated[key]
        state = self._threads.state
        outer, state.to_repeat = state.to_repeat, Counter(products or {})
        before = self._totals.flops["backward"]

        def ends(result: Any, error: BaseException | None) -> None:
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


# ---- flex attention, whose kernels call no operator: inductor keeps the graph they were made from, as text

_ANNOTATED = re.compile(r'(\w+): "(\w+)(?:\[([^\]]*)\]|\((\w+)\))')
"""A tensor with its dtype and shape, or a number: ``arg0_1: "f32[1, 2, 256, 16][…]cpu"``, ``arg1_1: "Sym(s0)"``."""

_CALL = re.compile(r"= torch\.ops\.higher_order\.(flex_attention(?:_backward)?)(\(.*\));  ")

_DTYPES = {"f64": torch.float64, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


class _Graph(NamedTuple):
    """What the text of a graph says."""

    inputs: list[str]
    tensors: dict[str, tuple[str, str]]  #: Dtype and sizes of each tensor, as written.
    symbols: dict[str, str]  #: Names of the inputs that are sizes, by the symbols that stand for them.
    calls: list[tuple[str, ast.Call]]


@functools.lru_cache(maxsize=64)
def _read(text: str) -> _Graph:
    own = text.partition("\n    class ")[0]  # the functions on scores and masks follow
    signature = next((line for line in own.splitlines() if "def forward(" in line), "")
    inputs = _ANNOTATED.findall(signature)
    calls = [(name, ast.parse(f"call{written}", mode="eval").body) for name, written in _CALL.findall(own)]
    return _Graph(
        [name for name, *_ in inputs],
        {name: (dtype, sizes) for name, dtype, sizes, symbol in _ANNOTATED.findall(own) if not symbol},
        {symbol: name for name, _, _, symbol in inputs if symbol},
        [(name, call) for name, call in calls if isinstance(call, ast.Call)],
    )


def flex_calls(text: str, inputs: Sequence[Any]) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """The calls of flex attention in a graph that is called with *inputs*: the operator, and its arguments.

    The values of a block mask are read from *inputs*; most other tensors hold none.

    Raises:
        Unreadable: a shape is not a number, nor one of the graph's inputs.
    """
    if "higher_order.flex_attention" not in text:
        return
    graph = _read(text)
    given = dict(zip(graph.inputs, inputs, strict=False))
    for name, call in graph.calls:
        yield getattr(torch.ops.higher_order, name), tuple(_value(one, graph, given) for one in call.args)


def _value(written: ast.expr, graph: _Graph, given: Mapping[str, Any]) -> Any:
    if isinstance(written, ast.Tuple):
        return tuple(_value(one, graph, given) for one in written.elts)
    if isinstance(written, ast.Constant):
        return written.value
    name = written.id if isinstance(written, ast.Name) else ""
    if name in given or name not in graph.tensors:
        return given.get(name)
    dtype, shape = graph.tensors[name]
    wanted = [given.get(graph.symbols[one], one) if one in graph.symbols else one for one in shape.split(", ")]
    if not all(str(one).isdigit() for one in wanted):
        raise Unreadable("it has sizes that the graph computes")
    return torch.empty([int(one) for one in wanted], dtype=_DTYPES.get(dtype, torch.int32), device="meta")
