"""The dispatch mode: runs every operator, then books what it spent.

This is the hot path: a thousand small operators a millisecond go through it. So it looks up what it worked out before,
and makes few calls.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.nn.parameter import Parameter

from lightning_flops.instrument.border import border
from lightning_flops.instrument.counting.backward_scope import BackwardScope
from lightning_flops.instrument.counting.compiled_regions import CompiledRegions
from lightning_flops.instrument.counting.formulas import Entry, Work, hides_flops
from lightning_flops.instrument.counting.formulas.contract import (
    ARITHMETIC,
    dtype_of_first_tensor,
    no_flops,
    whole_flops,
)
from lightning_flops.instrument.counting.higher_order import runs_only_functions, with_seen_functions
from lightning_flops.instrument.counting.opaque_bodies import BodyWatch, keys_of_python_kernel
from lightning_flops.instrument.counting.operator_facts import (
    NO_TENSORS,
    QUIET,
    Operator,
    Way,
    bytes_of,
    current_operators,
    elements_of,
    needs_gradient,
    operator_of,
)
from lightning_flops.instrument.counting.thread_state import Books, Cell, CountedCell, Repetition, Table, ThreadState
from lightning_flops.instrument.torch_private.autograd import (
    ACCUMULATES_GRADIENT,
    NO_GRAPH_TASK,
    current_node,
    function_in_forward,
    graph_task_id,
    sequence_number,
)
from lightning_flops.instrument.torch_private.compiler import hide
from lightning_flops.instrument.torch_private.dispatch import (
    DispatchMode,
    depth,
    hands_over,
    is_fake,
    is_pushed,
    pushed,
)
from lightning_flops.instrument.torch_private.kernels import run_python_kernel
from lightning_flops.instrument.torch_private.operators import call_of
from lightning_flops.records import OUTSIDE
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

_LONG_JOURNAL = 1 << 14
"""A journal with more entries than this is posted."""


class CountingMode(DispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator, then books what it spent where the thread's state says.

    Args:
        local: holds each thread's books as ``local.state``.
        new_state: makes the books on a thread that has none.
        backward: attributes what runs inside a backward.
        compiled: the model's compiled modules.
        module_name: returns the name of a module, given the name of its caller; None if it is not one of the root's.
        halve_causal: count half of the score matrix where attention has the causal flag.
        failed: is told where the counter itself failed.
    """

    supports_higher_order_operators = True

    _at_once = False
    """Whether products are booked at once, and not written to a journal first."""

    def __init__(
        self,
        *,
        local: threading.local,
        new_state: Callable[[], ThreadState],
        backward: BackwardScope,
        compiled: CompiledRegions,
        module_name: Callable[[torch.nn.Module, str], str | None],
        halve_causal: bool,
        failed: Callable[[str, Exception], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._local = local
        self._new_state = new_state
        self._backward = backward
        self._table = backward.table
        self._compiled = compiled
        self._module_name = module_name
        self._halve_causal = halve_causal
        self._failed = failed
        self._operators: dict[Any, Operator] = current_operators()
        self._functions: dict[int, Operator] = {}
        self._failing: set[str] = set()
        kernel = Entry("inductor.kernel", "unknown", no_flops, dtype_of_first_tensor)
        self._kernel = Operator(kernel, kernel)
        self.counts_fake = False
        """Whether the user computes with fake tensors. If not, some library uses them to find a shape."""
        self.data_dependent = False
        """Values in tensors have decided sizes: another step of these shapes may cost something else."""
        """What numbers in tensors decide."""
        self.runs_in_tf32: Callable[[Operator], bool] | None = None
        self.on_function: Callable[[Any], None] = _ignore
        """Is told of autograd functions whose forward ran products."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch shall wrap our handler to keep the compiler out. Not needed if the handler's code is marked.

        Torch asks this when the class is made.
        """
        return not hide(cls.__torch_dispatch__)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: we see the kernels it calls."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Every operator of a step goes through here. So the border is written out here, to save a call for each
        # operator. It has two halves, because what the user's operator raises between them belongs to the user.
        try:
            try:
                call = func._op  # what OpOverload.__call__ forwards to; higher-order operators have none
                operator = self._operators[call]
                way = operator.way
            except (AttributeError, KeyError):
                operator = self._operator(func)
                call, way, args = self._first_call(func, operator, args)
                if way is QUIET and operator.higher_order:
                    types = ()  # whatever the tensors are, what runs are the functions
            if types:
                for tensor_type in types:
                    if hands_over(tensor_type):
                        return NotImplemented
                    if is_fake(tensor_type) and not self.counts_fake:
                        way = QUIET
        except Exception as error:  # nothing has run yet: run the operator as without us
            self._failed("an operator", error)
            call, way = func, QUIET
        if way:
            if way is QUIET:
                return call(*args, **kwargs) if kwargs else call(*args)
            booked, out = self._open(operator, func, types, args, kwargs or {})
            if booked:
                return out
        else:
            out = call(*args, **kwargs) if kwargs else call(*args)
        try:
            try:
                state: ThreadState = self._local.state
            except AttributeError:
                state = self._new_state()
            task = graph_task_id()
            if task != state.task_id:
                self._backward.switch_task(state, task)
            if state.special or operator.special:
                self._account(state, operator, args, kwargs or {}, out)
                return out
            if state.in_backward:
                books: Books | int = ACCUMULATES_GRADIENT
                if state.by_number and not is_grad_enabled():
                    try:
                        books = current_node()._sequence_nr()
                    except AttributeError:  # no node runs, or one without a number
                        books = ACCUMULATES_GRADIENT
                if books >= ACCUMULATES_GRADIENT:  # type: ignore[operator]
                    books = self._table(state, operator)
            else:
                books = state.books
            try:
                read = 0
                for arg in args:
                    kind = type(arg)
                    if kind is Tensor or kind is Parameter:
                        read += arg.nbytes
                    elif kind not in NO_TENSORS:
                        read += bytes_of(arg)
                written = out.nbytes if type(out) is Tensor else bytes_of(out)
            except RuntimeError:
                # A sparse tensor has no nbytes, and what is spent on it goes by how many numbers it stores.
                read, written = bytes_of(args), bytes_of(out)
                self.data_dependent |= operator.counted
            if operator.counted:
                self._count(state, books, operator, args, kwargs or {}, out, read, written)
                return out
            traffic = state.traffic
            traffic += (operator, books, read, written)
            if len(traffic) > _LONG_JOURNAL:
                self._backward.post(state)
        except Exception as error:  # the operator has run, so the user's step goes on
            self._failed("an operator", error)
        return out

    def _first_call(self, func: Any, operator: Operator, args: tuple[Any, ...]) -> tuple[Any, Way, tuple[Any, ...]]:
        """How to run an operator that is called for the first time, or a higher-order one, and with which arguments."""
        if not operator.higher_order:
            return operator.call, operator.way, args
        repeating = None if graph_task_id() == NO_GRAPH_TASK else self._repeating
        args = with_seen_functions(self, func, args, repeating)
        only_functions = operator.listed and runs_only_functions(func)
        return operator.call, QUIET if only_functions else operator.way, args

    @contextmanager
    def _repeating(self) -> Iterator[None]:
        """Inside, the running part of a backward's graph repeats the forward."""
        state: ThreadState | None = None
        try:
            state = self._state()
            task = graph_task_id()
            if task != state.task_id:
                self._backward.switch_task(state, task)
            state.repetitions.append(Repetition(None, task, False))
            state.replan()
        except Exception as error:
            self._failed("the beginning of a repeated part of a graph", error)
        try:
            yield
        finally:
            if state is not None and state.repetitions and state.repetitions[-1].manager is None:
                state.repetitions.pop()
                state.replan()

    def _open(
        self, operator: Operator, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[bool, Any]:
        """Runs an operator that may run others inside; returns whether these were booked, and its result."""
        if operator.splits:
            with pushed(self):
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return True, out
        state, watch, keys = None, None, None
        try:
            # If there are other modes below this one, the operator still has to go to them.
            keys = None if types or depth() else keys_of_python_kernel(func, args, kwargs)
            if keys is not None and not operator.counted:
                state, watch = self._state(), BodyWatch(args, kwargs)
                state.bodies.append(watch)
        except Exception as error:
            self._failed("an operator", error)
        if keys is None:
            return False, operator.call(*args, **kwargs)
        if watch is None or state is None:
            return False, run_python_kernel(func, keys, args, kwargs)
        try:
            out = run_python_kernel(func, keys, args, kwargs, self, watch)
        finally:
            try:
                if watch in state.bodies:
                    del state.bodies[state.bodies.index(watch) :]
            except Exception as error:
                self._failed("an operator", error)
        try:
            if watch.saw_everything(func, args, kwargs, out):
                return True, out
            if not watch.ran:
                return False, out
            table = self._table_now(state, operator)
            if not (state.paused or (state.functions and self._stands_for(state))):
                self._list(state, operator.name, table.module, args, kwargs, out)
                table.cell(operator).calls += 1  # its bytes were booked with the operators inside
        except Exception as error:
            self._failed("an operator", error)
        return True, out

    def _operator(self, func: Any) -> Operator:
        """What is kept about an operator that is called for the first time, or about a higher-order one."""
        call = call_of(func)
        operator = self._operators.get(call)
        if operator is None:
            operator = self._operators[call] = operator_of(func)
        return operator

    def _count(
        self,
        state: ThreadState,
        books: Books | int,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
        read: int,
        written: int,
    ) -> None:
        """Books one call of an operator that has a formula."""
        kind = type(books)
        if (kind is int or (kind is str and is_grad_enabled() and not self._compiled.in_place)) and not self._at_once:
            try:
                work = operator.compute(args, kwargs, out)
                place = operator.dtype_place
                if place is None:
                    dtype: Any = operator.dtype_of(args, kwargs, out)
                    needs = False
                else:
                    tensor = args[place]
                    dtype = tensor.dtype
                    if dtype in ARITHMETIC:
                        dtype = ARITHMETIC[dtype]
                    needs = tensor.requires_grad
            except Exception:  # a user's formula may raise anything
                work = None  # tried again below, where the failure is reported
            if type(work) is int and work >= 0:
                if self.runs_in_tf32 is not None:
                    dtype = self._effective(dtype, operator, args)
                if not needs and kind is str:
                    needs = needs_gradient(args) or bool(kwargs and needs_gradient(kwargs.values()))
                products = state.products
                products += (operator, books, read, written, work, dtype, 0 if needs or kind is int else work)
                if len(products) > _LONG_JOURNAL:
                    self._backward.post(state)
                return
        cell = self._work(state, self._backward.table_of(state, books), operator, args, kwargs, out)
        cell.calls += 1
        cell.read += read
        cell.written += written

    def _effective(self, dtype: Any, operator: Operator, args: tuple[Any, ...]) -> Any:
        """The dtype of the arithmetic, where CUDA may run float32 in TF32."""
        in_tf32 = self.runs_in_tf32
        if dtype is torch.float32 and in_tf32 is not None and _on_cuda(args) and in_tf32(operator):
            return "tf32"
        return dtype

    def _account(
        self, state: ThreadState, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Books one call where the operator, or the state of the thread, is special."""
        if state.paused:
            return
        table = self._backward.table(state, operator) if state.in_backward else state.table
        # A number may be read for anything: only one that a model reads is taken for a size.
        asks = operator.sized_by_values if not operator.reads_number or table.module != OUTSIDE else None
        if asks is not None and asks(args):
            self.data_dependent = True
        if operator.is_only_asked:
            return
        stood_for = bool(state.functions) and self._stands_for(state)
        if operator.counted and not stood_for:
            self.data_dependent |= any(isinstance(arg, Tensor) and arg.layout is not torch.strided for arg in args)
            cell = self._work(state, table, operator, args, kwargs, out)
        else:
            cell = table.cell(operator)
        if operator.listed and not stood_for:
            self._list(state, operator.name, table.module, args, kwargs, out)
        cell.calls += 1
        written = bytes_of(out)
        cell.written += written
        read = sum(bytes_of(args[place]) for place in operator.reads if place < len(args))
        if operator.selects and args:
            read -= max(0, bytes_of(args[0]) - written)
        cell.read += read + sum(bytes_of(kwargs[key]) for key in operator.keyword_reads if key in kwargs)

    def _work(
        self,
        state: ThreadState,
        table: Table,
        operator: Operator,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        out: Any,
    ) -> Cell:
        """Books the FLOPs of one call of an operator that has a formula."""
        if self._compiled.in_place and table.phase == "forward":
            table = self._table_of_region(state, table)
        try:
            work = operator.compute(args, kwargs, out)
            dtype: Any = operator.dtype_of(args, kwargs, out)
            if work.__class__ is not int and not isinstance(work, Work):
                work = whole_flops(work)
            if (work if isinstance(work, int) else work.flops) < 0:
                raise ValueError(f"it gave {work}, and FLOPs cannot be negative")
        except Exception as error:  # a user's formula may raise anything; its operator is listed in the report
            self._formula_failed(operator.name, error)
            self._list_as(state, operator.name, table.module, elements_of(out), heavy=True)
            return table.cell(operator)
        cell = table.counted_cell(operator, self._effective(dtype, operator, args))
        if isinstance(work, int):
            flops = work
        else:
            flops = _split(cell, work, self._halve_causal)
            self.data_dependent |= work.by_values
        cell.flops += flops
        if table.phase == "forward" or table.phase == "recompute":
            if is_grad_enabled():
                if not needs_gradient(args) and not (kwargs and needs_gradient(kwargs.values())):
                    cell.without_backward += flops
            else:
                top = state.stack[-1]
                function = function_in_forward() if top.wants_backward else None
                if function is not None:
                    self.on_function(function)
                in_graph = bool(state.repetitions) and state.repetitions[-1].manager is None
                if top.repeats_forward or function is not None or in_graph:
                    cell.hidden_grad_flops += flops
                else:
                    cell.without_backward += flops
        return cell

    def _table_of_region(self, state: ThreadState, table: Table) -> Table:
        """The table of the running module that was compiled in place; hooks do not fire for such a module."""
        region = self._compiled.running_module()
        name = None if region is None else self._module_name(region, table.module)
        if name is None or name == table.module:
            return table
        # The region has only one autograd node, and it was made just before.
        state.makers.insert(sequence_number() - 1, name)
        return state.table_of(name, table.phase)

    def _formula_failed(self, name: str, error: Exception) -> None:
        if name not in self._failing:
            self._failing.add(name)
            kind = type(error).__name__
            logger.warning("the FLOP formula of %s failed (%s: %s): it is listed as uncounted", name, kind, error)

    @staticmethod
    def _list(
        state: ThreadState, name: str, module: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Lists one call of an operator that nothing is known about."""
        CountingMode._list_as(state, name, module, elements_of(out), hides_flops(name, args, kwargs, out))

    @staticmethod
    def _list_as(state: ThreadState, name: str, module: str, elements: int, heavy: bool) -> None:
        """Lists one call of an operator that could not be counted."""
        listed = state.listed.setdefault((name, module), [0, 0, 0])
        listed[0] += 1
        listed[1] += elements
        listed[2] |= heavy

    # Called within the user's step, for autograd functions and kernels with a formula of their own (FunctionListener).

    @border("an autograd function")
    def enter_function(self, entry: Entry) -> None:
        """A registered autograd function or kernel starts: its formula stands for all that runs inside."""
        state = self._state()
        operator = self._operator_of(entry)
        state.functions.append((operator, self._table_now(state, operator).phase))
        state.replan()

    @border("an autograd function")
    def leave_function(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, ok: bool) -> None:
        """A registered autograd function or kernel is done."""
        state = self._state()
        operator = self._operator_of(entry)
        if all(running is not operator for running, _ in state.functions):
            return
        while state.functions.pop()[0] is not operator:
            pass
        state.replan()
        if state.paused or not ok or not is_pushed(self) or (state.functions and self._stands_for(state)):
            return
        table = self._table_now(state, operator)
        self._work(state, table, operator, args, kwargs, out).calls += 1
        if state.bodies:
            state.bodies[-1].wrote((*args, *kwargs.values()))

    def function_failed(self, error: Exception) -> None:
        """What runs around a registered function has failed."""
        self._failed("an autograd function", error)

    def _stands_for(self, state: ThreadState) -> bool:
        """Whether the innermost running function's formula covers what runs now.

        It does not where a checkpoint repeats a forward because the function's backward asked for a saved tensor.
        """
        operator, phase = state.functions[-1]
        return bool(self._table_now(state, operator).phase == phase)

    def _operator_of(self, entry: Entry) -> Operator:
        operator = self._functions.get(id(entry))
        if operator is None:
            operator = self._functions[id(entry)] = Operator(entry, entry)
        return operator

    def _table_now(self, state: ThreadState, operator: Operator) -> Table:
        """Where the costs of an operator, or of a function, go if it runs now."""
        task = graph_task_id()
        if task != state.task_id:
            self._backward.switch_task(state, task)
        return self._backward.table(state, operator) if state.in_backward else state.table

    @border("a compiled kernel")
    def list_kernel(self, name: str) -> None:
        """A kernel runs that the dispatcher does not see: it is listed under the module that is running."""
        state = self._state()
        if state.paused or not is_pushed(self):
            return
        table = self._table_now(state, self._kernel)
        module = table.module if state.in_backward else self._table_of_region(state, table).module
        self._list_as(state, name, module, 0, heavy=True)

    def _state(self) -> ThreadState:
        try:
            state: ThreadState = self._local.state
        except AttributeError:
            state = self._new_state()
        return state


def flops_of(work: int | Work, *, halve_causal: bool) -> int:
    """FLOPs that are booked on the running phase, given what a formula returned."""
    return work if isinstance(work, int) else _split(CountedCell(None), work, halve_causal)


def _split(cell: CountedCell, work: Work, halve_causal: bool) -> int:
    """Books what a call repeats and what it skips; returns the FLOPs of the running phase."""
    flops, repeated, skipped = work.flops, work.recompute, work.causal_skipped
    # A mask skips the same share of every product over the score matrix.
    own = skipped * flops // (flops + repeated) if skipped else 0
    skipped -= own
    if halve_causal and work.causal:
        # Only the count is halved; what runs stays the same. So the skipped share is smaller, or even negative.
        own -= flops - flops // 2
        skipped -= repeated - repeated // 2
        flops //= 2
        repeated //= 2
    cell.skipped += own
    cell.repeated += repeated
    cell.repeated_skipped += skipped
    return flops


def _ignore(function: Any) -> None:
    """Does nothing: nobody needs to know of the function."""


def _on_cuda(args: tuple[Any, ...]) -> bool:
    for value in args:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                return bool(item.is_cuda)
    return False
