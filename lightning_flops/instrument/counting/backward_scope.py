"""Finds whose backward is running: goes from the running autograd node to the module whose forward made it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch import is_grad_enabled

from lightning_flops.instrument.counting.operator_facts import Operator
from lightning_flops.instrument.counting.thread_state import FORGOTTEN, UNKNOWN, Books, GraphTask, Table, ThreadState
from lightning_flops.instrument.torch_private.autograd import (
    ACCUMULATES_GRADIENT,
    NO_GRAPH_TASK,
    current_node,
    find_backward_call,
    graph_task_id,
    node_sequence,
    sequence_number,
)
from lightning_flops.instrument.torch_private.compiler import whole_backward_is_compiled
from lightning_flops.records import OUTSIDE, FlopPhase

_REMEMBERED_TASKS = 256

_PHASES: tuple[FlopPhase, ...] = ("backward", "recompute")

_MISSING = {
    UNKNOWN: (
        "Some backwards belong to forwards that ran while nothing was counted: they have no module, and what compiled "
        "ones repeat counts as backward."
    ),
    FORGOTTEN: (
        "Modules were called so often between a forward and its backward that the earliest calls were forgotten: their "
        "backward has no module."
    ),
}
"""What the report says of FLOPs in nodes whose maker is not known."""


class BackwardScope:
    """Attributes what autograd runs, on all threads of one counter.

    Args:
        threads: returns the books of all threads.
        owner_of: returns the name of the module that holds a parameter.
        unknown: name of the module to book backwards to whose forward was not counted.
        note: adds a sentence to the report.
    """

    def __init__(
        self,
        *,
        threads: Callable[[], list[ThreadState]],
        owner_of: Callable[[Any], str],
        unknown: str,
        note: Callable[[str], None],
    ) -> None:
        self._threads = threads
        self._owner_of = owner_of
        self._unknown = unknown
        self._note = note
        self._lock = threading.Lock()
        self._tasks: dict[int, GraphTask] = {}

    def switch_task(self, state: ThreadState, task_id: int) -> None:
        """Another backward runs on this thread than before, or none does any more."""
        if state.task is not None:
            self.post(state)  # first: the numbers of its nodes have no meaning in another backward
        state.end_births()
        state.task_id = task_id
        state.segment_end = state.segment_start = 0
        state.claimed = False
        state.task = None
        if task_id == NO_GRAPH_TASK:
            state.repetitions.clear()
            for depth in range(1, len(state.stack)):
                if state.stack[depth].task != NO_GRAPH_TASK:
                    state.pop_to(depth)  # entered in a backward that has ended, and never left
                    break
        else:
            state.task = self._task(state, task_id)
            # If the current operator makes a node, it has already made it.
            state.born = sequence_number() - int(is_grad_enabled())
        state.replan()

    def _task(self, state: ThreadState, task_id: int) -> GraphTask:
        with self._lock:
            task = self._tasks.get(task_id)
            if task is None:
                task = self._tasks[task_id] = self._new_task(state)
                while len(self._tasks) > _REMEMBERED_TASKS:
                    del self._tasks[next(iter(self._tasks))]
            return task

    def _new_task(self, state: ThreadState) -> GraphTask:
        """Finds out which thread started a backward, because its nodes have that thread's numbers."""
        threads = self._threads()
        owners = frozenset(other.task.owner for other in threads if other.task is not None and other is not state)
        call = find_backward_call(owners)
        if call is None:
            owner, create_graph = state.ident, is_grad_enabled()
        else:
            owner, create_graph = call.thread, call.create_graph
        ordered = sorted(threads, key=lambda other: other.ident != owner)
        here = sequence_number()
        return GraphTask(
            owner,
            create_graph,
            tuple(
                (other.makers, here if other is state else None)
                for other in ordered
                if other.makers.starts and not other.makers.claims
            ),
        )

    def claim(self, state: ThreadState, sequence: int, module: str) -> None:
        """The node that runs next on this thread, with this number, was made by *module*."""
        task_id = graph_task_id()
        if task_id != state.task_id:
            self.switch_task(state, task_id)
        state.segment_start, state.segment_end = sequence, sequence + 1
        state.segment_table = self._table(state, module)
        state.claimed = True
        state.replan()

    def table_of(self, state: ThreadState, books: Books | int) -> Table:
        """The table for *books*; an int is the number of an autograd node of the running backward."""
        if isinstance(books, str):
            return state.table_of(books, "forward")
        if isinstance(books, Table):
            return books
        maker = UNKNOWN if state.task is None else state.task.segment(books)[0]
        return self._table(state, maker)

    def post(self, state: ThreadState) -> None:
        """Adds a thread's journals to its tables."""
        state.post(lambda books: self.table_of(state, books))

    def _table(self, state: ThreadState, maker: str, phase: FlopPhase = "backward") -> Table:
        """The table for nodes of this maker; nodes whose maker is not known have a table of their own."""
        if maker not in _MISSING:
            return state.table_of(maker, phase)
        table = state.tables.get((maker, phase))
        if table is None:
            table = state.tables.setdefault((maker, phase), Table(self._unknown, phase))
        return table

    def _recompute(self, state: ThreadState, table: Table) -> Table:
        """The recompute table for nodes whose backward table is *table*."""
        for maker in _MISSING:
            if state.tables.get((maker, "backward")) is table:
                return self._table(state, maker, "recompute")
        return state.table_of(table.module, "recompute")

    def notes(self) -> Iterator[str]:
        """Sentences about FLOPs without a module, if there are any. Call it after all journals are posted."""
        for maker, sentence in _MISSING.items():
            tables = [state.tables.get((maker, phase)) for state in self._threads() for phase in _PHASES]
            if any(cell.flops or cell.repeated for table in tables if table for cell in list(table.values())):
                yield sentence

    def _without_node(self) -> str:
        """The module to book to what runs in a backward, but in none of its nodes."""
        if not whole_backward_is_compiled():
            return OUTSIDE  # at the end of a backward: a reducer's callback
        self._note(
            "The backward ran compiled as a whole (compiled autograd), which does not tell its parts apart: all of it "
            "stands under the root, what it repeats of the forward and what hooks of gradients do included."
        )
        return self._unknown

    def table_of_node(self, state: ThreadState) -> Table | None:
        """Where the costs of the running autograd node go, if ``state.segment_table`` says it; otherwise None."""
        task_id = graph_task_id()
        if task_id != state.task_id:
            self.switch_task(state, task_id)
        node = current_node()
        if node is None or not state.in_backward or state.stack[-1].task == task_id or is_grad_enabled():
            return None
        sequence = node_sequence(node)
        if not state.segment_start <= sequence < state.segment_end:
            if sequence >= ACCUMULATES_GRADIENT or state.task is None:
                return None
            maker, state.segment_start, state.segment_end = state.task.segment(sequence)
            state.segment_table = self._table(state, maker)
        return state.segment_table

    def table(self, state: ThreadState, operator: Operator) -> Table:
        """Where the costs of an operator that runs inside a backward go."""
        top = state.stack[-1]
        if top.task == state.task_id:
            # A module called inside this backward, even with create_graph, is there to repeat a forward.
            repeats = state.repeating or is_grad_enabled()
            return state.table_of(top.name, "recompute" if repeats else "backward")
        node = current_node()
        if node is None:
            return state.table_of(self._without_node(), "recompute" if state.repeating else "backward")
        try:
            sequence = node._sequence_nr()  # the same as node_sequence(), without its call
        except AttributeError:
            sequence = ACCUMULATES_GRADIENT
        if state.segment_start <= sequence < state.segment_end:
            table = state.segment_table
        elif sequence >= ACCUMULATES_GRADIENT:
            # A leaf's gradient: work done here belongs to its hooks, such as an optimizer that runs in the backward.
            if operator.counted:
                return state.table_of(OUTSIDE, "optimizer")
            return state.table_of(self._owner_of(getattr(node, "variable", None)), "backward")
        else:
            assert state.task is not None
            maker, state.segment_start, state.segment_end = state.task.segment(sequence)
            table = state.segment_table = self._table(state, maker)
        if state.repeating or is_grad_enabled():
            state.bear_nodes(table.module)
            creates = state.task is not None and state.task.create_graph
            if state.repeating or not creates:
                return self._recompute(state, table)
        return table
