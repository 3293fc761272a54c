"""What the counter knows on one thread: which modules run, which module made each autograd node, and what was spent."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Union

from lightning_flops.instrument.torch_private.autograd import NO_GRAPH_TASK, sequence_number
from lightning_flops.records import OUTSIDE, FlopPhase

UNKNOWN = "(unknown)"
"""Maker of autograd nodes that were made while nothing was counted."""

FORGOTTEN = "(forgotten)"
"""Maker of nodes that were made so long ago that we have dropped who made them."""

ENDED = -1
"""Identifier of threads that are known to have ended."""

_NO_LIMIT = 1 << 62

_NEVER = -2
"""An id that no graph task has, and that does not mean "no graph task" either."""

_LONGEST_TABLE = 1 << 20
"""Most boundaries of autograd nodes that a thread keeps; if there are more, the older half is dropped."""


Books = Union[str, "Table"]
"""Where costs go. A module's name means the table of its forward; that is only looked up when it is needed."""

RunningKind = Literal["base", "module", "root", "optimizer"]

Segment = tuple[str, int, int]
"""Autograd nodes with consecutive numbers: who made them, the first number, and the first number after them."""


class Cell:
    """What one operator spent in one module and phase."""

    # Most cells are for one call of an operator without FLOPs. They hold only three numbers; the rest is on the class.
    __slots__ = ("calls", "read", "written")

    dtype: Any = None
    """The dtype of the arithmetic; None where no FLOPs are counted."""
    flops: int = 0
    skipped: int = 0
    without_backward: int = 0
    hidden_grad_flops: int = 0
    """FLOPs run with grad disabled inside an autograd.Function, where tensors do not show which need a gradient."""
    repeated: int = 0
    """FLOPs by which a fused attention's backward repeats its forward; they belong to the recompute phase."""
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
    """Cells of one module and phase. The key is the operator; if FLOPs were counted, it is (operator, dtype)."""

    __slots__ = ("module", "phase")

    def __init__(self, module: str, phase: FlopPhase) -> None:
        # We skip dict.__init__, which has nothing to do here, because there is a table for every module.
        self.module = module
        self.phase: FlopPhase = phase

    def cell(self, operator: Any) -> Cell:
        """The cell of an operator whose FLOPs were not counted; made if there is none."""
        cell = self.get(operator)
        if cell is None:
            cell = self.setdefault(operator, Cell(0, 0, 0))
        return cell

    def counted_cell(self, operator: Any, dtype: Any) -> CountedCell:
        """The cell of an operator whose FLOPs were counted, with arithmetic in *dtype*; made if there is none."""
        key = (operator, dtype)
        cell = self.get(key)
        if cell is None:
            cell = self.setdefault(key, CountedCell(dtype))
        return cell  # type: ignore[return-value]  # such keys have only counted cells


class ModuleCall:
    """A module that is running on a thread, called in the usual way: see ``ThreadState.usual_task``."""

    # Every module call of a step needs one. So it holds only two attributes; the rest is on the class.
    __slots__ = ("name", "owner")

    name: str
    """Name of the module that the work belongs to."""
    owner: Any
    """The module."""

    kind: RunningKind = "module"
    task = NO_GRAPH_TASK
    wants_backward = True
    repeats_forward = False
    mode_pushed = False

    @property
    def books(self) -> Books:
        """Where its operators are booked outside of any backward."""
        return self.name


class Running:
    """Something that is running on a thread: an optimizer step, the root's own code, or an unusual module call.

    Args:
        name: name of the module that the work belongs to.
        owner: the module or the optimizer; None for the root's own code.
        kind: what it is.
        task: the graph task inside which it was entered.
        books: where its operators are booked outside of any backward.
        wants_backward: whether a backward may follow: grad was on when it was entered, or *repeats_forward* is true.
        repeats_forward: whether it was entered with grad off inside an autograd.Function's forward, such as that of
            reentrant checkpointing.
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
        """Whether the dispatch mode was pushed on this thread when this began; then it is removed when this ends."""


class Repetition(NamedTuple):
    """A block of code inside a backward that repeats a forward."""

    manager: Any
    """What enabled grad for it; None if it is a part of the backward's own graph, which runs with grad disabled."""
    task: int
    """The graph task inside which it runs."""
    whole: bool
    """Whether backwards that are started in it are repeated as well."""


