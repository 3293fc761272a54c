"""What the counter knows on one thread: the modules that run, who made which autograd node, and what was spent."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Union

from lightning_flops.instrument.torch_private.autograd import NO_GRAPH_TASK, sequence_number
from lightning_flops.records import OUTSIDE, FlopPhase

UNKNOWN = "(unknown)"
"""Maker of the autograd nodes that were made while nothing was counted."""

FORGOTTEN = "(forgotten)"
"""Maker of those that were made so long ago that nobody remembers by whom."""

ENDED = -1
"""Identifier of the threads that are known to have ended."""

_NO_LIMIT = 1 << 62

_NEVER = -2
"""Id of no graph task, nor of there being none."""

_LONGEST_TABLE = 1 << 20
"""Boundaries of autograd nodes kept on a thread; the older half goes when there are more."""


Books = Union[str, "Table"]
"""Where costs go: a module's name stands for its forward's table, which is not looked up until it is needed."""

RunningKind = Literal["base", "module", "root", "optimizer"]

Segment = tuple[str, int, int]
"""Autograd nodes of consecutive numbers: who made them, the first number, the first that is not one of them."""


class Cell:
    """What one operator spent in one module and phase."""

    # Most cells stand for one call of an operator without FLOPs: three numbers are their own, the rest is the class's.
    __slots__ = ("calls", "read", "written")

    dtype: Any = None
    """Of the arithmetic; None where nothing is counted."""
    flops: int = 0
    skipped: int = 0
    without_backward: int = 0
    hidden_grad_flops: int = 0
    """FLOPs run with grad disabled inside an autograd.Function, where tensors do not say who needs a gradient."""
    repeated: int = 0
    """FLOPs with which a fused attention's backward repeats its forward: the recompute phase's."""
    repeated_skipped: int = 0

    def __init__(self, calls: int, read: int, written: int) -> None:
        self.calls = calls
        self.read = read
        self.written = written


class CountedCell(Cell):
    """What one operator, in one dtype of its arithmetic, spent in one module and phase."""

    __slots__ = ("dtype", "flops", "hidden_grad_flops", "repeated", "repeated_skipped", "skipped", "without_backward")

    def __init__(self, dtype: Any) -> None:
        self.calls = self.read = self.written = 0
        self.dtype = dtype
        self.flops = self.without_backward = self.hidden_grad_flops = 0
        self.skipped = self.repeated = self.repeated_skipped = 0


class Table(dict[Any, Cell]):
    """Cells of one module and phase: by operator, and where FLOPs were counted by (operator, dtype)."""

    __slots__ = ("module", "phase")

    def __init__(self, module: str, phase: FlopPhase) -> None:
        # dict.__init__ has nothing to do here, and there is a table for every module.
        self.module = module
        self.phase: FlopPhase = phase

    def cell(self, operator: Any) -> Cell:
        """The cell of an operator whose FLOPs were not counted; a new one at first."""
        cell = self.get(operator)
        if cell is None:
            cell = self.setdefault(operator, Cell(0, 0, 0))
        return cell

    def counted_cell(self, operator: Any, dtype: Any) -> CountedCell:
        """The cell of an operator whose FLOPs were counted, with arithmetic in *dtype*; a new one at first."""
        key = (operator, dtype)
        cell = self.get(key)
        if cell is None:
            cell = self.setdefault(key, CountedCell(dtype))
        return cell  # type: ignore[return-value]  # under such keys there are no others


class ModuleCall:
    """A module that is running on a thread, called in the usual way: see ``ThreadState.usual_task``."""

    # One is needed for every module call of a step: two things are its own, all else is the class's.
    __slots__ = ("name", "owner")

    name: str
    """Whose work it is."""
    owner: Any
    """The module."""

    kind: RunningKind = "module"
    task = NO_GRAPH_TASK
    wants_backward = True
    repeats_forward = False
    mode_pushed = False

    @property
    def books(self) -> Books:
        """Where its operators are booked outside any backward."""
        return self.name


class Running:
    """An optimizer step, the root's own code, or a module called otherwise than usual, that is running on a thread.

    Args:
        name: whose work it is.
        owner: the module or the optimizer; None for the root's own code.
        kind: what it is.
        task: the graph task inside which it was entered.
        books: where its operators are booked outside any backward.
        wants_backward: whether a backward may follow: grad was on when it was entered, or *repeats_forward* says so.
        repeats_forward: it was entered with grad off inside an autograd.Function's forward, such as reentrant
            checkpointing's.
    """

    __slots__ = ("books", "kind", "mode_pushed", "name", "owner", "repeats_forward", "task", "wants_backward")

    def __init__(
        self,
        name: str,
        owner: Any,
        kind: RunningKind,
        task: int,
        books: Books,
        wants_backward: bool,
        repeats_forward: bool = False,
    ) -> None:
        self.name = name
        self.owner = owner
        self.kind: RunningKind = kind
        self.task = task
        self.books = books
        self.wants_backward = wants_backward
        self.repeats_forward = repeats_forward
        self.mode_pushed = False
        """The dispatch mode came to this thread with it, and leaves with it."""


class Repetition(NamedTuple):
    """A block of code inside a backward that repeats a forward."""

    manager: Any
    """What enabled grad for it; None where it is a part of the backward's own graph, in which grad is disabled."""
    task: int
    """The graph task inside which it runs."""
    whole: bool
    """The backwards that are started in it are repeated as well."""


