"""The dispatch mode: runs every operator, then counts it; and counts what no dispatcher shows, where it is notified."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import is_grad_enabled, nn

from lightning_flops.measure.counting.attribution import Threads, ThreadState
from lightning_flops.measure.counting.compiled import (
    Product,
    lines_that_repeat,
    multiplies,
    products,
    repeats_forward,
    templates_in,
)
from lightning_flops.measure.counting.formulas.contract import Entry, Work, tensors_in, whole_flops
from lightning_flops.measure.counting.formulas.registry import backwards, counts_when_run, hides_flops
from lightning_flops.measure.counting.totals import READS_NUMBER, Cell, Operator, Totals, dtype_name, operands
from lightning_flops.measure.memory import TensorLives
from lightning_flops.measure.module_scope import ModuleNames
from lightning_flops.measure.patches import Ends, guarded
from lightning_flops.measure.torch_private.needed import (
    DispatchMode,
    calling_modules,
    conjugates_lazily,
    current_node,
    depth,
    function_in_forward,
    graph_task_id,
    hide,
    is_custom_backward,
    is_fake,
    is_pushed,
    keys_of_python_kernel,
    modes_off,
    node_sequence,
    pushed,
    run_python_kernel,
    sequence_number,
    tree_leaves,
    unwraps_subclass,
)
from lightning_flops.measure.torch_private.optional import is_compiled
from lightning_flops.records import OUTSIDE, FlopPhase
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)

_FORWARDS = ("forward", "recompute")


#: What a call costs: FLOPs of the running phase, those of them that a mask rules out, the same of what it repeats; the
#: dtype.
Cost = tuple[int, int, int, int, str]


class CountingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator, then adds what it cost where the thread's state says."""

    supports_higher_order_operators = True

    def __init__(
        self, names: ModuleNames, threads: Threads, totals: Totals, lives: TensorLives | None, *, halve_causal: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names, self._threads, self._totals = names, threads, totals
        self._lives, self._halve_causal = lives, halve_causal
        self._operator_failed = partial(totals.failed, "an operator")
        #: By the ids of the functions, which they keep alive: torch hashes an operator by code in Python.
        self._operators: dict[int, Operator] = {}
        self._failing: set[str] = set()
        #: Whether the user computes with fake tensors. If not, some library uses them to find a shape.
        self.counts_fake = False
        #: Products in forwards of custom autograd functions, by their operands: a backward may repeat them.
        self.forward_products: set[tuple[Any, ...]] = set()
        #: Values in tensors have decided sizes: another step of these shapes may cost something else.
        self.data_dependent = False
        #: The model's, if one was compiled in place, by ``module.compile()``: no hook fires inside such a module.
        self.in_place: frozenset[nn.Module] = frozenset()
        self.runs_in_tf32: Callable[[str], bool] | None = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch shall wrap our handler to keep the compiler out. Not needed if the handler's code is marked."""
        return not hide(cls.__torch_dispatch__)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: we see the kernels it calls."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        try:
            operator = self._operators.get(id(func)) or self._operator(func)
            counts = operator.counts if self._lives is None else operator.allocates
            for kind in types:
                if unwraps_subclass(kind):
                    return NotImplemented
                if is_fake(kind) and not self.counts_fake:
                    counts = False
            conjugates_lazily()
        except Exception as error:  # nothing has run yet: run the operator as without us
            self._operator_failed(error)
            return func(*args, **kwargs)
        if counts and operator.looks_inside:
            return self._open(operator, types, args, kwargs)
        out = func(*args, **kwargs)
        if counts:  # it has run: if counting it fails, the user's step goes on
            guarded(self._operator_failed, self._add, operator, args, kwargs, out)
        return out

    def is_on(self) -> bool:
        """Whether this thread has entered the counter, or runs something now that is counted."""
        return self._threads.state.entered > 0 or is_pushed(self)

    def _operator(self, function: Any) -> Operator:
        return self._operators.get(id(function)) or self._operators.setdefault(id(function), Operator(function))

    def _open(self, operator: Operator, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator that may run others, which are seen, or whose kernel is written in Python."""
        state, keys = self._threads.state, None
        by_graph, state.by_graph = state.by_graph, state.by_graph and operator.counted
        try:
            if operator.entry.composite and not any(tensor.is_nested for tensor in tensors_in(args)):
                with pushed(self):
                    out = operator.function.decompose(*args, **kwargs)
                if out is not NotImplemented:
                    return out
            # If there are other modes below this one, the operator still has to go to them.
            if not (types or depth()):
                tensors = [*tensors_in((*args, *kwargs.values()))]
                keys = guarded(self._operator_failed, keys_of_python_kernel, operator.function, tensors)
            if keys is None:
                out = operator.function(*args, **kwargs)
            else:
                out = run_python_kernel(operator.function, keys, args, kwargs, None if operator.counted else self)
            moves = keys is None or operator.counted
            guarded(self._operator_failed, self._add, operator, args, kwargs, out, moves)
        finally:
            state.by_graph = by_graph
        return out

    # ---- counting

    def _add(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, moves: bool = True
    ) -> None:
        """Counts one call, which has run; its bytes too if it *moves* any that no operator inside it did."""
        state = self._threads.state
        if state.paused or (state.by_graph and operator.counted):
            return
        module, phase = state.place(operator.counted)
        if self._lives is not None:
            reads = (*args, *kwargs.values()) if operator.counts else ()
            self._lives.ran(operator.name, module, phase, tensors_in(reads), tensors_in((out,)))
        if not operator.counts:
            return
        if operator.sized_by_values is not None and operator.sized_by_values(args):
            # A number may be read for anything: only one that a model reads is taken for a size.
            self.data_dependent |= operator.short != READS_NUMBER or module != OUTSIDE
        if module in self._totals.unread:
            self._totals.read(module, tensors_in((*args, *kwargs.values())), tensors_in((out,)))
        if operator.moves_nothing:
            return
        with self._totals.lock:
            self._totals.made = self._node_made(state, args)
            if operator.entry.kind == "free" or state.stands_for(module, phase):
                cell = self._totals.cell(module, phase, operator.name)
            else:
                cell = self._count(state, module, phase, operator, args, kwargs, out)
            cell.calls += 1
            if moves:
                written = operator.bytes_written(args, out)
                cell.moves(written, operator.bytes_read(args, kwargs, written))

    def _count(
        self,
        state: ThreadState,
        module: str,
        phase: FlopPhase,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        out: Any,
    ) -> Cell:
        """Adds the FLOPs of one call of an operator that is not free, or lists it; returns its cell."""
        if not operator.counted:
            return self._spend(module, phase, operator, None, hides_flops(operator.name, args, kwargs, out))
        module = self._region(state, module, phase)
        try:
            cost = self._cost(operator, args, kwargs, out, any(tensor.is_cuda for tensor in tensors_in(args)))
        except Exception as error:  # a user's formula may raise anything; its operator is listed in the report
            words = words_of(error)
            if operator.name not in self._failing:
                self._failing.add(operator.name)
                logger.warning("the FLOP formula of %s failed (%s): it is listed as uncounted", operator.name, words)
            return self._spend(module, phase, operator, None)
        if phase == "backward" and is_custom_backward():
            again: bool | None = operands(operator.name, args) in self.forward_products
            if is_compiled(current_node()) and (again := repeats_forward()) is None:
                self._note_unread(module)
            phase = "recompute" if again else phase
        if not is_grad_enabled() and phase in _FORWARDS and function_in_forward() is not None:
            self.forward_products.add(operands(operator.name, args))
        return self._spend(module, phase, operator, cost)

    def _node_made(self, state: ThreadState, args: Any) -> int | None:
        """The number of the autograd node that a call with *args* has made, -1 if none; None where it is not asked."""
        if state.stack[-1].owner is not None or not self._totals.divides:
            return None
        makes = is_grad_enabled() and any(one.requires_grad for one in tensors_in(args))
        return sequence_number() - 1 if makes or function_in_forward() is not None else -1

    def _cost(self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, on_cuda: bool) -> Cost:
        """What a call costs by the operator's formula, which may raise anything."""
        work = operator.entry.compute(args, kwargs, out)
        dtype: Any = operator.entry.dtype_of(args, kwargs, out)
        split = split_work(work, self._halve_causal)
        self.data_dependent |= isinstance(work, Work) and work.by_values
        in_tf32 = on_cuda and dtype is torch.float32 and self.runs_in_tf32 is not None
        return *split, dtype_name("tf32" if in_tf32 and self.runs_in_tf32(operator.name) else dtype)  # type: ignore[misc]

    def _spend(
        self, module: str, phase: FlopPhase, operator: Operator, cost: Cost | None, may_have_flops: bool = True
    ) -> Cell:
        """Adds the FLOPs of one call, or lists it if what it costs is not known; returns its cell."""
        totals = self._totals
        totals.unread.pop(module, None)
        if cost is None:
            totals.list(operator.name, module, may_have_flops)
            return totals.cell(module, phase, operator.name)
        flops, skipped, repeated, skipped_again, dtype = cost
        if operator.entry.estimate:
            totals.estimates[operator.name] = operator.entry.estimate
        cell = totals.cell(module, phase, operator.name, dtype)
        totals.add(cell, phase, dtype, flops, skipped)
        if repeated:  # its bytes stay with the backward, in whose kernel it runs
            again = totals.cell(module, "recompute", operator.name, dtype)
            totals.add(again, "recompute", dtype, repeated, skipped_again)
        return cell

    # ---- what no dispatcher shows

    def list_unseen(self, name: str, may_have_flops: bool = True) -> None:
        """Work of which the dispatcher sees nothing runs: it is listed under the module that is running.

        What an operator launches is the operator's, which is counted, or listed itself.
        """
        state = self._threads.state
        if state.paused or state.by_graph or not is_pushed(self):
            return
        module, phase = state.place(True)
        if not state.stands_for(module, phase):
            self._totals.list(name, self._region(state, module, phase), may_have_flops)

    def kernel_launches(self, kernel: Any, *_: Any, warmup: bool = False, **__: Any) -> None:
        """A Triton kernel is launched by Python."""
        if not warmup:
            name = getattr(getattr(kernel, "fn", kernel), "__name__", type(kernel).__name__)
            self.list_unseen(f"triton.{name}", multiplies(kernel))

    def graph_runs(self, graph: Any, inputs: Any) -> Ends | None:
        """A graph of inductor's is called, and counted from its text; returns what is called when it has ended."""
        state, text = self._threads.state, str(getattr(graph, "inductor_post_grad_graph_str", ""))
        if state.paused or state.by_graph or not self.is_on():
            return None
        if self._lives is not None:
            self._lives.has_unseen = True  # what it allocates no operator shows
        try:
            with modes_off(), torch.no_grad():
                calls = [self._graph_call(one) for one in products(text, inputs)]
        except Exception as error:
            logger.debug("the text of a compiled graph could not be read: %s", words_of(error), exc_info=True)
            for kernel in templates_in(str(getattr(graph, "source_code", ""))):
                self.list_unseen(f"inductor.{kernel}")
            return None
        state.by_graph = True

        def ends(result: Any, error: BaseException | None) -> None:
            state.by_graph = False
            if error is None:
                self._count_graph(state, calls, lines_that_repeat(text) is not None)

        return ends

    def _graph_call(self, one: Product) -> tuple[Operator, Cost | None, tuple[int, int], bool]:
        """The operator of a call in a graph, its cost, the bytes it writes and reads, and whether it repeats.

        Raises:
            Exception: whatever a formula raises.
        """
        operator, cost = self._operator(one.function), None
        written = operator.bytes_written(one.args, one.out)
        read = operator.bytes_read(one.args, one.kwargs, written)
        try:
            if operator.counted and not counts_when_run(one.kwargs):
                cost = self._cost(operator, one.args, one.kwargs, one.out, one.on_cuda)
        except Exception:
            if operator.keywords is not None:
                raise  # it is none of higher order: the dispatcher sees it run, with all values
        return operator, cost, (written, read), one.repeats

    def _count_graph(
        self, state: ThreadState, calls: list[tuple[Operator, Cost | None, tuple[int, int], bool]], is_split: bool
    ) -> None:
        module, phase = state.place(True)
        if state.stands_for(module, phase):
            return
        module = self._region(state, module, phase)
        if phase == "backward" and calls and not is_split and (current_node() is None or is_compiled(current_node())):
            self._note_unread(module)
        with self._totals.lock:
            self._totals.made = self._node_made(state, ())
            self._totals.unread.pop(module, None)
            for operator, cost, moved, repeats in calls:
                its: FlopPhase = "recompute" if repeats and phase == "backward" else phase
                cell = self._spend(module, its, operator, cost)
                cell.calls += 1
                cell.moves(*moved)

    def _region(self, state: ThreadState, caller: str, phase: str) -> str:
        """Name of the running module, hooks or not, where compiled code of a module called *caller* may run."""
        if not self.in_place or phase not in _FORWARDS:
            return caller
        region = next((module for module in calling_modules() if module in self.in_place), None)
        name = None if region is None else self._names.name_for(region, caller)
        if name is None or name == caller:
            return caller
        if not is_grad_enabled():  # the region has only one autograd node, and it was made just before
            state.nodes.insert(sequence_number() - 1, name)
        return name

    def _note_unread(self, module: str) -> None:
        self._totals.note(
            f"What the compiled backward of {module or 'the root'} repeats of its forward could not be read apart: it "
            "counts as backward here, not as recompute."
        )

    # ---- what has a formula of its own

    def function_runs(self, entry: Entry) -> Callable[..., None]:
        """A registered autograd function or kernel runs: its formula stands for all that runs there.

        Returns what is called when it has ended, with its arguments, its keyword arguments and its result if it has
        returned.
        """
        state = self._threads.state
        depth, start = len(state.functions), sequence_number()
        state.functions.append(state.place(True)[1])

        def ends(*call: Any) -> None:
            stopped = len(state.functions) <= depth  # counting has ended meanwhile
            del state.functions[depth:]
            if not (stopped or state.paused):
                failed = partial(self._totals.failed, "an autograd function")
                guarded(failed, self._function_ran, state, entry, start, *call)

        return ends

    def _function_ran(self, state: ThreadState, entry: Entry, start: int, *call: Any) -> None:
        module, phase = state.place(bool(call))
        if not call:
            if entry.name in backwards and current_node() is not None:
                # A checkpoint ends a repeated forward where it has all it needs: what that cost is not known.
                self._totals.list(entry.name, module, True)
        elif is_pushed(self) and not state.stands_for(module, phase):
            *call_of, owner = call
            with self._totals.lock:
                self._totals.made = self._node_made(state, call_of[:2])
                self._count(state, module, phase, Operator(None, entry), *call_of).calls += 1
            if owner is not None and entry.name not in self._failing:
                self._watch_backward(state, entry, start, module, owner, *call_of)

    def _watch_backward(
        self, state: ThreadState, entry: Entry, start: int, module: str, owner: nn.Module, *call: Any
    ) -> None:
        """Has the backward of a forward counted that has a formula, where it comes to what the forward returned."""
        args, kwargs, out = call
        made = {one.grad_fn for one in tensors_in(tree_leaves(out)) if one.grad_fn is not None}
        made = {node for node in made if start <= node_sequence(node) < sequence_number()}
        if not made:
            return
        compute, times = backwards[entry.name], 1
        if compute is None:
            compute = entry.compute
            given = any(one.requires_grad for one in tensors_in(tree_leaves((args, kwargs))))
            times = given + any(one.requires_grad for one in owner.parameters())
        # What it costs is known now: nothing of the call is kept until its backward.
        flops = times * whole_flops(getattr(work := compute(args, kwargs, out), "flops", work))
        operator = Operator(None, Entry(f"{entry.name}.backward", "formula"))
        cost = (flops, 0, 0, 0, dtype_name(entry.dtype_of(args, kwargs, out)))
        tasks = set[int]()

        def begins(*_: Any) -> None:
            now = self._threads.state
            if is_pushed(self) and not now.paused and graph_task_id() not in tasks:
                tasks.add(graph_task_id())
                its, phase = now.place(True)
                with self._totals.lock:
                    self._spend(str(its), phase, operator, cost).calls += 1

        for node in made:
            node.register_prehook(partial(guarded, partial(self._totals.failed, "the backward of a module"), begins))
        state.stand_for(start, module)


def split_work(work: int | Work, halve_causal: bool) -> tuple[int, int, int, int]:
    """FLOPs of the running phase and those of them that a mask rules out; the same of what the call repeats.

    Raises:
        ValueError: the FLOPs are no whole number, or negative.
    """
    if not isinstance(work, Work):
        return work if type(work) is int and work >= 0 else whole_flops(work), 0, 0, 0
    flops, repeated, skipped = whole_flops(work.flops), work.recompute, work.skipped
    # A mask skips the same share of every product over the score matrix.
    own = skipped * flops // (flops + repeated) if skipped else 0
    again = skipped - own
    if halve_causal and work.causal:
        # Only the count is halved; what runs stays the same. So the skipped share is smaller, or even negative.
        own -= flops - flops // 2
        again -= repeated - repeated // 2
        flops //= 2
        repeated //= 2
    return flops, own, repeated, again