@dataclass(slots=True)
class NodeMakers:
    """Which module made the autograd nodes of one thread: boundaries in their sequence numbers.

    The nodes from ``starts[i]`` up to ``starts[i + 1]`` were made by the module named ``names[i]``.
    """

    starts: list[int]
    names: list[str]
    claims: bool = False
    """Whether a module was called on this thread without our mode; then hooks on its nodes say whose they are."""

    def mark(self, start: int, name: str) -> None:
        """From sequence number *start* on, the module *name* makes the nodes."""
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
        names.append(name)
        starts.append(start)

    def trim(self) -> None:
        """Drops who made the oldest nodes, if there are very many."""
        if len(self.starts) > _LONGEST_TABLE:
            self.names[0] = FORGOTTEN
            del self.starts[1 : -_LONGEST_TABLE // 2], self.names[1 : -_LONGEST_TABLE // 2]

    def insert(self, sequence: int, name: str) -> None:
        """The module *name* made this one earlier node, whatever ran around it."""
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
        """Who made the node with this number, and its other nodes next to it, below *limit*; None if it is too old."""
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
    """Tables that may have its nodes, likeliest first, each with the number that its nodes are below, if known."""

    def segment(self, sequence: int) -> Segment:
        """Who made the node with this number, and the numbers around it for which the same holds."""
        for place, (table, limit) in enumerate(self.makers):
            if limit is None or sequence < limit:
                segment = table.segment(sequence, _NO_LIMIT if limit is None else limit)
                if segment is not None:
                    # If this is a later table, a neighbour's number may also be in an earlier table.
                    return segment if place == 0 else (segment[0], sequence, sequence + 1)
        return UNKNOWN, sequence, sequence + 1


class ThreadState:
    """The counter's books on one thread."""

    # Most of these are read at every operator, and a slot is faster than a dictionary entry.
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
        # The journals: the hot path writes rows here in the order of events, and post() adds them to the tables and
        # calls above. A row takes much less memory than a cell, and what our code costs between a model's operators is
        # memory rather than instructions.
        self.traffic: list[Any] = []
        """For each operator without a formula: the operator, its books, bytes read, bytes written."""
        self.products: list[Any] = []
        """For each one with a formula: the same, FLOPs, dtype of the arithmetic, FLOPs that no backward can follow."""
        self.entered: list[str] = []
        """Modules that were called in the usual way."""
        self.lock = threading.RLock()
        """Held while the journals are posted, because another thread may ask for the record."""
        self.listed: dict[tuple[str, str], list[int]] = {}
        """(operator, module) -> [calls, output elements, whether any call may have spent FLOPs]."""
        self.modes = 0
        """How many times the counter is entered on this thread."""
        self.entered_at = 1
        """Length of the stack when the counter was first entered."""
        self.paused = 0
        self.functions: list[Any] = []
        """Autograd functions and kernels with a formula of their own that are running."""
        self.bodies: list[Any] = []
        """Kernels in Python that are running, each a ``BodyWatch``."""
        self.makers = NodeMakers([], [])
        self.special = False
        """Whether something on this thread keeps operators from the fast path."""
        self.books: Books = OUTSIDE
        """Where operators outside of backwards are booked."""
        self.stack: list[Running | ModuleCall] = [Running(OUTSIDE, None, "base", NO_GRAPH_TASK, OUTSIDE, True)]
        self.spare_calls: list[ModuleCall] = []
        """Calls that have ended; the objects are used again."""
        self.usual_task = _NEVER
        """A module call is usual if the running graph task has this id, and grad is enabled.

        It is ``NO_GRAPH_TASK`` while the counter is entered on this thread, no backward runs and nothing is paused.
        Otherwise it is ``_NEVER``.
        """
        self.replicas: dict[Any, str] = {}
        # These, and the books above, say where the next operator's costs go; replan() keeps them current.
        self.task_id = NO_GRAPH_TASK
        self.task: GraphTask | None = None
        self.in_backward = False
        # The segment of the last autograd node that we saw: operators of its other nodes need no look-up.
        self.segment_start = 0
        self.segment_end = 0
        self.segment_table = self.table_of(OUTSIDE, "backward")
        self.claimed = False
        """Whether a hook has said whose the segment is, which its numbers do not; call replan() after a change."""
        self.repetitions: list[Repetition] = []
        """The repetitions that are running, innermost last."""
        self.repeating = False
        """Whether a repetition is running."""
        self.by_number = False
        """Whether, in a backward with grad disabled, the running node's number says whose the work is."""
        self.born = 0
        """Inside a backward, nodes with numbers below this have a known maker."""
        self.bore = False
        """Whether code outside of module calls has made nodes in the running backward."""

    @property
    def table(self) -> Table:
        """Where operators outside of backwards are booked."""
        books = self.books
        return self.table_of(books, "forward") if isinstance(books, str) else books

    def table_of(self, module: str, phase: FlopPhase) -> Table:
        """The cells of this module and phase."""
        key = (module, phase)
        table = self.tables.get(key)
        if table is None:
            table = self.tables.setdefault(key, Table(module, phase))  # another thread that posts may have just made it
        return table

    def post(self, table_of: Callable[[Books | int], Table]) -> None:
        """Adds the journals to the tables.

        Args:
            table_of: returns the table for books or for the number of an autograd node.
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
                self.makers.trim()  # only on its own thread, which may be looking something up in the table

    def replan(self) -> None:
        """Works out where costs go now, and what may take the fast path.

        Call it when the stack or the graph task has changed, and when the counter, a pause, a repetition, or a function
        with a formula has begun or ended.
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
        """Nodes made in a backward since the last operator belong to *module*, whose backward is running."""
        now = sequence_number()
        if now > self.born:
            self._mark_births(module)
            self.born = now
            self.bore = True

    def end_births(self) -> None:
        """From here on, new nodes belong to the top of the stack again."""
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
        """What is at *depth* of the stack, and above it, has ended."""
        del self.stack[depth:]
        self.makers.mark(sequence_number(), self.stack[-1].name)
        self.replan()


def _rows(journal: list[Any], width: int) -> Iterator[tuple[Any, ...]]:
    """Takes the rows out of a journal; its thread may add more meanwhile."""
    length = len(journal)
    entries = iter(journal[:length])
    del journal[:length]
    return zip(*[entries] * width, strict=True)
