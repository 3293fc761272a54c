"""Whose the running work is: its module and its phase, on one thread.

Autograd numbers the nodes that a thread makes. The numbers at which modules begin and end say which module made a node,
and so whose its backward is. A backward runs with grad disabled; what runs in it with grad enabled repeats a forward.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import is_grad_enabled

from lightning_flops.instrument.counting.books import Books
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

UNKNOWN = "(unknown)"
"""Maker of the nodes of forwards that were not counted."""

_REMEMBERED_TASKS = 256

_WHOLE_BACKWARD = (
    "The backward ran compiled as a whole (compiled autograd), which does not tell its parts apart: all of it stands "
    "under the root, what it repeats of the forward and what hooks of gradients do included."
)


class Running(NamedTuple):
    """A module's forward, the root's own code or an optimizer's step that is running."""

    module: str
    phase: FlopPhase
    owner: Any
    """The module or the optimizer; None for code of neither."""
    task: int
    """The graph task inside which it began."""
    pushed: bool = False
    """Whether the dispatch mode was pushed for it."""
    without_grad: bool = False
    """It runs where grad is disabled, and not by an ``autograd.Function``: no backward follows, whatever it calls."""


class Repetition(NamedTuple):
    """A part of a backward that repeats a forward."""

    manager: Any
    """What enabled grad for it; None if it is a part of the backward's own graph, which runs with grad disabled."""
    task: int
    whole: bool
    """Whether backwards that are started in it are repeated as well."""


@dataclass(slots=True)
class NodeMakers:
    """Which module made the autograd nodes of one thread: those from ``starts[i]`` on are of ``names[i]``."""

    starts: list[int]
    names: list[str]

    def mark(self, start: int, name: str) -> None:
        """From this number on, *name* makes the nodes."""
        if start > self.starts[-1]:
            self.starts.append(start)
            self.names.append(name)
        else:
            self.names[-1] = name

    def insert(self, number: int, name: str) -> None:
        """The module *name* made this one earlier node, whatever ran around it."""
        place = bisect_right(self.starts, number)
        around = self.names[place - 1]
        if around != name:
            self.starts[place:place] = (number, number + 1)
            self.names[place:place] = (name, around)

    def maker(self, number: int) -> str:
        """Who made the node with this number."""
        return self.names[bisect_right(self.starts, number) - 1]


@dataclass(frozen=True, slots=True)
class GraphTask:
    """One backward that autograd runs."""

    owner: int
    """Identifier of the thread whose code started it."""
    create_graph: bool
    makers: tuple[tuple[NodeMakers, int], ...]
    """Tables that may have its nodes, likeliest first, each with the number that its nodes are below."""

    def maker(self, number: int) -> str:
        """Who made the node with this number."""
        for makers, limit in self.makers:
            if number < limit and (name := makers.maker(number)) is not UNKNOWN:
                return name
        return UNKNOWN


class Threads:
    """What the counter knows on every thread.

    Args:
        owner_of: returns the name of the module that holds a parameter.
        unknown: name of the module that backwards of no known module are booked to.
        note: takes a sentence for the report.
    """

    def __init__(self, owner_of: Callable[[Any], str], unknown: str, note: Callable[[str], None]) -> None:
        self.owner_of = owner_of
        self.unknown = unknown
        self.note = note
        self._local = threading.local()
        self._all: list[ThreadState] = []
        self._tasks: dict[int, GraphTask] = {}
        self._lock = threading.RLock()  # what fails while it is held ends the counter, which asks for it again

    def here(self) -> ThreadState:
        """The state of this thread, a new one at first."""
        try:
            state: ThreadState = self._local.state
        except AttributeError:
            state = self._local.state = ThreadState(self)
            with self._lock:
                for other in self._all:
                    if other.ident == state.ident:
                        other.ident = -1  # the system gives an ended thread's identifier to the next one
                self._all.append(state)
        return state

    def all(self) -> list[ThreadState]:
        """The states of all threads."""
        with self._lock:
            return list(self._all)

    def task(self, number: int, state: ThreadState) -> GraphTask:
        """The backward of this number, which *state*'s thread runs."""
        task = self._tasks.get(number)
        if task is None:
            task = self._new_task(state)
            with self._lock:
                self._tasks[number] = task
                while len(self._tasks) > _REMEMBERED_TASKS:
                    del self._tasks[next(iter(self._tasks))]
        return task

    def _new_task(self, state: ThreadState) -> GraphTask:
        """Finds out which thread started a backward, because its nodes have that thread's numbers."""
        others = self.all()
        owners = frozenset(other.graph.owner for other in others if other.graph is not None and other is not state)
        call = find_backward_call(owners)
        owner, creates = (state.ident, is_grad_enabled()) if call is None else (call.thread, call.create_graph)
        ordered = sorted(others, key=lambda other: other.ident != owner)
        here = sequence_number()
        return GraphTask(
            owner,
            creates,
            tuple((other.makers, here if other is state else ACCUMULATES_GRADIENT) for other in ordered),
        )


