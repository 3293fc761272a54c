"""How long each module's forward takes, by a clock that the caller passes in."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_flops.measure.module_hooks import put_up_hooks
from lightning_flops.measure.module_scope import ModuleNames
from lightning_flops.measure.timing.phase_timer import WallClock
from lightning_flops.measure.torch_private.needed import NO_GRAPH_TASK, graph_task_id
from lightning_flops.signals import Undo, words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)


class ModuleTimer:
    """Times the forwards of a model's modules on the thread that entered it.

    At both ends of every hook between two modules we store a stamp, with the name of the module that runs from there. A
    module's own time is the time in none of the modules inside it, so the times of all modules add up to the time of
    the outermost calls. The time of our own hooks belongs to no module. Forwards that a backward runs (activation
    checkpointing) are left out.

    Args:
        root: the model; calls of other modules belong to their caller.
        clock: stamps the hooks; None: nothing can be timed on this device, and we only count calls.
    """

    def __init__(self, root: nn.Module, clock: WallClock | None) -> None:
        self._clock = clock
        self._names = ModuleNames(root)
        self._failed = False
        self._thread = threading.get_ident()
        self._running: list[tuple[nn.Module | None, str]] = []  # the forwards that are running, by module and name
        self._stamps: list[tuple[Any, str | None]] = []  # stamps, each with the name of the module that runs from there
        self._undo = Undo()
        self.outermost_calls = 0  # calls of the root, or of a module below it that was called from outside

    def __enter__(self) -> ModuleTimer:
        """Puts up the hooks."""
        put_up_hooks(self._undo, self._on_enter, self._on_leave, failed=self._fail)
        return self

    def __exit__(self, *exc: object) -> None:
        """Removes the hooks; calls that are running end here."""
        self._undo.close()
        self._end_all()

    @contextmanager
    def in_root(self) -> Iterator[None]:
        """Inside, time outside of module forwards is the root's own: for a call that is not a forward."""
        self.outermost_calls += 1
        self._running.append((None, ""))
        self._goes_on()
        try:
            yield
        finally:
            self._end_all()

    def seconds(self) -> dict[str, float] | None:
        """Own seconds of each module so far, by name; None if we cannot time the device, or if timing failed."""
        if self._clock is None or self._failed:
            return None
        self._clock.settle()
        own_sec: dict[str, float] = {}
        for (start, name), (end, _) in itertools.pairwise(self._stamps):
            if name is not None:
                own_sec[name] = own_sec.get(name, 0.0) + self._clock.seconds_between(start, end)
        return own_sec

    def _stamp(self) -> Any:
        return None if self._clock is None else self._clock.stamp()

    def _goes_on(self) -> None:
        """From here on the innermost of the forwards that are running has the time."""
        self._stamps.append((self._stamp(), self._running[-1][1] if self._running else None))

    def _end_all(self) -> None:
        if self._running:
            self._running.clear()
            self._goes_on()

    def _is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread or graph_task_id() != NO_GRAPH_TASK

    def _on_enter(self, module: nn.Module, args: Any) -> None:
        begun, running = self._stamp(), self._running
        if self._is_elsewhere() or (name := self._names.name_for(module, running[-1][1] if running else "")) is None:
            return
        self.outermost_calls += not running
        running.append((module, name))
        self._stamps.append((begun, None))
        self._goes_on()

    def _on_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        begun, running = self._stamp(), self._running
        depth = next((place for place in reversed(range(len(running))) if running[place][0] is module), None)
        if depth is None or self._is_elsewhere():
            return
        del running[depth:]  # the calls above it ended by an error that skips hooks
        self._stamps.append((begun, None))
        self._goes_on()

    def _fail(self, error: Exception) -> None:
        if not self._failed:
            self._failed = True
            logger.warning("modules could not be timed; their latency is n/a: %s", words_of(error), exc_info=error)
