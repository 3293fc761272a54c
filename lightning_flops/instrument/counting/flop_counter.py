"""Counts FLOPs and bytes by module, phase, operator and dtype while a model runs, and lists what it could not count.

A thin dispatch mode sees every operator. Torch's global module hooks say which module's forward is running. In a
backward, the sequence number of the running autograd node says which module made it. Nothing is put on the user's
modules.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from torch import is_grad_enabled, nn
from torch.fx import GraphModule
from torch.jit import ScriptModule

from lightning_flops.instrument.border import UndoLedger, border
from lightning_flops.instrument.counting.backward_scope import BackwardScope
from lightning_flops.instrument.counting.causal_halves import HalvingMode
from lightning_flops.instrument.counting.compiled_backward import CompiledBackwards
from lightning_flops.instrument.counting.compiled_regions import CompiledRegions
from lightning_flops.instrument.counting.counting_mode import CountingMode, flops_of
from lightning_flops.instrument.counting.formulas import formulas_without_operator, watch_functions
from lightning_flops.instrument.counting.graph_hooks import before_backward_of, nodes_behind, nodes_of
from lightning_flops.instrument.counting.ledger import Ledger
from lightning_flops.instrument.counting.operator_facts import computes_on_fake_tensors, tf32_operators
from lightning_flops.instrument.counting.repetitions import Repetitions
from lightning_flops.instrument.counting.tallies import merge_records, total_flops
from lightning_flops.instrument.counting.template_kernels import hear_kernels, hear_replays
from lightning_flops.instrument.counting.thread_state import UNKNOWN, ModuleCall, Running, RunningKind, ThreadState
from lightning_flops.instrument.counting.torchscript import unseen_products
from lightning_flops.instrument.module_hooks import put_up_hooks
from lightning_flops.instrument.module_scope import ModuleNames, computing_hooks, named_modules, wraps
from lightning_flops.instrument.optimizer_hooks import OptimizerHooks
from lightning_flops.instrument.torch_private.autograd import (
    NO_GRAPH_TASK,
    current_node,
    graph_task_id,
    has_ended,
    inside_function_forward,
    runs_step_of,
    sequence_number,
)
from lightning_flops.instrument.torch_private.compiler import autograd_is_compiled
from lightning_flops.instrument.torch_private.dispatch import is_pushed, push, push_under_others, remove
from lightning_flops.instrument.torch_private.modules import children_of, is_replica
from lightning_flops.records import OUTSIDE, FlopRecord, OperatorCell, PhaseFlops

CausalAttention = Literal["full", "half"]


class FlopCounter:
    """Counts what runs while it is entered. It may be entered several times; the counts add up.

    Args:
        root: the model whose modules own the work; None: all work is ``(outside)``.
        causal_attention: ``"full"`` counts attention over the full score matrix. ``"half"`` counts half of it if
            attention is called with the causal flag, under every backend; hardware FLOPs are the same as with
            ``"full"``. Compiled code that computes attention as separate products does not show the flag, and counts
            in full.

    Raises:
        ValueError: *causal_attention* is neither.
    """

    def __init__(self, root: nn.Module | None, *, causal_attention: CausalAttention = "full") -> None:
        if causal_attention not in ("full", "half"):
            raise ValueError(f'causal_attention must be "full" or "half", got {causal_attention!r}')
        self._root = root
        self._names = ModuleNames(root)
        self._name_for = self._names.name_for
        self._ledger = Ledger()
        self._local = self._ledger.local
        self._state = self._ledger.state
        self._failed = self._ledger.failed
        self._compiled = CompiledRegions(self._names)
        self._backward = BackwardScope(
            threads=self._ledger.threads,
            owner_of=self._names.owner_of,
            unknown=OUTSIDE if root is None else "",
            note=self._ledger.note,
        )
        mode = HalvingMode if causal_attention == "half" else CountingMode
        self._mode = mode(
            local=self._ledger.local,
            new_state=self._ledger.state,
            backward=self._backward,
            compiled=self._compiled,
            module_name=self._names.name_for,
            halve_causal=causal_attention == "half",
            failed=self._ledger.failed,
        )
        self._compiled_backwards = CompiledBackwards(
            state=self._ledger.state,
            table=self._backward.table_of_node,
            post=self._backward.post,
            flops_of=partial(flops_of, halve_causal=causal_attention == "half"),
            note=self._ledger.note,
            failed=self._ledger.failed,
        )
        self._mode.on_function = self._compiled_backwards.watch
        self._repetitions = Repetitions(
            state=self._ledger.state, switch_task=self._backward.switch_task, failed=self._ledger.failed
        )
        self._graph_ran = False
        """Whether a graph traced by torch ran that is not one of the root's modules, and not inside one."""
        self._reducer_hooks: set[str] = set()
        self.compile_sec = 0.0
        """Host time in which torch has compiled something while this counted."""
        self._hear_new_kernels: Callable[[], None]
        """Valid while something of this counter is on torch."""
        self._lock = threading.RLock()
        self._entered = False
        """Whether any thread has entered the counter and not left it."""
        self._undo = UndoLedger()
        """Removes everything that this counter puts on torch, when no thread is inside any more."""

    def __enter__(self) -> FlopCounter:
        """Starts counting on this thread, and on every thread on which one of the root's modules is called.

        Raises:
            Exception: whatever fails here; nothing of ours is then left on torch.
        """
        before = None
        try:
            state = self._state()
            before = state.modes
            self._enter(state)
            return self
        except BaseException:  # also the user's Ctrl-C: nobody will leave what was not entered
            with suppress(Exception):
                if before is not None:
                    self._leave(before)
            raise

    def __exit__(self, *exc: object) -> None:
        """Stops counting and removes everything from torch. A failure here is noted, and the user's code goes on.

        Does nothing if this thread has not entered the counter.
        """
        remaining = None
        try:
            remaining = max(0, self._state().modes - 1)
            self._leave(remaining)
        except BaseException as error:
            self._leave_again(remaining, error)

    def _leave_again(self, remaining: int | None, error: BaseException) -> None:
        """Leaves again after *error* interrupted it, which is safe to do twice; then reports the error."""
        try:
            self._leave(max(0, self._state().modes - 1) if remaining is None else remaining)
        except Exception as second:
            self._failed("the end of counting", second)
        if not isinstance(error, Exception):
            raise error
        self._failed("the end of counting", error)

    def _enter(self, state: ThreadState) -> None:
        with self._lock:
            if not self._entered:
                self._install(self._undo)
                self._entered = True
            state.modes += 1
        if state.modes == 1:
            state.entered_at = len(state.stack)
            if state.entered_at == 1:
                state.makers.mark(sequence_number(), OUTSIDE)
        state.replan()
        if not is_pushed(self._mode):  # if it were on the stack twice, it would count twice
            push_under_others(self._mode)  # a step may begin inside a mode of the user's, and end outside of it

    def _leave(self, remaining: int) -> None:
        """Leaves the counter on this thread until it is entered only *remaining* times."""
        state = self._state()
        try:
            state.modes = remaining
            if not remaining:
                self._leave_thread(state)
        finally:
            with self._lock:
                self._entered = any(other.modes for other in self._ledger.threads())
                if not self._entered:
                    self._undo.close()

    def _leave_thread(self, state: ThreadState) -> None:
        """Closes this thread's books. The mode is removed first, so that it is off whatever fails afterwards."""
        # If a module that still runs has pushed the mode, the mode leaves with that module.
        outermost = not any(running.mode_pushed for running in state.stack[: state.entered_at])
        if outermost:
            remove(self._mode)
        state.pop_to(state.entered_at)
        if outermost:
            state.makers.mark(sequence_number(), UNKNOWN)
        state.paused = 0
        state.functions.clear()
        state.repetitions.clear()
        state.spare_calls.clear()
        state.replan()
        self._backward.post(state)

    def _install(self, undo: UndoLedger) -> None:
        """Puts up the hooks. They are global, because hooks on modules recompile blocks and switch off fused paths."""
        self._mode.runs_in_tf32 = tf32_operators()
        self._compiled.refresh()
        self._mode.counts_fake = computes_on_fake_tensors(self._root)
        self._hear_new_kernels = hear_kernels(undo, self._mode.list_kernel, self._failed)
        hear_replays(undo, self._mode.list_kernel, self._failed)
        put_up_hooks(undo, self._on_module_enter, self._on_module_leave, self._on_compiled, failed=self._handler_failed)
        optimizers = OptimizerHooks(
            self._on_optimizer_enter, self._on_optimizer_leave, failed=partial(self._failed, "an optimizer's hook")
        )
        undo.add(optimizers.remove)
        optimizers.put_up()
        undo.enter(watch_functions(self._mode))
        undo.add(self._compiled_backwards.close)
        undo.add(self._repetitions.close)
        self._repetitions.watch()

    def _on_compiled(self, seconds: float) -> None:
        self.compile_sec += seconds
        self._hear_new_kernels()

    def _handler_failed(self, where: str, error: Exception) -> None:
        """A handler that torch called has failed: first removes what nothing else would remove, then reports it."""
        with suppress(Exception):
            state = self._state()
            if state.modes == 0:  # a module has pushed the mode on this thread, and its end may be what failed
                remove(self._mode)
                state.pop_to(1)
        self._failed(where, error)

    def take_data_dependent(self) -> bool:
        """Whether values in tensors have decided sizes since this was last asked."""
        found, self._mode.data_dependent = self._mode.data_dependent, False
        return found

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside, nothing on this thread is counted: for data loading, metrics, logging."""
        state = self._state()
        state.paused += 1
        state.replan()
        try:
            yield
        finally:
            state.paused = max(0, state.paused - 1)
            state.replan()

    @contextmanager
    def in_root(self) -> Iterator[None]:
        """Inside, work outside of module calls is the root's: for a ``training_step``, which is not a module call."""
        with self._running("" if self._root is not None else OUTSIDE, "root"):
            yield

    @contextmanager
    def in_optimizer(self) -> Iterator[None]:
        """Inside, work is the optimizer's: for engines whose steps do not fire torch's optimizer hooks."""
        with self._running(OUTSIDE, "optimizer"):
            yield

    def sweep(self) -> None:
        """Removes from this thread what torch has put back since the counter was left.

        Torch resets a thread's modes after every node of a backward, and after a mode's handler. If a counter is left
        inside one of them, call this outside.
        """
        if not self._entered:
            remove(self._mode)

    @contextmanager
    def _running(self, name: str, kind: RunningKind) -> Iterator[None]:
        state = self._state()
        depth = len(state.stack)
        running = self._enter_running(state, name, None, kind)
        try:
            yield
        finally:
            # Everything above it on the stack has ended by an exception that skips hooks.
            if depth < len(state.stack) and state.stack[depth] is running:
                state.pop_to(depth)

    def record(self) -> FlopRecord:
        """What was counted so far, on all threads."""
        record = merge_records(self._posted_threads(), self._ledger.notes)
        return replace(record, notes=(*record.notes, *self._afterthoughts(record)))

    def _afterthoughts(self, record: FlopRecord) -> Iterator[str]:
        """Sentences about the record as a whole."""
        yield from self._backward.notes()
        if self._root is not None and any(_is_strays(cell) for cell in record.cells):
            made_from = (
                "If it was made from the model, by torch.compile of a function that calls it or by "
                "torch.func.linearize, the model's FLOPs stand under (outside)."
            )
            if self._graph_ran:
                yield f"Traced or compiled code ran outside of the model's modules. {made_from}"
            elif not record.module_calls and not any(_is_models(cell) for cell in record.cells):
                yield f"No module of the model was called while code outside of it was counted. {made_from}"
        hooks = self._reducer_hooks.union(*map(computing_hooks, self._names.modules()))
        if hooks:
            yield (
                f"DistributedDataParallel's communication hook {', '.join(sorted(hooks))} may go on computing on the "
                "process group's threads, where nothing is counted; what it does before counts as the optimizer's."
            )
        for name in formulas_without_operator():
            yield f"A FLOP formula is registered for {name}, and torch knows no operator of that name."

    def total(self) -> PhaseFlops:
        """FLOPs by phase so far, on all threads; cheaper than ``record``."""
        return total_flops(self._posted_threads())

    def _posted_threads(self) -> list[ThreadState]:
        threads = self._ledger.threads()
        for state in threads:
            self._backward.post(state)
        return threads

    # The forward. Torch calls these handlers within the user's step, through a border: what they raise goes to the
    # ledger, which notes it in the report.

    def _enter_running(self, state: ThreadState, name: str, owner: Any, kind: RunningKind) -> Running:
        task = graph_task_id()
        if task != state.task_id:
            self._backward.switch_task(state, task)
        if is_grad_enabled():
            wants_backward, repeats = True, False
        else:
            caller = state.stack[-1]
            wants_backward = repeats = caller.repeats_forward or (
                caller.wants_backward and inside_function_forward(calls=int(kind == "module"))
            )
        books = state.table_of(name, "optimizer") if kind == "optimizer" else name
        running = Running(name, owner, kind, task, books, wants_backward, repeats)
        state.push(running)
        return running

    def _on_module_enter(self, module: nn.Module, args: Any) -> None:
        # This handler and _on_module_leave run for every module of a step. So they begin with the usual case, and make
        # few calls there.
        try:
            state: ThreadState = self._local.state
        except AttributeError:
            state = self._state()
        name = self._names.known.get(module)
        if (
            type(name) is str
            and name != state.books  # a wrapper and the module in it have one name, and count as one call
            and name  # the root is called rarely, and then we look for what has ended without hooks
            and graph_task_id() == state.usual_task
            and is_grad_enabled()
        ):
            # The same as state.push(), without its calls
            spare = state.spare_calls
            call = spare.pop() if spare else ModuleCall()
            call.name, call.owner = name, module
            state.stack.append(call)
            state.books = name
            state.entered.append(name)
            makers, start = state.makers, sequence_number()
            if start > makers.starts[-1]:
                makers.names.append(name)
                makers.starts.append(start)
            else:
                makers.names[-1] = name
            return
        caller = state.stack[-1]
        name = self._name_for(module, caller.name)
        if name is None:
            name = _name_of_replica(state, module, caller)
            if name is None:
                # A loss function, or another model. Inside an optimizer step it shows that a closure is running.
                if caller.kind == "optimizer":
                    self._enter_running(state, OUTSIDE, module, "module")
                elif caller.kind == "base" and isinstance(module, GraphModule):
                    self._graph_ran = True
                elif caller.wants_backward and state.modes and not is_grad_enabled():
                    self._enter_teacher(state, caller.name, module)
                self._reducer_hooks.update(computing_hooks(module))  # it may be a wrapper around the model
                return
        if not name:
            self._drop_ended(state, module)
            caller = state.stack[-1]
        outermost = state.modes == 0 and len(state.stack) == 1
        running = self._enter_running(state, name, module, "module")
        if running.task == NO_GRAPH_TASK and not state.paused:
            wrapped = caller.name == name and caller.kind == "module" and _is_wrapped_by(module, caller.owner)
            if not wrapped:
                state.calls[name] = state.calls.get(name, 0) + 1
        if outermost and not is_pushed(self._mode):
            # A new Python thread does not have our mode, and its autograd nodes get the same numbers as another
            # thread's.
            running.mode_pushed = state.makers.claims = True
            push(self._mode)

    def _drop_ended(self, state: ThreadState, begins: nn.Module) -> None:
        """Removes from the stack what ended without its hooks; *begins* is being called, and is not on the stack yet.

        After an exception that is not an ``Exception``, such as KeyboardInterrupt, torch does not call a module's
        hooks. After an exception of any kind, it does not call an optimizer's hooks.
        """
        stack = state.stack
        depth = len(stack)
        while depth > 1:
            kind, owner = stack[depth - 1].kind, stack[depth - 1].owner
            if kind == "module":
                calls = sum(running.owner is owner for running in stack[:depth]) + (owner is begins)
                ended = has_ended(owner, calls)
            else:
                ended = kind == "optimizer" and owner is not None and not runs_step_of(owner)
            if not ended:
                break
            depth -= 1
        if depth < len(stack):
            mode_pushed = any(running.mode_pushed for running in stack[depth:])
            state.pop_to(depth)
            if mode_pushed:
                remove(self._mode)

    def _enter_teacher(self, state: ThreadState, name: str, module: nn.Module) -> None:
        """A module that is not the root's is called without grad: no backward follows from anything in it.

        This also holds if the forward of an autograd.Function runs in it. A compiler's graph is not such a module: it
        is called without grad because the compiler's own function has a backward.
        """
        if graph_task_id() == NO_GRAPH_TASK and not isinstance(module, GraphModule):
            self._enter_running(state, name, module, "module")

    def _on_module_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        try:
            state: ThreadState = self._local.state
        except AttributeError:
            state = self._state()
        stack = state.stack
        running = stack[-1]
        if type(running) is ModuleCall and running.owner is module and state.task_id == NO_GRAPH_TASK:
            caller = stack[-2]
            if type(caller) is ModuleCall:
                # The same as state.pop_to(), without its calls
                del stack[-1]
                state.spare_calls.append(running)
                name = state.books = caller.name
                makers, start = state.makers, sequence_number()
                if start > makers.starts[-1]:
                    makers.names.append(name)
                    makers.starts.append(start)
                else:
                    makers.names[-1] = name
                return
        if isinstance(module, ScriptModule) and output is not None:  # None if it raised
            for name in unseen_products():
                self._mode.list_kernel(name)
        depth = len(stack) - 1
        while depth > 0 and stack[depth].owner is not module:
            depth -= 1
        if depth == 0:
            return
        mode_pushed = any(running.mode_pushed for running in stack[depth:])
        task = graph_task_id()
        if task != state.task_id:
            self._backward.switch_task(state, task)
        state.pop_to(depth)
        if mode_pushed:
            remove(self._mode)
            self._claim_nodes(state, args, output)
            state.makers.mark(sequence_number(), UNKNOWN)
            state.replicas.clear()
        elif state.stack[-1].kind in ("base", "root") and task == NO_GRAPH_TASK:
            self._watch_backward_of(output)

    @border("an optimizer's pre-hook")
    def _on_optimizer_enter(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        state = self._state()
        for depth, running in enumerate(state.stack):
            if running.owner is optimizer:
                state.pop_to(depth)  # its last step raised, and then no hook is called
                break
        self._enter_running(state, OUTSIDE, optimizer, "optimizer")

    @border("an optimizer's post-hook")
    def _on_optimizer_leave(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        state = self._state()
        for depth in range(len(state.stack) - 1, 0, -1):
            if state.stack[depth].owner is optimizer:
                state.pop_to(depth)
                return

    # Backwards on threads without our dispatch mode. Hooks on autograd nodes live as long as the graph, which the user
    # may keep. So they hold the counter by a weak reference.

    def _watch_backward_of(self, output: Any) -> None:
        """Follows the backward of *output* onto a Python thread on which this counter was not entered."""
        if is_grad_enabled() and not autograd_is_compiled():
            look = self._where_mode_is_missing(FlopCounter._follow_backward)
            before_backward_of(nodes_of(output), look, failed=_failed_in(weakref.ref(self)))

    def _where_mode_is_missing(self, act: Callable[[FlopCounter], None]) -> Callable[[int], None]:
        """A hook that calls *act* before a node's backward if this counter is entered but its mode is not there."""
        reach = weakref.ref(self)

        def look(sequence: int) -> None:
            counter = reach()
            if counter is not None and counter._entered and not is_pushed(counter._mode):
                act(counter)

        return look

    def _follow_backward(self) -> None:
        """A backward runs on a thread without our mode: push the mode for each node behind the running one.

        It has to be each node, because the engine resets a thread's modes after every node.
        """
        self._ledger.note(
            "A backward ran on a Python thread on which the counter was not entered: "
            "what it did outside the model's modules is not counted."
        )
        bring_mode = self._where_mode_is_missing(lambda counter: push(counter._mode))
        before_backward_of(nodes_behind((current_node(),)), bring_mode, failed=_failed_in(weakref.ref(self)))
        push(self._mode)

    def _claim_nodes(self, state: ThreadState, inputs: Any, output: Any) -> None:
        """Hooks the nodes that a module made on a thread of its own: their numbers also occur on other threads."""
        if autograd_is_compiled():
            return
        reach, reach_state = weakref.ref(self), weakref.ref(state)

        def claim(sequence: int) -> None:
            counter, maker = reach(), reach_state()
            if counter is None or maker is None or not counter._entered:
                return
            segment = maker.makers.segment(sequence, sequence + 1)
            if segment is not None:
                if not is_pushed(counter._mode):
                    push(counter._mode)  # the engine removes it after the node
                counter._backward.claim(counter._state(), sequence, segment[0])

        before_backward_of(nodes_behind(nodes_of(output), nodes_of(inputs)), claim, failed=_failed_in(reach))


def _failed_in(reach: weakref.ref[FlopCounter]) -> Callable[[Exception], None]:
    """Returns what tells a counter, if it still exists, that its hook on an autograd node has failed."""

    def failed(error: Exception) -> None:
        counter = reach()
        if counter is not None:
            counter._failed("a backward on another thread", error)

    return failed


def _is_strays(cell: OperatorCell) -> bool:
    return cell.module == OUTSIDE and cell.phase == "forward" and cell.flops > 0


def _is_models(cell: OperatorCell) -> bool:
    """Whether it is a part of the model's forward; compiled code is booked to the model without a call of a module."""
    return cell.module != OUTSIDE and cell.phase == "forward" and cell.flops > 0


def _name_of_replica(state: ThreadState, module: nn.Module, caller: Running | ModuleCall) -> str | None:
    """Name of a module's copy that DataParallel made: it makes copies for each forward, and calls them on threads."""
    if not is_replica(module):
        return None
    name = state.replicas.get(module)
    if name is None and caller.kind == "base":
        state.replicas.update((copy, copy_name) for copy_name, copy in named_modules(module))
        name = state.replicas.get(module)
    return name


def _is_wrapped_by(module: nn.Module, wrapper: Any) -> bool:
    return any(child is module and wraps(wrapper, key) for key, child in children_of(wrapper).items())
