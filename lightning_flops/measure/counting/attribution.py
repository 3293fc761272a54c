"""Whose the running work is, its module and its phase on one thread; and the sums of all of it.

Autograd numbers the nodes that a thread makes. The numbers at which modules begin and end say which module made a node,
and so whose its backward is. A backward runs with grad disabled; what runs in it with grad enabled repeats a forward.
"""

from __future__ import annotations

import logging
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from operator import add, attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, nn

from lightning_flops.measure.torch_private.needed import (
    ACCUMULATES_GRADIENT,
    NO_GRAPH_TASK,
    current_node,
    graph_task_id,
    node_sequence,
    sequence_number,
)
from lightning_flops.records import OUTSIDE, FlopPhase, FlopRecord, OperatorCell, UncountedOperator
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)


class Place(NamedTuple):
    """Whose an operator is."""

    module: str
    phase: FlopPhase = "forward"
    #: Whether a formula stands for what runs there: of a function or a module, of whose nodes it counts the backward.
    stands: bool = False
    #: Number of the autograd node that the call made, -1 for none. Of a call in no module alone, and where forwards are
    #: separated from what is outside the model; else None.
    made: int | None = None


class Running(NamedTuple):
    """A module's forward, the root's own code, an optimizer's step or a repeated part of a forward that is running."""

    place: Place
    owner: Any  #: The module or the optimizer; for code of neither what ends it, or None if nothing does.
    task: int  #: The graph task inside which it began.
    start: int = 0  #: Number of the first autograd node that it may make.


@dataclass(slots=True, eq=False)
class Backward:
    """A call of backward() or grad() that is running."""

    caller: Nodes  #: Of the thread it was called on, whose numbers its nodes have.
    create_graph: bool
    task: int = NO_GRAPH_TASK  #: Number of its graph task, once that is known.
    #: The nodes of threads that may have made its own, likeliest first, each with the number that its own are below.
    tables: tuple[tuple[Nodes, int], ...] = ()


class Nodes:
    """The autograd nodes that one thread has made, by their numbers."""

    def __init__(self) -> None:
        # The numbers of the next node when counting was entered, of the latest times: a backward may be counted apart
        # from its forward.
        self._entries = deque[int](maxlen=8)
        self._starts = [-1]  # what made the nodes from starts[i] on is makers[i]
        self._makers: list[Place | None] = [None]
        self.graphs: list[tuple[str, int, int]] = []  # of each forward call that made any, its module and their numbers
        self.ran = set[int]()  # the numbers of those whose backward has run an operator, on any thread
        self._unused = Counter[str]()

    def runs(self, number: int) -> Place | None:
        """What made the node with this number, whose backward runs; None: it was made while nothing was counted."""
        maker = self._makers[bisect_right(self._starts, number) - 1]
        if maker is not None:
            self.ran.add(number)
        return maker

    def mark(self, maker: Place | None, start: int) -> None:
        """From the node of number *start* on, *maker* makes the nodes, and made those that there are."""
        if start <= self._starts[-1]:
            first = bisect_left(self._starts, start)
            del self._starts[first:], self._makers[first:]
        self._starts.append(start)
        self._makers.append(maker)

    def insert(self, number: int, maker: Place) -> None:
        """The *maker* made this one earlier node, whatever ran around it."""
        place = bisect_right(self._starts, number)
        self._starts[place:place] = (number, number + 1)
        self._makers[place:place] = (maker, self._makers[place - 1])

    def unused(self, below: int = ACCUMULATES_GRADIENT) -> Counter[str]:
        """By module, the calls that made a graph of nodes *below* a number, none of which has run."""
        ran = sorted(self.ran)
        return self._unused + Counter(
            name
            for name, start, end in self.graphs
            if end <= below and bisect_left(ran, start) == bisect_left(ran, end)
        )

    def forget(self) -> None:
        """Counting begins: what is known of nodes of long ago has no further use."""
        self._entries.append(sequence_number())
        first = self._entries[0]
        old = bisect_left(self._starts, first, lo=1)
        del self._starts[1:old], self._makers[1:old]
        self._unused = self.unused(first)
        self.graphs = [graph for graph in self.graphs if graph[2] > first]
        self.ran = {number for number in self.ran if number >= first}


