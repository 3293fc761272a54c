"""Whose the running work is: its module and its phase, on one thread.

Autograd numbers the nodes that a thread makes. The numbers at which modules begin and end say which module made a node,
and so whose its backward is. A backward runs with grad disabled; what runs in it with grad enabled repeats a forward.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from torch import is_grad_enabled

from lightning_flops.measure.torch_private.needed import (
    ACCUMULATES_GRADIENT,
    NO_GRAPH_TASK,
    current_node,
    graph_task_id,
    node_sequence,
    sequence_number,
)
from lightning_flops.records import OUTSIDE, FlopPhase

_KEPT = 8
"""Of so many of its latest entries a thread knows the nodes: a backward may be counted apart from its forward."""


class StoodFor(str):
    """The name of a module that made nodes in a forward that has a formula of its own: it counts their backward."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return str, (str(self),)


class Running(NamedTuple):
    """A module's forward, the root's own code or an optimizer's step that is running."""

    module: str
    phase: FlopPhase
    owner: Any  #: The module or the optimizer; None for code of neither.
    task: int  #: The graph task inside which it began.
    pushed: bool = False  #: Whether the dispatch mode was pushed for it.
    start: int = 0  #: Number of the first autograd node that it may make.


@dataclass(slots=True, eq=False)
class Backward:
    """A call of backward() or grad() that is running."""

    caller: ThreadState  #: Of the thread it was called on, whose numbers its nodes have.
    create_graph: bool
    task: int = NO_GRAPH_TASK  #: Number of its graph task, once that is known.
    #: Threads that may have made its nodes, likeliest first, each with the number that its nodes are below.
    tables: tuple[tuple[ThreadState, int], ...] = ()

    def maker(self, number: int) -> str | None:
        """The module that made the node with this number; None: it was made while nothing was counted."""
        makers = (
            state.makers[bisect_right(state.starts, number) - 1] for state, limit in self.tables if number < limit
        )
        return next((maker for maker in makers if maker is not None), None)


class Threads(threading.local):
    """What the counter knows on every thread: CUDA's device threads run backwards, and number nodes of their own."""

    # Python calls this again on each further thread that asks for an attribute, with the same arguments.
    def __init__(self, backwards: list[Backward], states: list[ThreadState], unknown: str) -> None:
        self.backwards = backwards
        """Backwards that are running on any thread, the latest last."""
        self.states = states
        """The states of all threads."""
        self.unused = Counter[str]()
        """By module, the calls whose graph had not run when it was forgotten."""
        self.unknown = unknown
        """The module that backwards of no known module are attributed to."""
        self.state = ThreadState(self)
        """The state of this thread."""
        states.append(self.state)

    def unused_calls(self) -> dict[str, int]:
        """By module, the calls that made a graph no node of which has run; none where no backward was seen."""
        ran = sorted(set[int]().union(*(state.ran for state in self.states)))
        graphs = chain.from_iterable(state.graphs for state in self.states)
        return dict(self.unused + _unused(graphs, ran)) if ran else {}

    def forget(self) -> None:
        """A thread starts to count: what it knows of nodes of long ago has no further use."""
        state = self.state
        state.entries.append(sequence_number())
        first = state.entries[0]
        old = bisect_left(state.starts, first, lo=1)
        del state.starts[1:old], state.makers[1:old]
        if forgotten := [graph for graph in state.graphs if graph[2] <= first]:
            ran = sorted(set[int]().union(*(other.ran for other in self.states)))
            self.unused += _unused(forgotten, ran)
            del state.graphs[: len(forgotten)]
            for other in self.states:
                other.ran -= set(ran[: bisect_left(ran, first)])

    def backward(self, task: int, state: ThreadState) -> Backward:
        """The call that started the graph task of this number, which *state*'s thread runs.

        A graph task runs on the thread that called, and on the engine's own threads, one for each device.
        """
        running = self.backwards[::-1]
        if known := next((one for one in running if one.task == task), None):
            return known
        waiting = [one for one in running if one.task == NO_GRAPH_TASK]
        # It may have been called before this counter was entered, or by C++.
        found = next((one for one in waiting if one.caller is state), None) or next(iter(waiting), None)
        if found is None:
            found = Backward(state, is_grad_enabled())
            self.backwards.append(found)
        number, found.task = sequence_number(), task
        ordered = sorted(self.states, key=lambda other: other is not found.caller)
        found.tables = tuple((other, number if other is state else ACCUMULATES_GRADIENT) for other in ordered)
        return found


