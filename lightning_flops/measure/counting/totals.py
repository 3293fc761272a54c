"""What a counter reports: FLOPs and bytes by module, phase, operator and dtype, what could not be counted, notes."""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lightning_flops.records import FlopPhase, FlopRecord, OperatorCell, UncountedOperator
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)


@dataclass(slots=True)
class Cell:
    """What one operator cost in one module, phase and dtype."""

    calls: int = 0
    flops: int = 0
    skipped: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def moves(self, written: int, read: int) -> None:
        """One more call, which writes and reads so many bytes."""
        self.calls += 1
        self.bytes_written += written
        self.bytes_read += read


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or of functorch: such a tensor stands for itself
        return id(tensor)


class Totals:
    """What was counted on all threads."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Held by whoever adds to it: what fails meanwhile ends the counter, which asks for it again."""
        self.flops: Counter[tuple[str, str]] = Counter()  # by phase and dtype
        self.calls: dict[str, int] = {}
        self.estimates: dict[str, str] = {}  # operators whose FLOPs are estimates, and where those come from
        self.unread: dict[str, tuple[str, list[Any]]] = {}
        """By the name of a called module: its class, and its matrices, where nothing that is seen reads them."""
        self._notes: dict[str, None] = {}
        self._failures: set[str] = set()
        self._cells: dict[tuple[str, FlopPhase, str, str], Cell] = {}
        self._uncounted: dict[str, list[Any]] = {}  # by operator: calls, modules, whether any call may have had FLOPs

    def cell(self, module: str, phase: FlopPhase, operator: str, dtype: str = "") -> Cell:
        """A cell, made if there is none; *dtype* is that of the arithmetic, none where no FLOPs are counted."""
        return self._cells.setdefault((module, phase, operator, dtype), Cell())

    def called(self, module: str) -> None:
        """A module was called."""
        with self.lock:
            self.calls[module] = self.calls.get(module, 0) + 1

    def watch(self, name: str, module: nn.Module) -> None:
        """*module* is called: if it has no others inside, something that is seen has to read its matrices.

        In inference mode torch does not show every operator.
        """
        known = any(True for _ in module.children()) or name in self.calls or torch.is_inference_mode_enabled()
        if known:
            return
        # What is of a library's class may be kept elsewhere.
        own = (one for one in module.parameters(recurse=False) if type(one) is nn.Parameter)
        if matrices := [weakref.ref(one) for one in own if one.dim() > 1 and one.numel()]:
            self.unread[name] = type(module).__qualname__, matrices

    def read(self, name: str, tensors: Iterable[torch.Tensor], out: Iterable[torch.Tensor] = ()) -> None:
        """In the module of this name *tensors* were read to make *out*, which is no view of them."""
        seen = {_storage(one) for one in tensors}.difference(map(_storage, out))
        _, matrices = self.unread.get(name, ("", ()))
        if any(_storage(one) in seen for held in matrices if (one := held()) is not None):
            self.unread.pop(name, None)  # another thread may have

    def add(self, cell: Cell, phase: FlopPhase, dtype: str, flops: int, skipped: int) -> None:
        """Add FLOPs to a cell of *phase* and *dtype*."""
        cell.flops += flops
        cell.skipped += skipped
        self.flops[phase, dtype] += flops

    def list(self, operator: str, module: str, may_have_flops: bool) -> None:
        """List one call of an operator that could not be counted."""
        listed = self._uncounted.setdefault(operator, [0, set(), False])
        listed[0] += 1
        listed[1].add(module)
        listed[2] |= may_have_flops

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

    def record(self, more_notes: Iterable[str]) -> FlopRecord:
        """All of it."""
        with self.lock:
            unread = sorted((f"{kind}.forward", name) for name, (kind, _) in self.unread.items())
            silent = {one: [name for other, name in unread if other == one] for one, _ in unread}
            return FlopRecord(
                cells=tuple(
                    OperatorCell(module=module, phase=phase, operator=operator, dtype=dtype, **asdict(cell))
                    for (module, phase, operator, dtype), cell in sorted(self._cells.items())
                ),
                module_calls=dict(sorted(self.calls.items())),
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
                    *more_notes,
                    *(f"The FLOPs of {name} are an estimate: {why}." for name, why in sorted(self.estimates.items())),
                ),
            )