@dataclass(slots=True)
class Shared:
    """What the threads that run a counter's model know together."""

    unknown: Place  #: Whose the root's own code is, and what backwards of no known module belong to.
    backwards: list[Backward] = field(default_factory=list)  #: Those that are running on any thread, the latest last.
    tables: list[Nodes] = field(default_factory=list)  #: Of all threads.
    entered: set[int] = field(default_factory=set)  #: The threads that have entered the counter.

    def unused_calls(self) -> dict[str, int]:
        """By module, the calls that made a graph no node of which has run; none where no backward was seen."""
        unused = sum((one.unused() for one in self.tables), Counter[str]())
        return dict(unused) if any(one.ran for one in self.tables) else {}

    def backward(self, task: int, nodes: Nodes) -> Backward:
        """The call that started the graph task of this number, which the thread of these *nodes* runs.

        A graph task runs on the thread that called, and on the engine's own threads, one for each device.
        """
        # A call that was not heard: it came before this counter was entered, or from C++.
        unheard = Backward(nodes, is_grad_enabled())
        heard = [one for one in reversed(self.backwards) if one.task in (task, NO_GRAPH_TASK)]
        # Best is the call known by this number, then one without a number: first of this thread, then the latest.
        found = min([*heard, unheard], key=lambda one: (one.task != task, one is unheard, one.caller is not nodes))
        if found.task != task:
            found.task = task
            # What this thread makes from here on are nodes of this backward itself, which it does not run.
            own_begin, no_limit = sequence_number(), ACCUMULATES_GRADIENT
            ordered = sorted(self.tables, key=lambda other: other is not found.caller)
            found.tables = tuple((other, own_begin if other is nodes else no_limit) for other in ordered)
        return found


