"""What was spent on one thread, and how the threads of a counter add up to one record."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from lightning_flops.records import FlopPhase, FlopRecord, OperatorCell, PhaseFlops, UncountedOperator

Key = tuple[str, FlopPhase, str, str]
"""Module, phase, operator, and the dtype of the arithmetic; no dtype where no FLOPs were counted."""


class Cell:
    """What one operator spent in one module, phase and dtype."""

    __slots__ = ("calls", "flops", "hidden", "read", "skipped", "without_backward", "written")

    def __init__(self) -> None:
        self.calls = self.flops = self.skipped = self.read = self.written = 0
        self.without_backward = 0
        """FLOPs from which no backward can follow."""
        self.hidden = 0
        """FLOPs run with grad disabled inside an autograd.Function, where tensors do not show which need a gradient."""

    def add(self, other: Cell) -> None:
        """Adds what the same operator spent on another thread."""
        for name in Cell.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Books:
    """What was spent on one thread."""

    def __init__(self) -> None:
        self.cells: dict[Key, Cell] = {}
        self.flops: dict[FlopPhase, int] = {"forward": 0, "backward": 0, "recompute": 0, "optimizer": 0}
        self.calls: dict[str, int] = {}
        self.listed: dict[tuple[str, str], list[int]] = {}
        """(operator, module) -> [calls, output elements, whether any call may have spent FLOPs]."""
        self.estimates: dict[str, str] = {}
        """Operators whose FLOPs are estimates, and where those come from."""

    def cell(self, module: str, phase: FlopPhase, operator: str, dtype: str = "") -> Cell:
        """A cell; made if there is none."""
        key = (module, phase, operator, dtype)
        cell = self.cells.get(key)
        if cell is None:
            cell = self.cells[key] = Cell()
        return cell

    def spend(self, cell: Cell, phase: FlopPhase, flops: int, skipped: int) -> None:
        """Adds FLOPs to a cell of *phase*."""
        cell.flops += flops
        cell.skipped += skipped
        self.flops[phase] += flops

    def list(self, operator: str, module: str, elements: int, heavy: bool) -> None:
        """Lists one call of an operator that could not be counted."""
        listed = self.listed.setdefault((operator, module), [0, 0, 0])
        listed[0] += 1
        listed[1] += elements
        listed[2] |= heavy


def total_flops(books: Iterable[Books]) -> PhaseFlops:
    """FLOPs by phase on all threads."""
    return sum((PhaseFlops(**one.flops) for one in books), start=PhaseFlops())


def merged(books: Collection[Books], *, unknown: tuple[str, str], notes: Iterable[str]) -> FlopRecord:
    """One record of what was spent on all threads.

    Args:
        books: one of each thread.
        unknown: the name under which work is booked of which no module is known, and the module that it goes to.
        notes: sentences for the record.
    """
    sums: dict[Key, Cell] = {}
    calls: dict[str, int] = {}
    listed: dict[str, list[int]] = {}
    modules: dict[str, set[str]] = {}
    estimates: dict[str, str] = {}
    for one in books:
        for (module, *rest), cell in list(one.cells.items()):
            key: Key = (unknown[1] if module == unknown[0] else module, *rest)  # type: ignore[assignment]
            sums.setdefault(key, Cell()).add(cell)
        for name, count in list(one.calls.items()):
            calls[name] = calls.get(name, 0) + count
        for (operator, module), (count, elements, heavy) in list(one.listed.items()):
            entry = listed.setdefault(operator, [0, 0, 0])
            entry[0] += count
            entry[1] += elements
            entry[2] |= heavy
            modules.setdefault(operator, set()).add(unknown[1] if module == unknown[0] else module)
        estimates.update(one.estimates)
    return FlopRecord(
        cells=tuple(_cells(sums)),
        module_calls=dict(sorted(calls.items())),
        uncounted={
            operator: UncountedOperator(
                calls=count, modules=tuple(sorted(modules[operator])), output_elements=elements, heavy=bool(heavy)
            )
            for operator, (count, elements, heavy) in sorted(listed.items())
        },
        notes=(
            *notes,
            *(f"The FLOPs of {name} are an estimate: {source}." for name, source in sorted(estimates.items())),
        ),
    )


def _cells(sums: dict[Key, Cell]) -> Iterator[OperatorCell]:
    for (module, phase, operator, dtype), cell in sorted(sums.items()):
        without = 0
        if phase == "forward":
            # Only reentrant checkpointing runs whole modules in an autograd.Function. It repeats them with grad
            # enabled, and the repetition knows which FLOPs have no backward.
            repeated = sums.get((module, "recompute", operator, dtype))
            knowing = 0 if repeated is None else repeated.flops - repeated.hidden
            without = cell.without_backward
            if cell.hidden and repeated is not None and knowing > 0:
                without += cell.hidden * repeated.without_backward // knowing
        yield OperatorCell(
            module=module,
            phase=phase,
            operator=operator,
            dtype=dtype,
            calls=cell.calls,
            flops=cell.flops,
            skipped=cell.skipped,
            without_backward=without,
            bytes_read=cell.read,
            bytes_written=cell.written,
        )
