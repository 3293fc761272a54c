"""Counts FLOPs and bytes by module, phase, operator and dtype while a model runs, and lists what it could not count.

A thin dispatch mode sees every operator; torch's global module hooks say whose forward is running; the sequence number
of the running autograd node says whose backward is. Nothing is put on the user's modules.
"""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.parameter import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_flops.instrument import autograd_state, compiled_regions
from lightning_flops.instrument.autograd_state import (
    ACCUMULATES_GRADIENT,
    NO_GRAPH_TASK,
    current_node,
    find_backward_call,
    graph_task_id,
    inside_function_forward,
    node_sequence,
    sequence_number,
)
from lightning_flops.instrument.dispatch_stack import is_pushed, push, pushed, remove
from lightning_flops.instrument.formulas import Entry, Work, heavy_hint, watch_functions
from lightning_flops.instrument.module_scope import ModuleNames, named_modules, wraps
from lightning_flops.instrument.operators import (
    Operator,
    bytes_of,
    computes_on_fake_tensors,
    dtype_name,
    elements_of,
    hands_over,
    is_fake,
    needs_gradient,
    tf32_operators,
)
from lightning_flops.instrument.tallies import merge_records
from lightning_flops.instrument.thread_state import UNKNOWN, Cell, GraphTask, Running, Table, ThreadState
from lightning_flops.records import OUTSIDE, FlopRecord

logger = logging.getLogger(__name__)

CausalAttention = Literal["full", "half"]

_REMEMBERED_TASKS = 256


