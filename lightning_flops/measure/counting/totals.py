"""What a counter reports: FLOPs and bytes by module, phase, operator and dtype, what could not be counted, notes."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

from lightning_flops.records import FlopPhase, FlopRecord, OperatorCell, PhaseFlops, UncountedOperator
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)

UNKNOWN = "(unknown)"
"""Module of the backward of forwards that were not counted."""


class Cell:
    """What one operator cost in one module, phase and dtype."""

    __slots__ = ("calls", "flops", "hidden", "read", "skipped", "without_backward", "written")

    def __init__(self) -> None:
        self.calls = self.flops = self.skipped = self.read = self.written = 0
        self.without_backward = 0
        """FLOPs from which no backward can follow."""
        self.hidden = 0
        """FLOPs run with grad disabled inside an autograd.Function, where tensors do not show which need a gradient."""


class Totals:
    """What was counted on all threads.

    Args:
        unknown: name of the module that backwards of no known module are attributed to.
    """

    def __init__(self, unknown: str) -> None:
        self.unknown = unknown
        self.lock = threading.RLock()
        """Held by whoever adds to it: what fails meanwhile ends the counter, which asks for it again."""
        self.flops: dict[FlopPhase, int] = {"forward": 0, "backward": 0, "recompute": 0, "optimizer": 0}
        self.calls: dict[str, int] = {}
        self.estimates: dict[str, str] = {}
        """Operators whose FLOPs are estimates, and where those come from."""
        self.lacks_forwards = False
        """Some products were of backwards whose forwards were not counted."""
        self._notes: dict[str, None] = {}
        self._failures: set[str] = set()
        self._cells: dict[tuple[str, FlopPhase, str, str], Cell] = {}
        self._uncounted: dict[str, list[Any]] = {}
        """By operator: calls, modules, output elements, whether any call may have had FLOPs."""

    def cell(self, module: str, phase: FlopPhase, operator: str, dtype: str = "") -> Cell:
        """A cell, made if there is none; *dtype* is that of the arithmetic, none where no FLOPs are counted."""
        key = (module, phase, operator, dtype)
        cell = self._cells.get(key)
        if cell is None:
            if module == UNKNOWN:
                self.lacks_forwards |= bool(dtype)
                return self.cell(self.unknown, phase, operator, dtype)
            cell = self._cells[key] = Cell()
        return cell

    def called(self, module: str) -> None:
        """A module was called."""
        with self.lock:
            self.calls[module] = self.calls.get(module, 0) + 1

    def add(self, cell: Cell, phase: FlopPhase, flops: int, skipped: int) -> None:
        """Add FLOPs to a cell of *phase*."""
        cell.flops += flops
        cell.skipped += skipped
        self.flops[phase] += flops

    def list(self, operator: str, module: str, elements: int, heavy: bool) -> None:
        """List one call of an operator that could not be counted."""
        listed = self._uncounted.setdefault(operator, [0, set(), 0, False])
        listed[0] += 1
        listed[1].add(self.unknown if module == UNKNOWN else module)
        listed[2] += elements
        listed[3] |= heavy

    def note(self, sentence: str) -> None:
        """Add a sentence for the report; one that is there already changes nothing."""
        self._notes.setdefault(sentence)

    def failed(self, where: str, error: Exception) -> None:
        """Note that the counter failed in *where*, and say so in the log, the first time of all.

        It raises nothing but what a signal handler of the user's has raised.
        """
        words = words_of(error)
        with suppress(Exception):
            if where not in self._failures:
                self._failures.add(where)
                sentence = f"Counting failed in {where} ({words}); FLOPs may be missing."
                self.note(sentence)
                logger.log(logging.WARNING if len(self._failures) == 1 else logging.DEBUG, sentence, exc_info=error)

    def by_phase(self) -> PhaseFlops:
        """FLOPs so far."""
        return PhaseFlops(**self.flops)

    def operators(self) -> set[str]:
        """Names of the operators that ran."""
        return {operator for _, _, operator, _ in list(self._cells)}

    def record(self, more_notes: Iterable[str]) -> FlopRecord:
        """All of it."""
        with self.lock:
            return FlopRecord(
                cells=tuple(self._records()),
                module_calls=dict(sorted(self.calls.items())),
                uncounted={
                    operator: UncountedOperator(
                        calls=calls, modules=tuple(sorted(modules)), output_elements=elements, heavy=heavy
                    )
                    for operator, (calls, modules, elements, heavy) in sorted(self._uncounted.items())
                },
                notes=(
                    *self._notes,
                    *more_notes,
                    *(f"The FLOPs of {name} are an estimate: {why}." for name, why in sorted(self.estimates.items())),
                ),
            )

    def _records(self) -> Iterator[OperatorCell]:
        for (module, phase, operator, dtype), cell in sorted(self._cells.items()):
            without = cell.without_backward if phase == "forward" else 0
            if phase == "forward" and cell.hidden:
                # Only reentrant checkpointing runs whole modules in an autograd.Function. It repeats them with grad
                # enabled, and the repetition knows which FLOPs have no backward.
                repeated = self._cells.get((module, "recompute", operator, dtype), Cell())
                if (knowing := repeated.flops - repeated.hidden) > 0:
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