class ThreadState:
    """What runs on one thread, and what was spent there."""

    def __init__(self, threads: Threads) -> None:
        self._threads: Threads = weakref.proxy(threads)  # which knows the model, and is no part of a cycle with it
        self.ident = threading.get_ident()
        self.books = Books()
        self.entered = 0
        """How many times the counter is entered on this thread."""
        self.paused = 0
        self.functions: list[tuple[Any, FlopPhase]] = []
        """Running functions that have a formula of their own, and the phase in which each was called."""
        self.stack = [Running(OUTSIDE, "forward", None, NO_GRAPH_TASK)]
        self.makers = NodeMakers([-1], [UNKNOWN])
        self.repetitions: list[Repetition] = []
        self.to_repeat: Counter[int] = Counter()
        """FLOPs of the products that the running compiled backward has yet to repeat of its forward."""
        self.graph: GraphTask | None = None
        self._task = NO_GRAPH_TASK
        self._known = 0
        """Inside a backward, nodes with numbers below this have a known maker."""
        self._bore = False
        """Whether nodes were made in the running backward."""

    def mark(self, module: str) -> None:
        """From here on, *module* makes the nodes."""
        self.makers.mark(sequence_number(), module)

    def push(self, running: Running) -> None:
        """Something starts to run."""
        self.stack.append(running)
        self.makers.mark(sequence_number(), running.module)

    def pop_to(self, depth: int) -> None:
        """What is at *depth* of the stack, and above it, has ended."""
        del self.stack[depth:]
        self.makers.mark(sequence_number(), self.stack[-1].module)

    def depth_of(self, owner: Any) -> int:
        """The place on the stack where *owner* runs; 0 if it does not."""
        depth = len(self.stack) - 1
        while depth and self.stack[depth].owner is not owner:
            depth -= 1
        return depth

    def task(self) -> int:
        """Number of the backward that is running on this thread, or ``NO_GRAPH_TASK``."""
        task = graph_task_id()
        if task != self._task:
            self._switch_task(task)
        return task

    def _switch_task(self, task: int) -> None:
        """Another backward runs than before, or none does any more."""
        if self._bore:
            self._mark_births(self.stack[-1].module)
            self._bore = False
        self._task = task
        if task == NO_GRAPH_TASK:
            self.graph = None
            self.repetitions.clear()
            for depth in range(1, len(self.stack)):
                if self.stack[depth].task != NO_GRAPH_TASK:
                    self.pop_to(depth)  # begun in a backward that has ended, and never left
                    break
        else:
            self.graph = self._threads.task(task, self)
            # If the current operator makes a node, it has already made it.
            self._known = sequence_number() - int(is_grad_enabled())

    def place(self, counted: bool) -> tuple[str, FlopPhase]:
        """The module and the phase that an operator belongs to which has just run here.

        Args:
            counted: whether it has a formula.
        """
        task = graph_task_id()
        if task != self._task:
            self._switch_task(task)
        top = self.stack[-1]
        if task == NO_GRAPH_TASK:
            return top.module, top.phase
        repeating = bool(self.repetitions) and (self.repetitions[-1].whole or self.repetitions[-1].task == task)
        if top.task == task:
            # A module called inside this backward, even with create_graph, repeats a forward or inverts it.
            return top.module, "optimizer" if top.phase == "optimizer" else "recompute"
        node = current_node()
        if node is None:
            return self._without_node(), "recompute" if repeating else "backward"
        number = node_sequence(node)
        if number >= ACCUMULATES_GRADIENT:
            # A leaf's gradient: products done here belong to its hooks, such as an optimizer that runs in the backward.
            if counted:
                return OUTSIDE, "optimizer"
            return self._threads.owner_of(getattr(node, "variable", None)), "backward"
        graph = self.graph
        assert graph is not None
        maker = graph.maker(number)
        if repeating or is_grad_enabled():
            self._bear(maker)
            if repeating or not graph.create_graph:
                return maker, "recompute"
        return maker, "backward"

    def _without_node(self) -> str:
        """The module of what runs in a backward, but in none of its nodes."""
        if not whole_backward_is_compiled():
            return OUTSIDE  # at the end of a backward: a reducer's callback
        self._threads.note(_WHOLE_BACKWARD)
        return self._threads.unknown

    def _bear(self, module: str) -> None:
        """Nodes made in a backward since the last operator belong to *module*, whose backward is running."""
        now = sequence_number()
        if now > self._known:
            self._mark_births(module)
            self._known = now
            self._bore = True

    def _mark_births(self, module: str) -> None:
        self.makers.mark(max(self._known, self.makers.starts[-1]), module)