class FlopCounter:
    """Counts what runs while it is entered; enter it as often as you like, it adds up.

    Args:
        root: the model whose modules own the work; None: all work is ``(outside)``.
        causal_attention: ``"full"`` counts attention over the full score matrix; ``"half"`` counts half of it where
            the call is flagged causal, whatever backend runs it, and takes it that a fused kernel skips the other half.

    Raises:
        ValueError: *causal_attention* is neither.
    """

    def __init__(self, root: nn.Module | None, *, causal_attention: CausalAttention = "full") -> None:
        if causal_attention not in ("full", "half"):
            raise ValueError(f'causal_attention must be "full" or "half", got {causal_attention!r}')
        self._root = root
        self._halve_causal = causal_attention == "half"
        self._names: ModuleNames | None = None
        self._parameter_owners: dict[int, str] | None = None
        self._lock = threading.RLock()
        self._local = threading.local()
        self._threads: list[ThreadState] = []
        self._tasks: dict[int, GraphTask] = {}
        self._notes: list[str] = list(autograd_state.LOST)
        self._warned: set[str] = set()
        self._runs_in_tf32: Callable[[Operator], bool] = lambda operator: False
        self._compiled = compiled_regions.CompiledRegions(root)
        self._entered = 0
        self._undo = ExitStack()
        self._mode = _CountingMode(self)

    def __enter__(self) -> FlopCounter:
        """Starts counting on this thread, and on every thread on which one of the root's modules is called."""
        with self._lock:
            if self._entered == 0:
                with ExitStack() as undo:
                    self._install(undo)
                    self._undo = undo.pop_all()
            self._entered += 1
        state = self._state()
        if state.modes == 0:
            state.makers.mark(sequence_number(), OUTSIDE)
        state.modes += 1
        push(self._mode)
        return self

    def __exit__(self, *exc: object) -> None:
        """Stops counting and takes everything off torch."""
        state = self._state()
        remove(self._mode)
        state.modes -= 1
        if state.modes == 0:
            state.pop_to(1)
            state.makers.mark(sequence_number(), UNKNOWN)
            state.paused = 0
            state.functions.clear()
        with self._lock:
            self._entered -= 1
            if self._entered == 0:
                self._undo.close()

    def _install(self, undo: ExitStack) -> None:
        """Puts the hooks in place. They are global: hooks on modules recompile blocks and switch off fused paths."""
        if self._names is None:
            self._names = ModuleNames(self._root)
        self._runs_in_tf32 = tf32_operators()
        self._compiled.refresh()
        self._mode.counts_fake = computes_on_fake_tensors(self._root)
        disable: Any = torch.compiler.disable
        undo.callback(register_module_forward_pre_hook(disable(self._on_module_enter)).remove)
        undo.callback(register_module_forward_hook(disable(self._on_module_leave), always_call=True).remove)
        undo.callback(register_optimizer_step_pre_hook(self._on_optimizer_enter).remove)
        undo.callback(register_optimizer_step_post_hook(self._on_optimizer_leave).remove)
        undo.enter_context(watch_functions(self))
        undo.enter_context(_silenced_hook_warning())

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, nothing on this thread is counted: for data loading, metrics, logging."""
        state = self._state()
        state.paused += 1
        try:
            yield
        finally:
            state.paused = max(0, state.paused - 1)

    @contextmanager
    def in_root(self) -> Iterator[None]:
        """Inside, work that no module call owns is the root's own: for a ``training_step`` that is not a call."""
        with self._running("" if self._root is not None else OUTSIDE, "root"):
            yield

    @contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """Inside, work is the optimizer's: for engines whose steps torch's optimizer hooks do not see."""
        with self._running(OUTSIDE, "optimizer"):
            yield

    @contextmanager
    def _running(self, name: str, kind: Literal["root", "optimizer"]) -> Iterator[None]:
        state = self._state()
        depth = len(state.stack)
        self._enter_running(state, name, None, kind)
        running = state.stack[-1]
        try:
            yield
        finally:
            # Whatever stands above it was left without a word, by an exception that skips hooks.
            if depth < len(state.stack) and state.stack[depth] is running:
                state.pop_to(depth)

    def record(self) -> FlopRecord:
        """What was counted so far, on all threads."""
        with self._lock:
            threads = list(self._threads)
            uncounted_regions = self._compiled.hidden(self._calls_of(threads))
            return merge_records(threads, self._notes, uncounted_regions)

    @staticmethod
    def _calls_of(threads: list[ThreadState]) -> set[str]:
        return {name for state in threads for name in list(state.calls)}

    # Threads and notes

    def _state(self) -> ThreadState:
        try:
            state: ThreadState = self._local.state
        except AttributeError:
            state = self._local.state = ThreadState()
            with self._lock:
                self._threads.append(state)
        return state

    def _note(self, sentence: str) -> None:
        if sentence not in self._notes:
            self._notes.append(sentence)

    def _failed(self, where: str, error: BaseException) -> None:
        """Says once that the counter failed; the user's step goes on."""
        if where not in self._warned:
            self._warned.add(where)
            sentence = f"Counting failed in {where} ({type(error).__name__}: {error}); FLOPs may be missing."
            logger.warning(sentence)
            self._note(sentence)

    # What runs in the forward

    def _enter_running(
        self, state: ThreadState, name: str, owner: Any, kind: Literal["module", "root", "optimizer"]
    ) -> None:
        task = graph_task_id()
        if task != state.task_id:
            self._switch_task(state, task)
        caller = state.stack[-1]
        repeats = not torch.is_grad_enabled() and (
            caller.repeats_forward or (caller.wants_backward and inside_function_forward(calls=int(kind == "module")))
        )
        state.push(Running(name, owner, kind, task, repeats or torch.is_grad_enabled(), repeats))

    def _on_module_enter(self, module: nn.Module, args: Any) -> None:
        try:
            state = self._state()
            caller = state.stack[-1]
            name = self._name_of(state, module, caller)
            if name is None:
                # A loss function, or another model. Inside an optimizer step it tells that a closure is running.
                if caller.kind == "optimizer":
                    self._enter_running(state, OUTSIDE, module, "module")
                return
            outermost = state.modes == 0 and len(state.stack) == 1
            self._enter_running(state, name, module, "module")
            running = state.stack[-1]
            wrapped = caller.name == name and caller.kind == "module" and _is_wrapped_by(module, caller.owner)
            if running.task == NO_GRAPH_TASK and not wrapped and not state.paused:
                state.calls[name] = state.calls.get(name, 0) + 1
            if outermost and not is_pushed(self._mode):
                # A Python thread starts without our mode.
                push(self._mode)
                running.mode_pushed = True
                state.makers.operators = {} if state.makers.operators is None else state.makers.operators
        except Exception as error:
            self._failed("a module's forward pre-hook", error)

    def _on_module_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            state = self._state()
            stack = state.stack
            depth = len(stack) - 1
            while depth > 0 and stack[depth].owner is not module:
                depth -= 1
            if depth == 0:
                return
            mode_pushed = any(running.mode_pushed for running in stack[depth:])
            task = graph_task_id()
            if task != state.task_id:
                self._switch_task(state, task)
            state.pop_to(depth)
            if mode_pushed:
                remove(self._mode)
                state.makers.mark(sequence_number(), UNKNOWN)
                state.replicas.clear()
            elif state.stack[-1].kind in ("base", "root") and task == NO_GRAPH_TASK:
                self._watch_backward_of(output)
        except Exception as error:
            self._failed("a module's forward hook", error)

    def _name_of(self, state: ThreadState, module: nn.Module, caller: Running) -> str | None:
        assert self._names is not None
        name = self._names.name_for(module, caller.name)
        if name is None and getattr(module, "_is_replica", False):
            # DataParallel calls copies of the modules, made anew for each forward, on threads of their own.
            name = state.replicas.get(module)
            if name is None and caller.kind == "base":
                state.replicas.update((copy, copy_name) for copy_name, copy in named_modules(module))
                name = state.replicas.get(module)
        return name

    def _on_optimizer_enter(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            state = self._state()
            for depth, running in enumerate(state.stack):
                if running.owner is optimizer:
                    state.pop_to(depth)  # its last step raised, which no hook told
                    break
            self._enter_running(state, OUTSIDE, optimizer, "optimizer")
        except Exception as error:
            self._failed("an optimizer's pre-hook", error)

    def _on_optimizer_leave(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        try:
            state = self._state()
            for depth in range(len(state.stack) - 1, 0, -1):
                if state.stack[depth].owner is optimizer:
                    state.pop_to(depth)
                    return
        except Exception as error:
            self._failed("an optimizer's post-hook", error)

    def _watch_backward_of(self, output: Any) -> None:
        """Notices when the backward of *output* runs on a Python thread on which this counter was not entered."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or compiled_regions.autograd_is_compiled():
            return
        node = next((tensor.grad_fn for tensor in _tensors_of(output) if tensor.grad_fn is not None), None)
        if node is None:
            return
        handles: list[Any] = []

        def check(gradients: Any) -> None:
            for handle in handles:
                handle.remove()
            if self._entered and not is_pushed(self._mode):
                self._note_missed_backward()

        # On the node, not on the tensor: a tensor with hooks does not pickle in silence. It goes with the graph.
        handles.append(node.register_prehook(check))

    def _note_missed_backward(self) -> None:
        self._note(
            "A backward ran on a Python thread on which the counter was not entered: its FLOPs are missing. "
            "Enter the counter on that thread too."
        )
        with self._lock:
            listed = self._threads[0].listed.setdefault(("autograd.backward", OUTSIDE), [0, 0, 1])
            listed[0] += 1

    # What runs in the backward

    def _switch_task(self, state: ThreadState, task_id: int) -> None:
        """Another backward runs on this thread than a moment ago, or none."""
        state.end_births()
        state.task_id = task_id
        state.node_sequence = -1
        state.task = None
        if task_id == NO_GRAPH_TASK:
            for depth in range(1, len(state.stack)):
                if state.stack[depth].task != NO_GRAPH_TASK:
                    state.pop_to(depth)  # entered in a backward that ended without leaving it
                    break
        else:
            task = self._tasks.get(task_id)
            if task is None:
                task = self._tasks[task_id] = self._new_task(state)
                while len(self._tasks) > _REMEMBERED_TASKS:
                    del self._tasks[next(iter(self._tasks))]
            state.task = task
            # The operator at hand has made its node already, if it makes one.
            state.born = sequence_number() - int(torch.is_grad_enabled())
        state.retarget()

    def _new_task(self, state: ThreadState) -> GraphTask:
        """Finds out who started a backward, and so whose numbers its nodes have."""
        with self._lock:
            threads = list(self._threads)
        owners = frozenset(other.task.owner for other in threads if other.task is not None and other is not state)
        call = find_backward_call(owners)
        if call is None:
            owner, create_graph = state.ident, torch.is_grad_enabled()
        else:
            owner, create_graph = call.thread, call.create_graph
        ordered = sorted(threads, key=lambda other: (other.ident != owner, other.makers.operators is not None))
        here = sequence_number()
        return GraphTask(
            owner,
            create_graph,
            tuple((other.makers, here if other is state else None) for other in ordered if other.makers.starts),
        )

    def _backward_table(self, state: ThreadState, operator: Operator) -> Table:
        """Where the costs of an operator that runs inside a backward go."""
        top = state.stack[-1]
        if top.task == state.task_id:
            # A module called inside this backward; with create_graph too, it is there to repeat a forward.
            repeats = top.repeats_forward or torch.is_grad_enabled()
            return state.table_of(top.name, "recompute" if repeats else "backward")
        task = state.task
        assert task is not None
        node = current_node()
        if node is None:
            return state.table_of(OUTSIDE, "backward")  # what runs at a backward's end: a reducer's callback
        sequence = node_sequence(node)
        if sequence >= ACCUMULATES_GRADIENT:
            # A leaf's gradient: work done here is its hooks', such as an optimizer that runs in the backward.
            if operator.counted:
                return state.table_of(OUTSIDE, "optimizer")
            return state.table_of(self._owner_of(getattr(node, "variable", None)), "backward")
        if sequence == state.node_sequence:
            module, table = state.node_module, state.node_table
        else:
            maker = task.maker(sequence, node.name())
            module = self._unknown_maker() if maker == UNKNOWN else maker
            table = state.table_of(module, "backward")
            state.node_sequence, state.node_module, state.node_table = sequence, module, table
        if torch.is_grad_enabled():
            state.bear_nodes(module)
            return table if task.create_graph else state.table_of(module, "recompute")
        if operator.counted and inside_function_forward():
            # The first pass of a reentrant checkpoint inside a forward that another checkpoint repeats.
            return state.table_of(module, "recompute")
        return table

    def _unknown_maker(self) -> str:
        self._note(
            "Some of the backward belongs to forwards that ran while nothing was counted: it stands under no module."
        )
        return OUTSIDE if self._root is None else ""

    def _owner_of(self, parameter: Any) -> str:
        if self._parameter_owners is None and self._names is not None:
            self._parameter_owners = self._names.parameter_owners()
        return (self._parameter_owners or {}).get(id(parameter), OUTSIDE)

    # Accounting

    def account(
        self, state: ThreadState, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any
    ) -> None:
        """Books one call of an operator."""
        table = self._backward_table(state, operator) if state.in_backward else state.table
        if state.makers.operators is not None:
            state.makers.operators[sequence_number() - 1] = operator.name.rpartition(".")[2]
        if operator.counted and not state.functions:
            cell = self._work(state, table, operator, args, kwargs, out)
        else:
            cell = table.cell(operator)
        if operator.listed and not state.functions:
            self._list(state, operator.name, table.module, args, out)
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
        module = table.module
        if self._compiled.present:
            region = self._compiled.running_module() if table.phase == "forward" else None
            if region is not None and self._names is not None:
                module = self._names.name_for(region, module) or module
                table = state.table_of(module, table.phase)
                state.makers.insert(sequence_number() - 1, module)
        try:
            work = operator.compute(args, kwargs, out)
            dtype = dtype_name(operator.dtype_of(args, kwargs, out))
            if not isinstance(work, Work):
                work = int(work)
        except Exception as error:
            if operator.name not in self._warned:
                self._warned.add(operator.name)
                logger.warning(
                    "the FLOP formula of %s failed (%s: %s): it is listed as uncounted",
                    operator.name,
                    type(error).__name__,
                    error,
                )
            self._list(state, operator.name, module, args, out, heavy=True)
            return table.cell(operator)
        if dtype == "float32" and _on_cuda(args) and self._runs_in_tf32(operator):
            dtype = "tf32"
        cell = table.cell((operator, dtype))
        flops = work if isinstance(work, int) else self._split(cell, work)
        cell.flops += flops
        if table.phase == "forward" or table.phase == "recompute":
            if torch.is_grad_enabled():
                if not needs_gradient(args) and not needs_gradient(kwargs.values()):
                    cell.without_backward += flops
            elif state.stack[-1].repeats_forward or (state.stack[-1].wants_backward and inside_function_forward()):
                cell.hidden_grad_flops += flops
            else:
                cell.without_backward += flops
        return cell

    def _split(self, cell: Cell, work: Work) -> int:
        """Books what a call repeats and skips; what remains is the running phase's."""
        flops, repeated, skipped = work.flops, work.recompute, work.causal_skipped
        own = skipped * flops // (flops + repeated) if skipped else 0
        skipped -= own
        if self._halve_causal and work.causal:
            half, half_repeated = flops // 2, repeated // 2
            # What is not counted any more cannot be skipped any more.
            own = max(0, own - half)
            skipped = max(0, skipped - half_repeated)
            flops -= half
            repeated -= half_repeated
        cell.skipped += own
        cell.repeated += repeated
        cell.repeated_skipped += skipped
        return flops

    def _list(
        self,
        state: ThreadState,
        name: str,
        module: str,
        args: tuple[Any, ...],
        out: Any,
        *,
        heavy: bool | None = None,
    ) -> None:
        """Lists one call of an operator that could not be counted."""
        listed = state.listed.setdefault((name, module), [0, 0, 0])
        listed[0] += 1
        listed[1] += elements_of(out)
        if not listed[2] and (heavy_hint(name, args, out) if heavy is None else heavy):
            listed[2] = 1

    # Functions with a formula of their own

    def enter_function(self, entry: Entry) -> None:
        """A registered autograd function or kernel starts: its formula stands for all that runs inside."""
        state = self._state()
        if not state.paused:
            state.functions.append(entry)

    def leave_function(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any, ok: bool) -> None:
        """A registered autograd function or kernel is done."""
        try:
            state = self._state()
            if not state.functions or state.functions.pop() is not entry or state.functions or not ok:
                return
            if state.modes == 0 and not is_pushed(self._mode):
                return
            task = graph_task_id()
            if task != state.task_id:
                self._switch_task(state, task)
            operator = self._mode.operator_of_function(entry)
            table = self._backward_table(state, operator) if state.in_backward else state.table
            self._work(state, table, operator, args, kwargs, out).calls += 1
        except Exception as error:
            self._failed(f"the formula of {entry.name}", error)


class _CountingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator, then has it booked."""

    supports_higher_order_operators = True

    def __init__(self, counter: FlopCounter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counter = counter
        self._local = counter._local
        self._operators: dict[int, Operator] = {}
        self._functions: dict[int, Operator] = {}
        self.counts_fake = False
        """Whether fake tensors are what the user computes with; else they are some library's, that asks for a shape."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled: we see the kernels it calls."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operator = self._operators.get(id(func))
        if operator is None:
            operator = self._operators[id(func)] = Operator(func)
        if types:
            for tensor_type in types:
                if hands_over(tensor_type):
                    return NotImplemented
                if is_fake(tensor_type) and not self.counts_fake:
                    return func(*args, **(kwargs or {}))
        if operator.splits:
            with pushed(self):
                out = func.decompose(*args, **(kwargs or {}))
            if out is not NotImplemented:
                return out
        out = operator.call(*args, **kwargs) if kwargs else operator.call(*args)
        if operator.quiet:
            return out
        try:
            try:
                state: ThreadState = self._local.state
            except AttributeError:
                state = self._counter._state()
            if state.paused:
                return out
            task = graph_task_id()
            if task != state.task_id:
                self._counter._switch_task(state, task)
            if not operator.simple or state.makers.operators is not None:
                self._counter.account(state, operator, args, kwargs or {}, out)
                return out
            table = self._counter._backward_table(state, operator) if state.in_backward else state.table
            cell = table.get(operator)
            if cell is None:
                cell = table[operator] = Cell()
            cell.calls += 1
            count = len(args)
            for place in operator.reads:
                if place < count:
                    arg = args[place]
                    kind = arg.__class__
                    if kind is torch.Tensor or kind is Parameter:
                        cell.read += arg.nbytes
                    elif kind is not float and kind is not int and arg is not None:
                        cell.read += bytes_of(arg)
            cell.written += out.nbytes if out.__class__ is torch.Tensor else bytes_of(out)
        except Exception as error:
            self._counter._failed("an operator", error)
        return out

    def operator_of_function(self, entry: Entry) -> Operator:
        """The operator that stands for an autograd function or kernel with a formula of its own."""
        operator = self._functions.get(id(entry))
        if operator is None:
            operator = self._functions[id(entry)] = Operator(entry, entry)
        return operator


def _is_wrapped_by(module: nn.Module, wrapper: Any) -> bool:
    return any(child is module and wraps(wrapper, key) for key, child in wrapper._modules.items())


def _on_cuda(args: tuple[Any, ...]) -> bool:
    for value in args:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                return bool(item.is_cuda)
    return False


def _tensors_of(output: Any, depth: int = 3) -> Iterator[torch.Tensor]:
    """The tensors in a module's output, a few containers deep."""
    if isinstance(output, torch.Tensor):
        yield output
    elif depth and isinstance(output, (list, tuple)):
        for item in output:
            yield from _tensors_of(item, depth - 1)
    elif depth and isinstance(output, Mapping):
        for item in output.values():
            yield from _tensors_of(item, depth - 1)


@contextmanager
def _silenced_hook_warning() -> Iterator[None]:
    """Keeps torch from telling users of ``torch.compile(module)`` about hooks that are not theirs."""
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", message="Using `torch.compile\\(module\\)` when there are global hooks")
    ours = next((entry for entry in warnings.filters if entry not in before), None)
    try:
        yield
    finally:
        if ours is not None and ours in warnings.filters:
            warnings.filters.remove(ours)  # type: ignore[attr-defined]
            warnings._filters_mutated()  # type: ignore[attr-defined]
