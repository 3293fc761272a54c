"""The dispatch mode: runs every operator, then counts it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import is_grad_enabled
from torch.fx import GraphModule, Interpreter, Node

from lightning_flops.measure.counting.attribution import Repetition, Threads, ThreadState
from lightning_flops.measure.counting.compiled import CompiledCode
from lightning_flops.measure.counting.formulas import Entry, Work, hides_flops
from lightning_flops.measure.counting.formulas.contract import tensors_in, whole_flops
from lightning_flops.measure.counting.totals import Cell, Totals
from lightning_flops.measure.counting.traffic import Operator, bytes_of, dtype_name, elements_of, needs_gradient
from lightning_flops.measure.torch_private.fakes import is_fake, is_traced, unwraps_subclass
from lightning_flops.measure.torch_private.needed import (
    NO_GRAPH_TASK,
    DispatchMode,
    conjugates_lazily,
    depth,
    function_in_forward,
    graph_task_id,
    hide,
    is_pushed,
    keys_of_python_kernel,
    pushed,
    run_python_kernel,
)
from lightning_flops.records import OUTSIDE, FlopPhase
from lightning_flops.units import package_logger

logger = package_logger(__name__)

_FORWARDS = ("forward", "recompute")

_CONTROL_FLOW = frozenset(
    (
        "cond while_loop while_loop_stack_output scan map_impl associative_scan strict_mode hints_wrapper "
        "invoke_subgraph wrap"
    ).split()
)

_FLEX_BACKWARD = "flex_attention_backward"
_REPEATS_FORWARD = 7
"""Position of the function with which that one repeats the forward."""


class CountingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator, then adds what it cost where the thread's state says."""

    supports_higher_order_operators = True

    def __init__(self, threads: Threads, totals: Totals, compiled: CompiledCode, *, halve_causal: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._threads = threads
        self._totals = totals
        self._compiled = compiled
        self._halve_causal = halve_causal
        self._failed = totals.failed
        self._operators: dict[int, Operator] = {}
        """By the ids of the functions, which they keep alive: torch hashes an operator by code in Python."""
        self._failing: set[str] = set()
        self.counts_fake = False
        """Whether the user computes with fake tensors. If not, some library uses them to find a shape."""
        self.data_dependent = False
        """Values in tensors have decided sizes: another step of these shapes may cost something else."""
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
            counts = operator.counts
            if operator.higher_order:
                counts = not (operator.listed and operator.short in _CONTROL_FLOW and not is_traced())
                args = self._with_seen_functions(operator.short, args)
                types = types if counts else ()
            for kind in types:
                if unwraps_subclass(kind):
                    return NotImplemented
                if is_fake(kind) and not self.counts_fake:
                    counts = False
            conjugates_lazily()
        except Exception as error:  # nothing has run yet: run the operator as without us
            self._failed("an operator", error)
            return func(*args, **kwargs)
        if counts and operator.looks_inside:
            return self._open(operator, types, args, kwargs)
        out = func(*args, **kwargs)
        if counts:
            self._add(operator, args, kwargs, out)
        return out

    def _operator(self, function: Any) -> Operator:
        return self._operators.get(id(function)) or self._operators.setdefault(id(function), Operator(function))

    def _open(self, operator: Operator, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator that may run others, which are seen, or whose kernel is written in Python."""
        if operator.entry.composite and not any(tensor.is_nested for tensor in tensors_in(args)):
            with pushed(self):
                out = operator.function.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        keys = None
        try:
            # If there are other modes below this one, the operator still has to go to them.
            if not (types or depth()):
                keys = keys_of_python_kernel(operator.function, tensors_in((*args, *kwargs.values())))
        except Exception as error:
            self._failed("an operator", error)
        if keys is None:
            out = operator.function(*args, **kwargs)
        else:
            out = run_python_kernel(operator.function, keys, args, kwargs, None if operator.counted else self)
        self._add(operator, args, kwargs, out, moves=keys is None or operator.counted)
        return out

    # ---- functions that operators are handed. Higher-order operators call them below the mode that sees the operator,
    # so each is handed over in a wrapper that has the mode see what it runs. Control flow runs nothing else; attention
    # with a function on its scores or its mask has a formula for the rest.

    def _with_seen_functions(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments of a higher-order operator, with functions that this mode, whose handler runs, sees at work."""
        if (name not in _CONTROL_FLOW and name not in ("flex_attention", _FLEX_BACKWARD)) or is_traced():
            return args

        def seen(value: Any, again: bool) -> Any:
            if isinstance(value, tuple):  # a block mask, of which one part is its function
                return tuple(seen(item, again) for item in value)
            is_function = callable(value) and not isinstance(value, (torch.Tensor, type))
            return self._seen(value, again) if is_function else value

        backward = name == _FLEX_BACKWARD
        return tuple(seen(value, backward and place == _REPEATS_FORWARD) for place, value in enumerate(args))

    def _seen(self, function: Any, again: bool) -> Callable[..., Any]:
        joint = graph_task_id() != NO_GRAPH_TASK and isinstance(function, GraphModule)
        joint = joint and any(map(_is_forward, function.graph.nodes))

        def run(*args: Any) -> Any:
            with pushed(self):
                if joint:
                    return _Joint(function, self._repeating).run(*args)
                with self._repeating() if again else nullcontext():
                    return function(*args)

        return run

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """Inside, the running part of a backward's graph repeats the forward."""
        state = self._threads.state
        task = state.task()
        repetition = Repetition(None, task, whole=False)
        if task != NO_GRAPH_TASK:
            state.repetitions.append(repetition)
        try:
            yield
        finally:
            if state.repetitions and state.repetitions[-1] is repetition:
                state.repetitions.pop()

    # ---- counting

    def _add(
        self, operator: Operator, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, *, moves: bool = True
    ) -> None:
        """Counts one call, which has run; its bytes too if it *moves* any that no operator inside it did."""
        try:
            state = self._threads.state
            if state.paused:
                return
            module, phase = state.place(operator.counted)
            if operator.sized_by_values is not None and operator.sized_by_values(args):
                # A number may be read for anything: only one that a model reads is taken for a size.
                self.data_dependent |= not operator.reads_number or module != OUTSIDE
            if operator.moves_nothing:
                return
            stood_for = state.functions and state.functions[-1][1] == phase
            with self._totals.lock:
                if operator.counted and not stood_for:
                    cell = self._count(state, module, phase, operator, args, kwargs, out)
                else:
                    cell = self._totals.cell(module, phase, operator.name)
                    if operator.listed and not stood_for:
                        heavy = hides_flops(operator.name, args, kwargs, out)
                        self._totals.list(operator.name, module, elements_of(out), heavy)
                cell.calls += 1
                if moves:
                    written = bytes_of(out)
                    cell.written += written
                    cell.read += operator.bytes_read(args, kwargs, written)
        except Exception as error:  # the operator has run, so the user's step goes on
            self._failed("an operator", error)

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
        """Adds the FLOPs of one call of an operator that has a formula; returns their cell."""
        totals, entry = self._totals, operator.entry
        if phase in _FORWARDS and self._compiled.in_place:
            module = self._compiled.running_region(state, module)
        try:
            work = entry.compute(args, kwargs, out)
            dtype: Any = entry.dtype_of(args, kwargs, out)
            flops, skipped, repeated, skipped_again = split_work(work, self._halve_causal)
        except Exception as error:  # a user's formula may raise anything; its operator is listed in the report
            if operator.name not in self._failing:
                self._failing.add(operator.name)
                words = f"the FLOP formula of {operator.name} failed ({type(error).__name__}: {error})"
                logger.warning("%s: it is listed as uncounted", words)
            totals.list(operator.name, module, elements_of(out), True)
            return totals.cell(module, phase, operator.name)
        if dtype is torch.float32 and self.runs_in_tf32 is not None and self.runs_in_tf32(operator.name):
            on_cuda = any(tensor.is_cuda for tensor in tensors_in(args))
            dtype = "tf32" if on_cuda else dtype
        if entry.estimate:
            totals.estimates[operator.name] = entry.estimate
        self.data_dependent |= isinstance(work, Work) and work.by_values
        name = dtype_name(dtype)
        if phase == "backward" and state.to_repeat.get(flops, 0) > 0:
            state.to_repeat[flops] -= 1
            phase = "recompute"
        cell = totals.cell(module, phase, operator.name, name)
        totals.add(cell, phase, flops, skipped)
        if repeated:  # its bytes stay with the backward, in whose kernel it runs
            again = totals.cell(module, "recompute", operator.name, name)
            totals.add(again, "recompute", repeated, skipped_again)
        if phase in _FORWARDS:
            self._follow(state, cell, flops, args, kwargs)
        return cell

    def count_unseen(self, function: Any, args: tuple[Any, ...]) -> bool:
        """Counts one call of an operator inside compiled code; returns whether it could."""
        state = self._threads.state
        operator = self._operator(function)
        if state.paused or not operator.counted:
            return operator.counted
        with self._totals.lock:
            cell = self._count(state, *state.place(True), operator, args, {}, None)
            cell.calls += 1
        return cell.flops > 0

    def _follow(
        self, state: ThreadState, cell: Cell, flops: int, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Adds whether a backward of a forward's product follows."""
        if is_grad_enabled():
            if not needs_gradient(args) and not (kwargs and needs_gradient(kwargs.values())):
                cell.without_backward += flops
        elif state.stack[-1].without_grad or (function := function_in_forward()) is None:
            cell.without_backward += flops
        else:
            cell.hidden += flops
            self._compiled.watch(function)

    # ---- autograd functions and kernels with a formula of their own (``watch_functions``)

    def enter_function(self, entry: Entry) -> None:
        """A registered autograd function or kernel starts: its formula stands for all that runs inside."""
        state = self._threads.state
        state.functions.append((entry, state.place(True)[1]))

    def leave_function(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, ok: bool) -> None:
        """A registered autograd function or kernel is done."""
        try:
            self._leave_function(entry, args, kwargs, out, ok)
        except Exception as error:
            self._failed("an autograd function", error)

    def _leave_function(self, entry: Entry, args: Any, kwargs: Any, out: Any, ok: bool) -> None:
        state = self._threads.state
        if all(running is not entry for running, _ in state.functions):
            return
        while state.functions.pop()[0] is not entry:
            pass
        if state.paused or not ok or not is_pushed(self):
            return
        module, phase = state.place(True)
        if not state.functions or state.functions[-1][1] != phase:
            with self._totals.lock:
                self._count(state, module, phase, Operator(None, entry), args, kwargs, out).calls += 1


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


def _is_forward(node: Node) -> bool:
    """Whether torch has written on a node that it is of the forward, in a graph that has the backward as well."""
    return node.op == "call_function" and node.meta.get("partitioner_tag") == "is_forward"


class _Joint(Interpreter):
    """Runs a graph that repeats a forward for its backward, and says which is which."""

    def __init__(self, graph: GraphModule, repeating: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(graph)
        self.extra_traceback = False  # an error's words are those that the graph's own code would have
        self._repeating = repeating

    def run_node(self, n: Node) -> Any:
        """One call of the graph's."""
        with self._repeating() if _is_forward(n) else nullcontext():
            return super().run_node(n)

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The graph's result, in a plain list where its own code has one: callers compare the kinds."""
        result = super().output(target, args, kwargs)
        return list(result) if isinstance(result, list) else result