@dataclass(slots=True)
class NodeMakers:
    """Which module made the autograd nodes of one thread: boundaries in their sequence numbers.

    The nodes from ``starts[i]`` up to ``starts[i + 1]`` were made by the module named ``names[i]``.
    """

    starts: list[int]
    names: list[str]
    claims: bool = False
    """A module was called on this thread without our mode: its nodes tell themselves whose they are."""

    def mark(self, start: int, name: str) -> None:
        """From sequence number *start* on, nodes are made by *name*."""
        starts, names = self.starts, self.names
        if starts:
            if start <= starts[-1]:
                if len(starts) > 1 and names[-2] == name:
                    starts.pop()
                    names.pop()
                else:
                    names[-1] = name
                return
            if names[-1] == name:
                return
        starts.append(start)
        names.append(name)

    def trim(self) -> None:
        """Forgets who made the oldest nodes, when they are very many."""
        if len(self.starts) > _LONGEST_TABLE:
            self.names[0] = FORGOTTEN
            del self.starts[1 : -_LONGEST_TABLE // 2], self.names[1 : -_LONGEST_TABLE // 2]

    def insert(self, sequence: int, name: str) -> None:
        """One past node was made by *name*, whatever ran around it."""
        index = bisect_right(self.starts, sequence) - 1
        if index < 0 or self.names[index] == name:
            return
        around = self.names[index]
        ends = index + 1 < len(self.starts) and self.starts[index + 1] == sequence + 1
        if self.starts[index] == sequence:
            self.names[index] = name
            if not ends:
                self.starts.insert(index + 1, sequence + 1)
                self.names.insert(index + 1, around)
            return
        self.starts.insert(index + 1, sequence)
        self.names.insert(index + 1, name)
        if not ends:
            self.starts.insert(index + 2, sequence + 1)
            self.names.insert(index + 2, around)

    def segment(self, sequence: int, limit: int) -> Segment | None:
        """Who made the node of this number, and which numbers below *limit* are the same's; None if it is too old."""
        starts = self.starts
        index = bisect_right(starts, sequence)
        if index == 0:
            return None
        end = starts[index] if index < len(starts) else limit
        return self.names[index - 1], starts[index - 1], limit if limit < end else end


@dataclass(slots=True)
class GraphTask:
    """One backward that autograd runs."""

    owner: int
    """Identifier of the thread whose code started it."""
    create_graph: bool
    makers: tuple[tuple[NodeMakers, int | None], ...]
    """Tables in which its nodes may stand, likeliest first, each with the number its nodes stay below, if known."""

    def segment(self, sequence: int) -> Segment:
        """Who made the node of this number, and the numbers around it of which the same is known."""
        for place, (table, limit) in enumerate(self.makers):
            if limit is None or sequence < limit:
                segment = table.segment(sequence, _NO_LIMIT if limit is None else limit)
                if segment is not None:
                    # In a later table a neighbour's number may also stand in an earlier one.
                    return segment if place == 0 else (segment[0], sequence, sequence + 1)
        return UNKNOWN, sequence, sequence + 1


class ThreadState:
    """The counter's books on one thread."""

    # Most of these are read at every operator: a slot is found sooner than an entry of a dictionary.
    __slots__ = (
        "__weakref__",
        "bodies",
        "books",
        "bore",
        "born",
        "by_number",
        "calls",
        "claimed",
        "entered",
        "entered_at",
        "functions",
        "ident",
        "in_backward",
        "listed",
        "lock",
        "makers",
        "modes",
        "paused",
        "products",
        "repeating",
        "repetitions",
        "replicas",
        "segment_end",
        "segment_start",
        "segment_table",
        "spare_calls",
        "special",
        "stack",
        "tables",
        "task",
        "task_id",
        "traffic",
        "usual_task",
    )

    def __init__(self) -> None:
        self.ident = threading.get_ident()
        self.tables: dict[tuple[str, FlopPhase], Table] = {}
        self.calls: dict[str, int] = {}
        # What the hot path writes down, in the order it happens, and what is added to the tables and calls above by
        # post(). A row takes a fraction of the memory of what it is added to: memory, more than instructions, is what
        # an operator costs that is run between a model's own.
        self.traffic: list[Any] = []
        """For each operator without a formula: the operator, its books, bytes read, bytes written."""
        self.products: list[Any] = []
        """For each one with a formula: the same, FLOPs, dtype of the arithmetic, FLOPs no backward can follow from."""
        self.entered: list[str] = []
        """Modules called in the usual way."""
        self.lock = threading.RLock()
        """Held while the journals are posted: another thread may ask for the record."""
        self.listed: dict[tuple[str, str], list[int]] = {}
        """(operator, module) -> [calls, output elements, whether any call may have spent FLOPs]."""
        self.modes = 0
        """How often the counter was entered on this thread."""
        self.entered_at = 1
        """Length of the stack when it was entered first."""
        self.paused = 0
        self.functions: list[Any] = []
        """Autograd functions and kernels with a formula of their own that are running."""
        self.bodies: list[Any] = []
        """Kernels in Python that are running, each a ``BodyWatch``."""
        self.makers = NodeMakers([], [])
        self.special = False
        """Something on this thread keeps operators off the shortest way."""
        self.books: Books = OUTSIDE
        """Where operators outside backwards are booked."""
        self.stack: list[Running | ModuleCall] = [Running(OUTSIDE, None, "base", NO_GRAPH_TASK, OUTSIDE, True)]
        self.spare_calls: list[ModuleCall] = []
        """Those that have ended, to be used again."""
        self.usual_task = _NEVER
        """Modules are called in the usual way where this is the graph task, and grad is enabled.

        It is the id of none where the counter was entered on this thread, no backward runs and nothing is paused; else
        it is never the id.
        """
        self.replicas: dict[Any, str] = {}
        # Where the next operator's costs go, as are the books above; kept current by replan().
        self.task_id = NO_GRAPH_TASK
        self.task: GraphTask | None = None
        self.in_backward = False
        # Of the last autograd node seen: its neighbours, whose operators need no look-up.
        self.segment_start = 0
        self.segment_end = 0
        self.segment_table = self.table_of(OUTSIDE, "backward")
        self.claimed = False
        """The segment says more about its nodes than their numbers do; call replan() after a change."""
        self.repetitions: list[Repetition] = []
        """Those that are running, innermost last."""
        self.repeating = False
        """What runs is part of a repetition."""
        self.by_number = False
        """In a backward, the running node's number says whose the work is, where grad is disabled."""
        self.born = 0
        """Inside a backward, the nodes below this number have their maker."""
        self.bore = False
        """Nodes were born in the running backward, by code that no module call owns."""

    @property
    def table(self) -> Table:
        """Where operators outside backwards are booked."""
        books = self.books
        return self.table_of(books, "forward") if isinstance(books, str) else books

    def table_of(self, module: str, phase: FlopPhase) -> Table:
        """The cells of this module and phase."""
        key = (module, phase)
        table = self.tables.get(key)
        if table is None:
            table = self.tables.setdefault(key, Table(module, phase))  # another thread may post, and make it meanwhile
        return table

    def post(self, table_of: Callable[[Books | int], Table]) -> None:
        """Adds what was written down to the tables.

        Args:
            table_of: answers with the table that books, or the number of an autograd node, stand for.
        """
        with self.lock:
            for operator, books, read, written in _rows(self.traffic, 4):
                table = table_of(books)
                known = table.get(operator)
                if known is None:
                    known = table.cell(operator)
                known.calls += 1
                known.read += read
                known.written += written
            for operator, books, read, written, flops, dtype, without_backward in _rows(self.products, 7):
                cell = table_of(books).counted_cell(operator, dtype)
                cell.calls += 1
                cell.read += read
                cell.written += written
                cell.flops += flops
                cell.without_backward += without_backward
            calls = self.calls
            for (name,) in _rows(self.entered, 1):
                calls[name] = calls.get(name, 0) + 1
            if self.ident == threading.get_ident():
                self.makers.trim()  # another thread would shorten the table under a look-up

    def replan(self) -> None:
        """Works out anew where costs go, and what may go the shortest way.

        To be called when the stack or the graph task has changed, and when the counter, a pause, a repetition, or a
        function with a formula has begun or ended.
        """
        top = self.stack[-1]
        self.books = top.books
        task = self.task_id
        self.special = bool(self.paused or self.functions)
        usual = task == NO_GRAPH_TASK and self.modes > 0 and not self.paused
        self.usual_task = NO_GRAPH_TASK if usual else _NEVER
        self.in_backward = task != NO_GRAPH_TASK and not (top.kind == "optimizer" and top.task == task)
        self.repeating = False
        if self.repetitions:
            innermost = self.repetitions[-1]
            self.repeating = innermost.whole or innermost.task == task
        self.by_number = self.in_backward and top.task != task and not self.claimed and not self.repeating

    def bear_nodes(self, module: str) -> None:
        """Nodes made in a backward since the last operator are this module's, whose backward bears them."""
        now = sequence_number()
        if now > self.born:
            self._mark_births(module)
            self.born = now
            self.bore = True

    def end_births(self) -> None:
        """From here on nodes are made by what stands on the stack again."""
        if self.bore:
            self._mark_births(self.stack[-1].name)
            self.bore = False

    def _mark_births(self, module: str) -> None:
        starts = self.makers.starts
        self.makers.mark(max(self.born, starts[-1]) if starts else self.born, module)

    def push(self, running: Running) -> None:
        """Something starts to run."""
        self.stack.append(running)
        self.makers.mark(sequence_number(), running.name)
        self.replan()

    def pop_to(self, depth: int) -> None:
        """What stands at *depth* of the stack, and above, has ended."""
        del self.stack[depth:]
        self.makers.mark(sequence_number(), self.stack[-1].name)
        self.replan()


def _rows(journal: list[Any], width: int) -> Iterator[tuple[Any, ...]]:
    """Takes the rows out of a journal, to which its thread may go on to add."""
    length = len(journal)
    entries = iter(journal[:length])
    del journal[:length]
    return zip(*[entries] * width, strict=True)
