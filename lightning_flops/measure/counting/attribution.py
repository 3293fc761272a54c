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

#: Of so many of its latest entries a thread knows the nodes: a backward may be counted apart from its forward.
_KEPT = 8


class StoodFor(str):
    """The name of a module that made nodes in a forward that has a formula of its own: it counts their backward."""

    __slots__ = ()

    def __reduce__(self) -> Any:
        return str, (str(self),)


class Running(NamedTuple):
    """A module's forward, the root's own code or an optimizer's step that is running."""

    module: str
    phase: FlopPhase
    owner: Any  #: The module or the optimizer; for code of neither what ends it, or None if nothing does.
    task: int  #: The graph task inside which it began.
    pushed: bool = False  #: Whether the dispatch mode was pushed for it.
    start: int = 0  #: Number of the first autograd node that it may make.


@dataclass(slots=True, eq=False)
class Backward:
    """A call of backward() or grad() that is running."""

    caller: ThreadState  #: Of the thread it was called on, whose numbers its nodes have.
    create_graph: bool
    task: int = NO_GRAPH_TASK  #: Number of its graph task, once that is known.
    #: The nodes of threads that may have made its own, likeliest first, each with the number that its own are below.
    tables: tuple[tuple[Nodes, int], ...] = ()

    def maker(self, number: int) -> str | None:
        """The module that made the node with this number; None: it was made while nothing was counted."""
        makers = (nodes.maker(number) for nodes, limit in self.tables if number < limit)
        return next((maker for maker in makers if maker is not None), None)


class Nodes:
    """The autograd nodes that one thread has made, by their numbers."""

    def __init__(self) -> None:
        self._entries = deque[int](maxlen=_KEPT)  # the numbers of the next node when counting was entered
        self._starts = [-1]  # the module that made the nodes from starts[i] on is makers[i]
        self._makers: list[str | None] = [None]
        self.graphs: list[tuple[str, int, int]] = []  # of each forward call that made any, its module and their numbers

    def maker(self, number: int) -> str | None:
        """The module that made the node with this number; None: it was made while nothing was counted."""
        return self._makers[bisect_right(self._starts, number) - 1]

    def mark(self, module: str | None, start: int | None = None) -> None:
        """From the node of number *start* on, by default the next one, *module* makes the nodes."""
        start = sequence_number() if start is None else start
        if start > self._starts[-1]:
            self._starts.append(start)
            self._makers.append(module)
        else:
            self._makers[-1] = module

    def insert(self, number: int, module: str) -> None:
        """The *module* made this one earlier node, whatever ran around it."""
        place = bisect_right(self._starts, number)
        around = self._makers[place - 1]
        if around != module:
            self._starts[place:place] = (number, number + 1)
            self._makers[place:place] = (module, around)

    def mark_anew(self, module: str, start: int) -> None:
        """It was *module* that made all nodes from number *start* on."""
        first = bisect_left(self._starts, start)
        del self._starts[first:], self._makers[first:]
        self.mark(module, start)

    def forget(self) -> int:
        """Counting begins: what is known of nodes of long ago has no further use; the number of the first that has."""
        self._entries.append(sequence_number())
        first = self._entries[0]
        old = bisect_left(self._starts, first, lo=1)
        del self._starts[1:old], self._makers[1:old]
        return first


class Threads(threading.local):
    """What the counter knows on every thread: CUDA's device threads run backwards, and number nodes of their own."""

    # Python calls this again on each further thread that asks for an attribute, with the same arguments.
    def __init__(self, backwards: list[Backward], states: list[ThreadState], ran: set[int], unknown: str) -> None:
        self.backwards = backwards  #: Backwards that are running on any thread, the latest last.
        self.states = states  #: The states of all threads.
        self.ran = ran  #: The numbers of nodes whose backward has run an operator, on any thread.
        self.unused = Counter[str]()  #: By module, the calls whose graph had not run when it was forgotten.
        self.unknown = unknown  #: The module that backwards of no known module are attributed to.
        self.state = ThreadState(self)  #: The state of this thread.
        states.append(self.state)

    def unused_calls(self) -> dict[str, int]:
        """By module, the calls that made a graph no node of which has run; none where no backward was seen."""
        graphs = chain.from_iterable(state.nodes.graphs for state in self.states)
        return dict(self.unused + _unused(graphs, sorted(self.ran))) if self.ran else {}

    def forget(self) -> None:
        """A thread starts to count: what it knows of nodes of long ago has no further use."""
        nodes = self.state.nodes
        first = nodes.forget()
        if forgotten := [graph for graph in nodes.graphs if graph[2] <= first]:
            ran = sorted(self.ran)
            self.unused += _unused(forgotten, ran)
            del nodes.graphs[: len(forgotten)]
            self.ran -= set(ran[: bisect_left(ran, first)])

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
        found.tables = tuple((other.nodes, number if other is state else ACCUMULATES_GRADIENT) for other in ordered)
        return found


