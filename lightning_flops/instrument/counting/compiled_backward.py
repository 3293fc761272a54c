"""What a compiled backward repeats of its forward, as activation checkpointing asks for.

A compiled region runs one graph backward, in which nothing is marked at run time. But the compiler keeps the graph, and
every gradient depends on the incoming gradients: a product that does not is one of the forward's, computed again. Its
size follows from the shapes with which the graph is called; so that these are seen, what calls it is replaced while
counting is on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from lightning_flops.instrument.border import listening
from lightning_flops.instrument.counting.formulas import Work, lookup
from lightning_flops.instrument.counting.thread_state import Cell, CountedCell, Table, ThreadState
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.torch_private import compiler
from lightning_flops.instrument.torch_private.dispatch import modes_off
from lightning_flops.instrument.torch_private.operators import HigherOrderOperator, OpOverload
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

_INCOMING_GRADIENT = "tangents"
"""Start of the names of a backward graph's inputs that are gradients."""

Products = Counter[tuple[str, int]]
"""How often a graph runs a product, by operator and FLOPs."""


class CallTable(Table):
    """A table in which every call of an operator with a formula has a cell of its own."""

    __slots__ = ()

    def counted_cell(self, operator: Any, dtype: Any) -> CountedCell:
        """A new cell."""
        cell = self[operator, dtype, len(self)] = CountedCell(dtype)
        return cell


class CompiledBackwards:
    """Books what compiled backwards repeat as recompute, for one counter.

    Args:
        state: answers with the books of the thread it is asked on.
        table: answers with the table in which the running autograd node's costs are booked, if there is one.
        post: adds what a thread wrote down to its tables.
        flops_of: FLOPs that are counted for what a formula answers.
        note: takes a sentence for the report.
        failed: is told where this itself failed.
    """

    def __init__(
        self,
        *,
        state: Callable[[], ThreadState],
        table: Callable[[ThreadState], Table | None],
        post: Callable[[ThreadState], None],
        flops_of: Callable[[int | Work], int],
        note: Callable[[str], None],
        failed: Callable[[str, Exception], None],
    ) -> None:
        self._state = state
        self._table = table
        self._post = post
        self._flops_of = flops_of
        self._note = note
        self._failed = failed
        self._patches = Patches()
        self._watched: set[Any] = set()
        self._repeats: dict[Any, Products | None] = {}

    def watch(self, function: Any) -> None:
        """Looks at the backwards of *function* from now on, if it is a compiled region's ``autograd.Function``."""
        if function in self._watched:
            return
        self._watched.add(function)
        if not compiler.is_compiled(function) or not compiler.shows_its_backward(function):
            return

        def begins(context: Any, inputs: list[Any]) -> Callable[[], None]:
            return self._begins(function, inputs)

        failed = partial(self._failed, "the beginning of a compiled backward")
        self._patches.replace(
            function, compiler.BACKWARD_ENTRY, lambda original: listening(original, before=begins, failed=failed)
        )

    def close(self) -> None:
        """Looks at nothing any more, and leaves what torch made as it was."""
        self._patches.undo()
        self._watched.clear()
        self._repeats.clear()

    def _begins(self, function: Any, inputs: list[Any]) -> Callable[[], None]:
        """A compiled backward starts with these inputs; returns what to call when it has ended."""
        try:
            products = self._products(function, inputs)
            if not products and products is not None:
                return _nothing  # the usual case: it repeats nothing
            state = self._state()
            table = self._table(state)
            if table is None:
                return _nothing
            calls = CallTable(table.module, "backward")
            state.segment_table = calls
            state.claimed = True
            state.replan()
        except Exception as error:
            self._failed("the beginning of a compiled backward", error)
            return _nothing

        def ends() -> None:
            try:
                self._end(state, calls, table, products)
            except Exception as error:
                self._failed("the end of a compiled backward", error)

        return ends

    def _end(self, state: ThreadState, calls: CallTable, table: Table, products: Products | None) -> None:
        """Books what ran in a compiled backward, which ends."""
        # The books of this node's neighbours are looked up anew.
        state.segment_start = state.segment_end = 0
        state.claimed = False
        state.replan()
        self._post(state)
        if not self._book(calls, table, state.table_of(table.module, "recompute"), products):
            self._note(
                f"What the compiled backward of {table.module or 'the root'} repeats of its forward could not be told "
                "apart, not all of it at least: it counts as backward here, not as recompute."
            )

    def _products(self, function: Any, inputs: list[Any]) -> Products | None:
        """What this backward repeats when it is called with *inputs*; None where that cannot be told."""
        key = (function, tuple(_described(value) for value in inputs))
        if key not in self._repeats:
            try:
                products: Products | None = repeated_products(compiler.backward_graph(function), inputs, self._flops_of)
            except Exception:
                # Any operator of the user's may be in it, and raise on tensors without values; what then cannot be
                # told is noted where the backward ends.
                logger.debug("the graph of a compiled backward could not be read", exc_info=True)
                products = None
            self._repeats[key] = products
        return self._repeats[key]

    @staticmethod
    def _book(calls: CallTable, backward: Table, recompute: Table, products: Products | None) -> bool:
        """Adds *calls* to the two tables; whether all that was to be repeated was among them, if anything was."""
        missing = Counter(products or {})
        again: set[Any] = set()
        counted = [(key, cell) for key, cell in calls.items() if isinstance(cell, CountedCell)]
        for key, cell in counted:
            if missing[key[0].name, cell.flops] > 0:
                missing[key[0].name, cell.flops] -= 1
                again.add(key)
        # A compiler may run a product by another operator: addmm as mm, and the bias with what follows.
        sizes: Counter[int] = Counter()
        for (_, flops), count in missing.items():
            sizes[flops] += count
        for key, cell in counted:
            if key not in again and sizes[cell.flops] > 0:
                sizes[cell.flops] -= 1
                again.add(key)
        for key, cell in counted:
            operator, dtype, _ = key
            to = (recompute if key in again else backward).counted_cell(operator, dtype)
            _add(cell, to)
            to.flops += cell.flops
            to.skipped += cell.skipped
            to.repeated += cell.repeated
            to.repeated_skipped += cell.repeated_skipped
        for key, other in calls.items():
            if not isinstance(other, CountedCell):
                _add(other, backward.cell(key))
        return not counted or (products is not None and not any(sizes.values()))