class ThreadState:
    """What runs on one thread."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.entered = 0
        """How many times the counter is entered on this thread."""
        self.paused = 0
        self.functions: list[FlopPhase] = []
        """The phase in which each running function was called that has a formula of its own."""
        self.stack = [Running(OUTSIDE, "forward", None, NO_GRAPH_TASK)]
        self.entries = deque[int](maxlen=_KEPT)
        """The numbers of the next node when counting was entered on this thread."""
        self.starts = [-1]
        self.makers: list[str | None] = [None]
        """The module that made this thread's autograd nodes from ``starts[i]`` on is ``makers[i]``."""
        self.graphs: list[tuple[str, int, int]] = []
        """Of each forward call that made autograd nodes its module, and the numbers of these nodes."""
        self.ran: set[int] = set()
        """The numbers of nodes whose backward has run an operator on this thread."""
        self.repetitions: list[tuple[Any, int]] = []
        """What enabled grad inside a backward to repeat a part of a forward, and the backward's graph task.

        Gradients that are taken in there are those of another task, and the backward's.
        """
        self.by_graph = False
        """Whether compiled code runs whose products are counted from its graph."""
        self._task = NO_GRAPH_TASK
        self._backward = Backward(self, False)
        self._known = 0
        """Inside a backward, nodes with numbers below this have a known maker."""
        self._made_nodes = False
        """Whether nodes were made in the running backward."""

    def mark(self, module: str | None, start: int | None = None) -> None:
        """From the node of number *start* on, by default the next one, *module* makes the nodes."""
        start = sequence_number() if start is None else start
        if start > self.starts[-1]:
            self.starts.append(start)
            self.makers.append(module)
        else:
            self.makers[-1] = module

    def insert(self, number: int, module: str) -> None:
        """The *module* made this one earlier node, whatever ran around it."""
        place = bisect_right(self.starts, number)
        around = self.makers[place - 1]
        if around != module:
            self.starts[place:place] = (number, number + 1)
            self.makers[place:place] = (module, around)

    def stand_for(self, start: int, module: str) -> None:
        """The nodes from number *start* on were made in a forward of *module* that has a formula of its own."""
        first = bisect_left(self.starts, start)
        del self.starts[first:], self.makers[first:]
        self.mark(StoodFor(module), start)
        self.mark(self.stack[-1].module)

    def stands_for(self, module: str, phase: FlopPhase) -> bool:
        """Whether a formula stands for what has just run in *module*, as `place` has it."""
        return phase in self.functions[-1:] or type(module) is StoodFor

    def push(self, running: Running) -> None:
        """Something starts to run."""
        self.stack.append(running)
        self.mark(running.module)

    def pop_to(self, depth: int) -> None:
        """What is at *depth* of the stack, and above it, has ended."""
        del self.stack[depth:]
        self.mark(self.stack[-1].module)

    def depth_of(self, owner: Any) -> int:
        """The place on the stack where *owner* runs; 0 if it does not."""
        depth = len(self.stack) - 1
        while depth and self.stack[depth].owner is not owner:
            depth -= 1
        return depth

    def stop(self) -> None:
        """Counting ends on this thread."""
        del self.stack[1:]
        self.mark(None)
        self.paused, self.by_graph = 0, False
        self.functions.clear()
        self.repetitions.clear()

    def task(self) -> int:
        """Number of the backward that is running on this thread, or ``NO_GRAPH_TASK``."""
        task = graph_task_id()
        if task != self._task:
            self._switch_task(task)
        return task

    def _switch_task(self, task: int) -> None:
        """Another backward runs than before, or none does any more."""
        if self._made_nodes:
            self._own_nodes(self.stack[-1].module)
            self._made_nodes = False
        self._task = task
        if task == NO_GRAPH_TASK:
            self.repetitions.clear()
            for depth in range(1, len(self.stack)):
                if self.stack[depth].task != NO_GRAPH_TASK:
                    self.pop_to(depth)  # begun in a backward that has ended, and never left
                    break
        else:
            self._backward = self._threads.backward(task, self)
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
        if top.task == task:
            # A module called inside this backward, even with create_graph, repeats a forward or inverts it.
            return top.module, "optimizer" if top.phase == "optimizer" else "recompute"
        repeating = bool(self.repetitions) and self.repetitions[-1][1] == task
        node = current_node()
        if node is None:
            # At the end of a backward, a reducer's callback; or all of a backward under compiled autograd
            return OUTSIDE, "recompute" if repeating else "backward"
        number = node_sequence(node)
        if number >= ACCUMULATES_GRADIENT:
            # A leaf's gradient: products done here belong to its hooks, such as an optimizer that runs in the backward.
            return OUTSIDE, "optimizer" if counted else "backward"
        self.ran.add(number)
        maker = self._backward.maker(number)
        maker = self._threads.unknown if maker is None else maker
        if not (repeating or is_grad_enabled()):
            return maker, "backward"
        now = sequence_number()
        if now > self._known:  # nodes made in a backward belong to the module whose backward is running
            self._own_nodes(maker)
            self._known = now
            self._made_nodes = True
        return maker, "recompute" if repeating or not self._backward.create_graph else "backward"

    def _own_nodes(self, module: str) -> None:
        self.mark(module, max(self._known, self.starts[-1]))


def _unused(graphs: Iterable[tuple[str, int, int]], ran: Sequence[int]) -> Counter[str]:
    """By module, the calls in whose *graphs* no node *ran*."""
    return Counter(name for name, start, end in graphs if bisect_left(ran, start) == bisect_left(ran, end))


def reaches(roots: Iterable[Any], leaves: Set[int]) -> bool:
    """Whether a backward from these *roots*, tensors or edges, comes to one of the *leaves*, tensors by their ids."""
    nodes = [getattr(one, "grad_fn", None) or getattr(one, "node", None) for one in roots]
    seen = set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        if id(getattr(node, "variable", None)) in leaves:
            return True
        seen.add(node)
        nodes.extend(below for below, _ in node.next_functions)
    return False