class ThreadState:
    """What runs on one thread."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self.entered = 0  #: How many times the counter is entered on this thread.
        self.paused = 0
        #: The phase in which each running function was called that has a formula of its own.
        self.functions: list[FlopPhase] = []
        self.stack = [Running(OUTSIDE, "forward", None, NO_GRAPH_TASK)]
        self.nodes = Nodes()
        #: What enabled grad inside a backward to repeat a part of a forward, and the backward's graph task.
        #: Gradients that are taken in there are those of another task, and the backward's.
        self.repetitions: list[tuple[Any, int]] = []
        self.by_graph = False  #: Whether compiled code runs whose products are counted from its graph.
        self._task = NO_GRAPH_TASK
        self._backward = Backward(self, False)
        self._known = 0  #: Inside a backward, nodes with numbers below this have a known maker.
        self._made_nodes = False  #: Whether nodes were made in the running backward.

    def stand_for(self, start: int, module: str) -> None:
        """The nodes from number *start* on were made in a forward of *module* that has a formula of its own."""
        self.nodes.mark_anew(StoodFor(module), start)
        self.nodes.mark(self.stack[-1].module)

    def stands_for(self, module: str, phase: FlopPhase) -> bool:
        """Whether a formula stands for what has just run in *module*, as `place` has it."""
        return phase in self.functions[-1:] or type(module) is StoodFor

    def push(self, running: Running) -> None:
        """Something starts to run."""
        self.stack.append(running)
        self.nodes.mark(running.module)

    def pop_to(self, depth: int) -> None:
        """What is at *depth* of the stack, and above it, has ended."""
        del self.stack[depth:]
        self.nodes.mark(self.stack[-1].module)

    def depth_of(self, owner: Any) -> int:
        """The place on the stack where *owner* runs; 0 if it does not."""
        depth = len(self.stack) - 1
        while depth and self.stack[depth].owner is not owner:
            depth -= 1
        return depth

    def stop(self) -> None:
        """Counting ends on this thread."""
        del self.stack[1:]
        self.nodes.mark(None)
        self.paused = 0
        self.by_graph = False
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
            self.nodes.mark(self.stack[-1].module, self._known)
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
        task, top = self.task(), self.stack[-1]
        if task == NO_GRAPH_TASK:
            return top.module, top.phase
        if top.task == task:
            # A module called inside this backward, even with create_graph, repeats a forward or inverts it.
            return top.module, "optimizer" if top.phase == "optimizer" else "recompute"
        return self._in_backward(task, counted)

    def _in_backward(self, task: int, counted: bool) -> tuple[str, FlopPhase]:
        """The same where the running node says it."""
        repeating = bool(self.repetitions) and self.repetitions[-1][1] == task
        node = current_node()
        if node is None:
            # At the end of a backward, a reducer's callback; or all of a backward under compiled autograd
            return OUTSIDE, "recompute" if repeating else "backward"
        number = node_sequence(node)
        if number >= ACCUMULATES_GRADIENT:
            # A leaf's gradient: products done here belong to its hooks, such as an optimizer that runs in the backward.
            return OUTSIDE, "optimizer" if counted else "backward"
        self._threads.ran.add(number)
        maker = self._backward.maker(number)
        if maker is None:
            maker = self._threads.unknown
        if not (repeating or is_grad_enabled()):
            return maker, "backward"
        now = sequence_number()
        if now > self._known:  # nodes made in a backward belong to the module whose backward is running
            self.nodes.mark(maker, self._known)
            self._known = now
            self._made_nodes = True
        return maker, "recompute" if repeating or not self._backward.create_graph else "backward"


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
