"""Exclusive seconds of each part of a step and each module, and the clocks that stamp where they begin and end.

A stamp is cheap and never waits for a device. At every boundary a timer stores one stamp and what happens there; the
sums are worked out when the step has ended, of times that are read after ``settle``.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import nn

from lightning_flops import host_clock
from lightning_flops.measure.module_hooks import hear_modules
from lightning_flops.measure.module_scope import ModuleNames
from lightning_flops.measure.parts import Parts
from lightning_flops.measure.torch_private.needed import NO_GRAPH_TASK, graph_task_id
from lightning_flops.records import PhaseSeconds, StepRecord, TimePhase, phase_of
from lightning_flops.signals import Undo, words_of
from lightning_flops.units import package_logger


class WallClock:
    """The host's clock: true for work that the calling thread does itself, as on a CPU. Others answer as it does.

    It stands still while it is paused.
    """

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or host_clock.now
        self._ours_sec = 0.0  # what the profiler has taken for itself
        self.paused_at: float | None = None  # by ``now``; None: it runs

    def pause(self) -> None:
        """Stand still from here on, because the profiler works, until ``go_on``."""
        self.paused_at = self._now()

    def go_on(self) -> None:
        """After a pause the user's program goes on, with the stamp at which it has stopped."""
        self._ours_sec = self._now() - self.stamp()
        self.paused_at = None

    def step_begins(self) -> None:
        """A step begins, to which the stamps from here on belong."""

    def stamp(self) -> Any:
        """A stamp of this moment, in the order in which the device sees it."""
        return (self._now() if self.paused_at is None else self.paused_at) - self._ours_sec

    def settle(self) -> None:
        """Wait until every stamp taken so far has a time."""

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from *start* to *end* where the work of the step happens: on the device, if there is one."""
        return float(end - start)

    host_seconds_between = seconds_between  #: Seconds on the host.


_READY_EVENTS = 256  # more than the marks of most windows, made before the first step


class CudaEventClock(WallClock):
    """CUDA events, with the host's time, on the stream that was current where the step began.

    Intervals contain the device's work and its waits for the host, and add up, without a synchronization. What runs on
    another stream for a while, as inside ``torch.cuda.stream``, is not waited for. Before any step it is the current
    stream. *stream* says which one is current on the device, which itself need not be torch's current one.
    """

    def __init__(
        self,
        *,
        new_event: Callable[[], Any] | None = None,
        now: Callable[[], float] | None = None,
        stream: Callable[[], Any] = torch.cuda.current_stream,
        ready: int = _READY_EVENTS,
    ) -> None:
        super().__init__(now)
        self._new_event = new_event or functools.partial(torch.cuda.Event, enable_timing=True)
        self._ask_stream, self._stream, self._ready = stream, None, ready
        self._latest: Any = None
        self._left: list[Any] = []  # the latest event on each stream that was left
        self._free: list[Any] = []  # events to record again: to make one takes longer

    def step_begins(self) -> None:
        """Ask for the stream, once for all stamps of the step."""
        stream = self._ask_stream()
        if self._latest is not None and stream != self._stream:
            self._left.append(self._latest)
        self._stream = stream
        if self._latest is None:
            self._free = [self.stamp()[0] for _ in range(self._ready)]

    def stamp(self) -> tuple[Any, float]:
        """Record an event on the step's stream."""
        event = self._latest = self._free.pop() if self._free else self._new_event()
        event.record(self._ask_stream() if self._stream is None else self._stream)
        return event, self._now()

    def settle(self) -> None:
        """Wait for the latest event; every earlier one on its stream is then done too."""
        for event in (*self._left, self._latest):
            if event is not None:
                event.synchronize()
        self._left.clear()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Seconds of the compute stream from *start* to *end*."""
        return float(start[0].elapsed_time(end[0])) / 1e3  # elapsed_time is in milliseconds

    def host_seconds_between(self, start: Any, end: Any) -> float:
        """Seconds from *start* to *end* on the host."""
        return float(end[1] - start[1])


def clock_for(device: torch.device) -> WallClock | None:
    """The clock that gives true times for *device*.

    None for a device that works asynchronously and has no events that we read: its phases cannot be timed.
    """
    return (
        CudaEventClock(stream=functools.partial(torch.cuda.current_stream, device))
        if device.type == "cuda"
        else WallClock()
        if device.type == "cpu"
        else None
    )


_PHASES = frozenset(get_args(TimePhase))


#: A boundary: the part, and the phase, that run from it on, empty if none does; and its stamp. The last ends the step.
Mark = tuple[str, str, Any]


class PhaseTimer(Parts):
    """Collects the boundaries of one step after the other; time belongs to the innermost part."""

    def __init__(self, clock: WallClock) -> None:
        super().__init__()
        self.clock = clock
        self.whole = False  # steps are timed between two stamps: only what belongs to no step has boundaries
        self._stamp = clock.stamp
        self.marks: list[Mark] = []  # of the running step
        self._open = ["other"]  # the parts that run, each as what its time is of
        self._phase = ""

    def begin(self) -> None:
        """Start the first step here."""
        self._open = ["other"]
        self.entered.clear()
        self._phase = ""
        self._start()

    def _start(self) -> None:
        self.clock.step_begins()
        self.marks.clear()
        self._mark()

    def _mark(self) -> None:
        """Another part, or another phase, runs from here on; the stamp is last: these lines are not in its time."""
        self.marks.append((self._open[-1], self._phase, self._stamp()))

    def enter(self, part: str, *, counts: bool = True) -> None:
        """As of ``Parts``; where its time is of what runs already, this is no boundary."""
        if counts:
            self.entered.append(part)
        running = self._open[-1]
        if running not in _PHASES or (self.whole and part in _PHASES):
            part = running
        self._open.append(part)
        if part != running:
            self._mark()

    def leave(self) -> None:
        """The part entered last ends."""
        if len(self._open) > 1 and self._open.pop() != self._open[-1]:
            self._mark()

    def phase(self, name: str) -> None:
        """As of ``Parts``."""
        if name != self._phase:
            self._phase = name
            self._mark()

    def claim(self, part: str) -> None:
        """As of ``Parts``."""
        if self.whole and part in _PHASES:
            return
        running, phase, stamp = self.marks[-1]
        if running == "other":
            self.marks[-1] = part, phase, stamp
        self._mark()

    def go_on(self) -> None:
        """The step begins here: since the last one ended only the profiler ran, and that time belongs to no step."""
        if len(self.marks) == 1:
            self._start()

    def cut(self) -> list[Mark]:
        """End this step and start the next at the same stamp."""
        end = self._stamp()
        marks, self.marks = [*self.marks, ("", "", end)], [(self._open[-1], self._phase, end)]
        return marks

    def read(self, step: StepRecord, marks: Sequence[Mark]) -> StepRecord:
        """*step* with the seconds of each of its parts, by its *marks*, whose times the clock has."""
        spent = dict.fromkeys(_PHASES, 0.0)
        excluded: dict[str, float] = {}
        of_phases: defaultdict[str, float] = defaultdict(float)
        reader_sec = 0.0
        for (part, phase, start), (_, _, end) in itertools.pairwise(marks):
            sums: dict[Any, float] = spent if part in _PHASES else excluded
            seconds = self.clock.seconds_between(start, end)
            sums[part] = sums.get(part, 0.0) + seconds
            if part in _PHASES:
                of_phases[phase_of(part, phase)] += seconds
            if part == "data_wait":
                reader_sec += self.clock.host_seconds_between(start, end)
        parts = PhaseSeconds(**spent)
        return replace(step, seconds=parts, reader_sec=reader_sec, excluded_sec=excluded, phase_sec=of_phases)


logger = package_logger(__name__)


_NO_MODULE = "(none)"  # no name has a bracket


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
        self._clock, self._is_timed = clock or WallClock(), clock is not None
        self._names = ModuleNames(root)
        self._thread = threading.get_ident()
        self._running: list[tuple[nn.Module | None, str]] = []  # the forwards that are running, by module and name
        self._stamps: list[tuple[Any, str]] = []  # stamps, each with the name of the module that runs from there
        self._undo = Undo()
        self.outermost_calls = 0  # calls of the root, or of a module below it that was called from outside

    def __enter__(self) -> ModuleTimer:
        """Puts up the hooks."""
        hear_modules(self._undo, self._on_enter, self._on_leave, failed=self._fail)
        return self

    def __exit__(self, *exc: object) -> None:
        """Removes the hooks; calls that are running end here."""
        self._undo.close()
        self._end_all()

    def in_root(self) -> Undo:
        """Until then, time outside of module forwards is the root's own: for a call that is not a forward."""
        undo = Undo()
        undo.callback(self._end_all)
        self.outermost_calls += 1
        self._running.append((None, ""))
        self._goes_on()
        return undo

    def seconds(self) -> dict[str, float] | None:
        """Own seconds of each module so far, by name; None if we cannot time the device, or if timing failed."""
        if not self._is_timed:
            return None
        self._clock.settle()
        own_sec = defaultdict[str, float](float)
        for (start, name), (end, _) in itertools.pairwise(self._stamps):
            own_sec[name] += self._clock.seconds_between(start, end)
        own_sec.pop(_NO_MODULE, None)
        return own_sec

    def _goes_on(self, *ours: tuple[Any, str]) -> None:
        """From here on the innermost of the forwards that are running has the time, after what was *ours*."""
        self._stamps += [*ours, (self._clock.stamp(), self._running[-1][1] if self._running else _NO_MODULE)]

    def _end_all(self) -> None:
        if self._running:
            self._running.clear()
            self._goes_on()

    def _is_elsewhere(self) -> bool:
        return threading.get_ident() != self._thread or graph_task_id() != NO_GRAPH_TASK

    def _on_enter(self, module: nn.Module, args: Any) -> None:
        begun, running = self._clock.stamp(), self._running
        if self._is_elsewhere() or (name := self._names.name_for(module, running[-1][1] if running else "")) is None:
            return
        self.outermost_calls += not running
        running.append((module, name))
        self._goes_on((begun, _NO_MODULE))

    def _on_leave(self, module: nn.Module, args: Any, output: Any) -> None:
        begun, running = self._clock.stamp(), self._running
        depth = next((place for place in reversed(range(len(running))) if running[place][0] is module), None)
        if depth is None or self._is_elsewhere():
            return
        del running[depth:]  # the calls above it ended by an error that skips hooks
        self._goes_on((begun, _NO_MODULE))

    def _fail(self, error: Exception) -> None:
        if self._is_timed:
            self._is_timed = False
            logger.warning("modules could not be timed; their latency is n/a: %s", words_of(error), exc_info=error)