def _nothing() -> None:
    """Ends a backward that nothing was begun for."""


def _add(cell: Cell, to: Cell) -> None:
    """Adds one cell's calls and bytes to another's."""
    to.calls += cell.calls
    to.read += cell.read
    to.written += cell.written


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.dtype, tuple(value.shape), value.device
    return value if isinstance(value, (int, float, bool)) else type(value)


def repeated_products(graph: torch.fx.Graph, inputs: Iterable[Any], flops_of: Callable[[int | Work], int]) -> Products:
    """The products of a backward graph that do not depend on the incoming gradients.

    Args:
        graph: its inputs that are gradients have names that say so.
        inputs: what it is called with; only the shapes matter, nothing is computed.
        flops_of: FLOPs that are counted for what a formula answers.

    Raises:
        LookupError: the graph names no incoming gradient.
        Exception: whatever one of its operators raises on tensors without values.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    gradients = [node for node in placeholders if node.name.startswith(_INCOMING_GRADIENT)]
    if not gradients:
        raise LookupError("the graph names none of its inputs as an incoming gradient")
    dependent = set(gradients)
    independent = []
    for node in graph.nodes:
        if node.op == "call_function":
            if any(source in dependent for source in node.all_input_nodes):
                dependent.add(node)
            elif _is_product(node.target):
                independent.append(node)
    if not independent:
        return Counter()
    needed = set(independent)
    pending = list(independent)
    while pending:
        for source in pending.pop().all_input_nodes:
            if source not in needed:
                needed.add(source)
                pending.append(source)
    return _sizes(graph, dict(zip(placeholders, inputs, strict=True)), needed, set(independent), flops_of)


def _is_product(target: Any) -> bool:
    if not isinstance(target, (OpOverload, HigherOrderOperator)):
        return False
    return lookup(target).kind == "formula"


def _sizes(
    graph: torch.fx.Graph,
    inputs: dict[torch.fx.Node, Any],
    needed: set[torch.fx.Node],
    products: set[torch.fx.Node],
    flops_of: Callable[[int | Work], int],
) -> Products:
    """FLOPs of the nodes *products*, whose sources are *needed*, from fake tensors of the inputs' shapes."""
    from lightning_flops.instrument.torch_private.fakes import FakeTensorMode  # loads more of torch than most runs need

    sizes: Products = Counter()
    values: dict[torch.fx.Node, Any] = {}
    with modes_off(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for node in graph.nodes:
            if node not in needed:
                continue
            if node.op == "placeholder":
                value = inputs[node]
                values[node] = mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            elif node.op == "get_attr":
                values[node] = _attribute(graph.owning_module, node.target)
            else:
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = out = node.target(*args, **kwargs)
                if node in products:
                    entry = lookup(node.target)
                    sizes[entry.name, flops_of(entry.compute(args, kwargs, out))] += 1
    return Counter({key: count for key, count in sizes.items() if key[1]})


def _attribute(owner: Any, path: Any) -> Any:
    for name in str(path).split("."):
        owner = getattr(owner, name)
    return owner
