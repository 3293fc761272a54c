"""Times each module's forward over one step, with a clock at module borders; used where no profiler can run."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from lightning_flops.instrument.border import UndoLedger
from lightning_flops.instrument.timing.clocks import Clock
from lightning_flops.instrument.timing.module_timer import ModuleTimer
from lightning_flops.records import ModuleSecondsRecord, StepSignature
from lightning_flops.signals import words_of
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)


class ForwardTimer:
    """A ``Tracer`` without torch's profiler: own seconds of every module's forward, and nothing else.

    Args:
        root: the model.
        new_clock: makes the clock that stamps the borders; it returns None if the device cannot be timed.
    """

    def __init__(self, root: nn.Module, new_clock: Callable[[], Clock[Any] | None]) -> None:
        self._root = root
        self._new_clock = new_clock
        self._timer: ModuleTimer | None = None
        self._undo = UndoLedger()
        self._parts: list[ExitStack] = []
        self._index = 0
        self.record: ModuleSecondsRecord | None = None
        self.lost: str | None = None

    def warm_up(self) -> None:
        """Nothing to do."""

    def start(self, index: int) -> None:
        """The step begins, or the next one of its batches."""
        if self._timer is not None or self.lost is not None:
            return
        try:
            clock = self._new_clock()
            if clock is None:
                self.lost = "Module latencies are n/a: no clock of ours reads this device."
                return
            timer = ModuleTimer(self._root, clock, abandon=self.give_up)
            self._undo.enter(timer)
            self._timer, self._index = timer, index
        except Exception as error:
            self._failed(error)

    def enter(self, part: str) -> None:
        """*part* begins; in a forward, time outside of module calls is the root's own."""
        scope = ExitStack()
        self._parts.append(scope)
        if part == "forward" and self._timer is not None:
            scope.enter_context(self._timer.in_root())

    def leave(self) -> None:
        """The part entered last ends."""
        if self._parts:
            self._parts.pop().close()

    def stop(self, signature: StepSignature) -> None:
        """The step is over: read the clock."""
        timer = self._timer
        self.give_up()
        if timer is None:
            return
        try:
            own_sec = timer.seconds()
            if own_sec is None:
                self.lost = "Module latencies are n/a: the modules could not be timed."
                return
            self.record = ModuleSecondsRecord(index=self._index, signature=signature, own_forward_sec=own_sec)
        except Exception as error:
            self._failed(error)

    def give_up(self) -> None:
        """Remove the hooks."""
        while self._parts:
            self.leave()
        self._timer = None
        self._undo.close()

    def _failed(self, error: Exception) -> None:
        logger.debug("modules could not be timed", exc_info=True)
        self.give_up()
        self.lost = f"Module latencies are n/a: timing them failed ({words_of(error)})."