class ThreadState:
    """What runs on one thread."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared
        self.entered = 0  #: How many times the counter is entered on this thread.
        self.paused = 0
        self.stack = [Running(Place(OUTSIDE), None, NO_GRAPH_TASK)]
        self.nodes = Nodes()
        self.by_graph = False  #: Whether compiled code runs whose products are counted from its graph.
        self._task = NO_GRAPH_TASK
        self._backward = Backward(self.nodes, False)
        self._known = 0  #: The makers of nodes with numbers below this are known.
        shared.tables.append(self.nodes)

    def push(self, module: str, phase: FlopPhase, owner: Any, *, start: int = 0, stands: bool = False) -> None:
        """Something of *owner* starts to run; where *stands*, a formula stands for what runs in there.

        A module called inside a backward, even with create_graph, repeats a forward or inverts it: no formula of the
        backward stands for that.
        """
        task, above = self.task(), self.stack[-1].place
        if phase == "forward" and task != NO_GRAPH_TASK:
            phase = "recompute"
        stands = stands or (above.stands and above.phase == phase)
        self.stack.append(Running(Place(module, phase, stands), owner, task, start))
        self.mark()

    def leave(self, owner: Any) -> Running | None:
        """What *owner* runs here has ended, with all that began in it; None: it runs nothing."""
        depth = len(self.stack) - 1
        while depth and self.stack[depth].owner is not owner:
            depth -= 1
        ended = self.stack[depth] if depth else None
        if depth:
            del self.stack[depth:]
            self.mark()
        return ended

    def mark(self) -> None:
        """What is on top of the stack makes the nodes from here on; whatever stands for it, their backward counts."""
        place, self._known = self.stack[-1].place, sequence_number()
        self.nodes.mark(place._replace(stands=False) if place.stands else place, self._known)

    def task(self) -> int:
        """Number of the backward that is running on this thread, or ``NO_GRAPH_TASK``."""
        task = graph_task_id()
        if task == self._task:
            return task
        self._task = task  # another backward runs than before, or none does any more
        if task == NO_GRAPH_TASK:  # what has begun in a backward that has ended was never left
            self.stack[:] = takewhile(lambda one: one.task == NO_GRAPH_TASK, self.stack)
            self.mark()
        else:
            self._backward = self.shared.backward(task, self.nodes)
            # If the current operator makes a node, it has already made it.
            self._known = sequence_number() - int(is_grad_enabled())
        return task

    def place(self, counted: bool) -> Place:
        """Whose an operator is that has just run here.

        Args:
            counted: whether it has a formula.
        """
        task, top = self.task(), self.stack[-1]
        if task in (NO_GRAPH_TASK, top.task):
            return top.place
        node = current_node()
        if node is None:  # at the end of a backward, a reducer's callback; or all of a backward under compiled autograd
            return Place(OUTSIDE, "backward")
        number = node_sequence(node)
        if number >= ACCUMULATES_GRADIENT:
            # A leaf's gradient: products done here belong to its hooks, such as an optimizer that runs in the backward.
            return Place(OUTSIDE, "optimizer" if counted else "backward")
        makers = (nodes.runs(number) for nodes, limit in self._backward.tables if number < limit)
        maker = next((maker for maker in makers if maker is not None), self.shared.unknown)
        if (is_repeated := is_grad_enabled()) and sequence_number() > self._known:
            # Nodes made in a backward belong to what made the node whose backward is running.
            self.nodes.mark(maker, self._known)
            self.mark()
        is_repeated = is_repeated and not self._backward.create_graph
        return Place(maker.module, "recompute" if is_repeated else "backward", maker.stands)


class Threads(threading.local):
    """The state of each thread: CUDA's device threads run backwards, and number nodes of their own.

    An attribute of this costs much more than one of a state.
    """

    # Python calls this again on each further thread that asks for an attribute, with the same arguments.
    def __init__(self, shared: Shared) -> None:
        self.state = ThreadState(shared)


def reaches(roots: Iterable[Any], leaves: Set[int]) -> bool:
    """Whether a backward from these *roots*, tensors or edges, comes to one of the *leaves*, tensors by their ids."""
    nodes: set[Any] = {getattr(one, "grad_fn", None) or getattr(one, "node", None) for one in roots} - {None}
    seen = set[Any]()
    while nodes:
        if any(id(getattr(node, "variable", None)) in leaves for node in nodes):
            return True
        seen |= nodes
        nodes = {below for node in nodes for below, _ in node.next_functions} - seen - {None}
    return False


# ---- sums of all calls, by module, phase, operator and dtype, and what could not be counted


def operands(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What is the same for two calls of the operator of this *name* on the same memory, laid out in the same way."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    with suppress(RuntimeError, NotImplementedError):  # a tensor without memory is like no other
        if not any(hasattr(one, "fake_mode") for one in tensors):  # asking it for its memory gives it some
            return (name, *((one.data_ptr(), one.dtype, one.shape, one.stride()) for one in tensors))
    return (name, object())


def tf32_operators() -> Callable[[str], bool] | None:
    """Which operators, by name, the CUDA backend would run in TF32 when their tensors are float32, as things stand.

    None without a CUDA device.
    """
    if not torch.cuda.is_available():
        return None
    # The older switches (allow_tf32, set_float32_matmul_precision) set the newer ones too; they raise when asked after
    # these were set on their own, and are all that torch had before 2.9.
    switches = (
        ("cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision", "cuda.matmul.fp32_precision")
        if hasattr(torch.backends.cuda.matmul, "fp32_precision")
        else ("cudnn.allow_tf32", "cudnn.allow_tf32", "cuda.matmul.allow_tf32")
    )
    fast = {
        word: stands in ("tf32", True)
        for word, stands in zip(("conv", "rnn", ""), attrgetter(*switches)(torch.backends), strict=True)
    }
    # The fused kernels that take float32 multiply in float32.
    return lambda name: "attention" not in name and next(on for word, on in fast.items() if word in name)


# What an operator cost in one module, phase and dtype: an ``OperatorCell``'s fields of these names.
_COST = ("calls", "flops", "skipped", "bytes_read", "bytes_written")
_Costs = dict[Any, tuple[int, ...]]


def _add(costs: _Costs, key: tuple[Any, ...], cost: tuple[int, ...]) -> None:
    costs[key] = tuple(map(add, costs[key], cost)) if key in costs else cost


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or of functorch: such a tensor stands for itself
        return id(tensor)


class Totals:
    """What was counted on all threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler of the user's may end the counter while it is held
        self.flops: Counter[tuple[str, str]] = Counter()  # by phase and dtype
        self.calls: dict[str, int] = {}
        self.estimates: dict[str, str] = {}  # operators whose FLOPs are estimates, and where those come from
        #: By the name of a called module: its class, and its matrices, where nothing that is seen reads them.
        self.unread: dict[str, tuple[str, list[Any]]] = {}
        self.asked = set[str]()  # as in ``FlopRecord``
        self._notes: dict[str, None] = {}
        self._failures: set[str] = set()
        self._cells: _Costs = {}  # by module, phase, operator and dtype
        self.separates_outside = False  #: Whether forwards in no module are separated from what is outside the model.
        #: What ran in no module, by ``Place.made``, operator and dtype: until ``decide`` says what it is, and then, if
        #: that was no forward, until ``settle`` knows whether a backward has run its node.
        self._undecided: _Costs = {}
        self._outside: _Costs = {}
        # By operator: calls, modules, whether any call may have had FLOPs
        self._uncounted: dict[str, tuple[int, frozenset[str], bool]] = {}

    def add(
        self,
        place: Place,
        operator: str,
        dtype: str = "",
        *,
        calls: int = 1,
        flops: int = 0,
        skipped: int = 0,
        moved: tuple[int, int] = (0, 0),
    ) -> None:
        """Add calls to what *operator* cost; *dtype* is that of the arithmetic, none where no FLOPs are counted.

        *moved* are the bytes that they read, and those that they wrote.
        """
        module, phase, _, made = place
        with self._lock:
            if module == OUTSIDE and phase == "forward" and made is not None:
                _add(self._undecided, (made, operator, dtype), (calls, flops, skipped, *moved))
            else:
                _add(self._cells, (module, phase, operator, dtype), (calls, flops, skipped, *moved))
            if flops:
                self.flops[phase, dtype] += flops

    def decide(self, *, is_forward: bool) -> None:
        """Say whether what ran in no module, backward or update since the last call of this is a forward."""
        with self._lock:
            for (node, operator, dtype), (calls, flops, *others) in self._undecided.items():
                if is_forward:
                    _add(self._cells, (OUTSIDE, "forward", operator, dtype), (calls, flops, *others))
                else:
                    _add(self._outside, (node, operator, dtype), (calls, flops, *others))
                    self.flops["forward", dtype] -= flops
                    self.flops["outside", dtype] += flops
            self._undecided.clear()

    def settle(self, ran: Set[int]) -> None:
        """Divide what was said to be no forward: whose node *ran* in a backward is one, all else outside the model."""
        with self._lock:
            for (node, operator, dtype), (calls, flops, *others) in self._outside.items():
                phase: FlopPhase = "forward" if node in ran else "outside"
                _add(self._cells, (OUTSIDE, phase, operator, dtype), (calls, flops, *others))
                self.flops["outside", dtype] -= flops
                self.flops[phase, dtype] += flops
            self._outside.clear()

    def called(self, name: str, module: nn.Module, stands: bool) -> None:
        """*module* is called: if it has no others inside, something that is seen has to read its matrices.

        Unless a formula *stands* for what runs there.
        """
        with self._lock:
            self.calls[name] = self.calls.get(name, 0) + 1
        if stands or self.calls[name] > 1 or any(True for _ in module.children()):
            return
        # What is of a library's class may be kept elsewhere.
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
        if matrices := [
            weakref.ref(one) for one in own if type(one) in (nn.Parameter, Tensor) and one.dim() > 1 and one.numel()
        ]:
            self.unread[name] = type(module).__qualname__, matrices

    def read(self, name: str, tensors: Iterable[Tensor], out: Sequence[Tensor] = (), copies: bool = False) -> None:
        """In the module of this name *tensors* were read to make *out*, which is no view of them.

        What only *copies* a matrix makes another, which something has to read in its turn.
        """
        seen = {_storage(one) for one in tensors}.difference(map(_storage, out))
        _, matrices = self.unread.get(name, ("", []))
        if any(_storage(one) in seen for held in matrices if (one := held()) is not None):
            if copies:
                matrices.extend(map(weakref.ref, out))
            else:
                self.unread.pop(name, None)  # another thread may have

    def list(self, operator: str, module: str, may_have_flops: bool) -> None:
        """List one call of an operator that could not be counted."""
        with self._lock:
            calls, modules, may = self._uncounted.get(operator, (0, frozenset(), False))
            self._uncounted[operator] = calls + 1, modules | {module}, may or may_have_flops

    def note(self, sentence: str) -> None:
        """Add a sentence for the report; one that is there already changes nothing."""
        self._notes.setdefault(sentence)

    def failed(self, where: str, error: Exception) -> None:
        """Note that the counter failed in *where*, and say so in the log, the first time of all.

        It raises nothing but what a signal handler of the user's has raised.
        """
        words = words_of(error)
        if where not in self._failures:
            self._failures.add(where)
            sentence = f"Counting failed in {where} ({words}); FLOPs may be missing."
            self.note(sentence)
            logger.log(logging.WARNING if len(self._failures) == 1 else logging.DEBUG, sentence, exc_info=error)

    def record(self) -> FlopRecord:
        """All that was counted; what ran in no module since ``decide`` was last called is forward."""
        with self._lock:
            self.decide(is_forward=True)
            unread = sorted((f"{kind}.forward", name) for name, (kind, _) in self.unread.items())
            silent = {one: [name for other, name in unread if other == one] for one, _ in unread}
            return FlopRecord(
                cells=tuple(
                    OperatorCell(
                        module=module,
                        phase=phase,
                        operator=operator,
                        dtype=dtype,
                        **dict(zip(_COST, cost, strict=True)),
                    )
                    for (module, phase, operator, dtype), cost in sorted(self._cells.items())
                ),
                module_calls=dict(sorted(self.calls.items())),
                asked=tuple(sorted(self.asked)),
                uncounted={
                    operator: UncountedOperator(calls=calls, modules=tuple(sorted(modules)), may_have_flops=may)
                    for operator, (calls, modules, may) in sorted(self._uncounted.items())
                }
                | {
                    kind: UncountedOperator(
                        calls=sum(self.calls[name] for name in names), modules=tuple(names), may_have_flops=True
                    )
                    for kind, names in silent.items()
                },
                notes=(
                    *self._notes,
                    *(f"The FLOPs of {name} are an estimate: {why}." for name, why in sorted(self.estimates.items())),
                ),
            )
