"""Runs steps under torch.profiler, with marks around modules and phases, and keeps its trace files.

Steps after the timed ones are traced, until one can be compared with the counted step. The user's profiler always has
priority: ours does not start while another is there, and stops when one is set up.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.autograd.profiler as autograd_profiler
from torch import distributed, nn
from torch.profiler import ProfilerActivity, record_function

from lightning_flops.config import TraceSchedule
from lightning_flops.measure.module_hooks import hear_modules
from lightning_flops.measure.module_scope import ModuleNames
from lightning_flops.measure.parts import Parts
from lightning_flops.measure.patches import guarded, listen
from lightning_flops.measure.torch_private import optional
from lightning_flops.records import METADATA_KEY, MODULE_MARK, PHASE_MARK, StepSignature, TracedStepRecord
from lightning_flops.signals import Quiet, Undo, words_of
from lightning_flops.units import package_logger

logger = package_logger(__name__)

_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "6"  # at this level Kineto does not report every start and stop of ours on stderr

#: Up to this many cycles run, whatever the schedule says, until a step has the counted step's signature.
_LEAST_TRIES = 3

#: Unless the user has said how many steps are traced, they are fewer if they would run more operators than these: an
#: operator leaves about ten events in a trace, and a million take torch seconds to write.
_MOST_OPERATORS = 100_000


def _safely(act: Callable[..., Any]) -> Callable[..., Any]:
    """A method of a tracer: where it fails nothing is traced, and the step goes on."""

    @functools.wraps(act)
    def call(self: StepTracer, *args: Any) -> Any:
        return guarded(self._cannot_trace, act, self, *args)

    return call


class StepTracer(Parts):
    """Runs the cycles of a *schedule*, wait, warm up, record, if it is *asked* for traces.

    The ``steps`` hear when a batch of theirs begins, and when they end; ``enter``/``leave`` are the parts of each.
    No failure reaches the step. *root*, which computes on *device*, is the model whose modules are marked; the other
    arguments are torch.profiler's.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        device: torch.device,
        schedule: TraceSchedule | None = None,
        asked: bool = True,
        **settings: bool,
    ) -> None:
        super().__init__()
        self._root, self._device, self._settings = root, device, settings
        self._schedule = schedule or TraceSchedule()
        self.waits = self._records = False  # whether the running step is left alone, and whether it is recorded
        self._signatures: list[StepSignature] = []  # of the steps that were recorded in this cycle
        self.traces: list[TracedStepRecord] = []  # the traces, one of each cycle
        self.over = not asked  # whether no step will be recorded any more
        self._folder: str | None = None
        self._profiler: Any = None  # one that was prepared
        self._recording = self._ours = False
        self._undo = Undo()
        self._marks: list[Any] = []  # marks that are open: the step's, and those of the parts that are running
        self._index = self._first_index = -1
        self.lost: str | None = None  # why something cannot be traced, in a sentence; None if everything can

    # ---- the schedule

    def steps(self, is_alike: Callable[[StepSignature], bool], *, operators: int = 0) -> Iterator[None]:
        """The steps of all cycles; *is_alike*: whether one can be compared with the counted one, of *operators*."""
        schedule, tries, alike = self._schedule, 0, False
        most = max(1, _MOST_OPERATORS // max(1, operators)) if schedule == TraceSchedule() else schedule.active
        while tries < schedule.repeat or (not alike and tries < _LEAST_TRIES):
            for position in range(schedule.wait + schedule.warmup + min(schedule.active, most)):
                self.waits, self._records = position < schedule.wait, position >= schedule.wait + schedule.warmup
                if self.over:
                    return
                yield
            alike |= all(map(is_alike, self._signatures))
            self.end_cycle()
            tries += 1

    def batch_begins(self, index: int) -> None:
        """A batch begins; *index* steps of this fit came before its step."""
        if self._records and not self.over:
            self.start(index)
        elif not self.waits and not self.over:
            self.warm_up()

    def step_ends(self, signature: StepSignature) -> None:
        """A step is over, and so is its last batch."""
        if self._records and not self.over:
            self._signatures.append(signature)

    def end_cycle(self) -> None:
        """Stop the trace that is running, and keep it if a whole step is in it, also where the run ends early."""
        if not self.over and self._signatures:
            record, self._signatures = self.stop(*self._signatures), []
            self.traces += [record] if record else []
            self.over = self.lost is not None

    # ---- one trace: ``warm_up`` ahead, ``start`` at each batch, ``stop`` after the last

    @_safely
    def warm_up(self) -> None:
        """The next step will be traced: put up the marks, and start a device's tracing early."""
        if self._undo or self._is_there_another():
            return
        self._index = -1
        self._names, self._local = ModuleNames(self._root), threading.local()
        for name in optional.SET_UP:
            listen(self._undo, autograd_profiler, name, self._stand_aside, failed=self._cannot_trace)
        hear_modules(self._undo, self._forward_begins, self._forward_ends, failed=self._cannot_trace)
        if self._device.type != "cpu":
            self._prepare()

    @_safely
    def start(self, index: int) -> None:
        """The step begins, or the next one of its batches; *index* steps of this fit came before it."""
        if not self._recording:
            self.warm_up()
            if self._is_there_another():
                return
            if self._profiler is None:
                self._prepare()
            self._by_us(self._profiler.start_trace)
            self._recording, self._first_index = True, index
        if index != self._index:  # else it is another batch of the same step
            self._close_marks()
            self._index = index
            self._open_mark(record_function(f"ProfilerStep#{index}"))

    def enter(self, part: str, *, counts: bool = True) -> None:
        """*part* of the step begins; in a forward, work outside of module calls is the root's."""
        super().enter(part, counts=counts)
        if self._recording:
            self._open_mark(optional.new_mark(PHASE_MARK + part))

    def leave(self) -> None:
        """The part entered last ends."""
        if len(self._marks) > 1:
            self._marks.pop().__exit__(None, None, None)

    @_safely
    def stop(self, *signatures: StepSignature) -> TracedStepRecord | None:
        """The steps of these *signatures* are over: what was recorded; everything is removed from torch."""
        if not self._recording:
            return None
        rank = distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
        profiler = self._profiler
        profiler.add_metadata_json(METADATA_KEY, json.dumps({"rank": rank}))
        self._remove()
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="lightning_flops-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = f"{self._folder}/step{self._first_index}.pt.trace.json"
        profiler.export_chrome_trace(path)
        events = profiler.profiler.kineto_results.events()
        if self._device.type != "cpu" and all(event.device_type().name == "CPU" for event in events):
            self.lost = (
                f"The trace has no event of the {self._device.type} device (it may not be permitted here): kernels "
                "and device times of modules are n/a."
            )
        return TracedStepRecord(index=self._first_index, signatures=signatures, path=path)

    def give_up(self) -> None:
        """Stop tracing for good, and remove everything of ours from torch. What was traced before stays."""
        self.over = True
        try:
            self._remove()
        except Exception as error:  # of torch, or of whatever else listens to it; the rest is undone all the same
            logger.warning("torch.profiler could not be stopped: %s", words_of(error), exc_info=True)

    def _remove(self) -> None:
        with Undo() as undo:  # it runs each of these, also if another one raises
            undo.callback(self._undo.close)
            undo.callback(self._end)
            self._close_marks()

    def _end(self) -> None:
        """Have torch stop recording, or drop what it has prepared."""
        # From here on nothing else can end it: to end it twice would end the process.
        was_recording, profiler = self._recording, self._profiler
        self._recording, self._profiler = False, None
        try:
            # Torch says whether it records: we may have failed right after it began, or after it ended.
            if profiler is not None and not was_recording and not optional.profiler_is_recording():
                self._by_us(profiler.start_trace)  # only a start and a stop make Kineto drop what it prepared
            if profiler is not None and optional.profiler_is_recording():
                profiler.stop_trace()
        except BaseException as error:
            # Ctrl-C may be raised on any line of torch's, also when it has stopped. After what torch, or whatever else
            # listens to it, has raised, to stop once more would end the process.
            if not isinstance(error, Exception):
                if optional.profiler_is_recording():
                    profiler.stop_trace()
                optional.profiler_has_stopped()
            raise

    # ---- inside

    def _cannot_trace(self, error: Exception) -> None:
        logger.debug("a step could not be traced", exc_info=error)
        self._lose(f"torch.profiler failed ({words_of(error)}).")

    def _prepare(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type in ("cuda", "xpu"):
            activities.append(getattr(ProfilerActivity, self._device.type.upper()))
        profiler = optional.new_profiler(activities=activities, **self._settings)
        is_users = _LOG_LEVEL in os.environ
        os.environ.setdefault(_LOG_LEVEL, _SILENT)  # Kineto reads it when it is first used
        try:
            self._by_us(profiler.prepare_trace)
        finally:
            if not is_users:
                os.environ.pop(_LOG_LEVEL, None)
        self._profiler = profiler  # not before: torch crashes if it starts a trace that was not prepared

    def _open_mark(self, mark: Any) -> None:
        mark.__enter__()
        self._marks.append(mark)

    def _is_there_another(self) -> bool:
        """Whether this one is lost, as it is once the user's profiler is on, or may be switched on at any moment."""
        if self.lost is None and optional.profiler_is_recording():
            self._lose("another profiler is running, and torch runs one profiler at a time.")
        elif self.lost is None and "ProfilerStep" in optional.counted_steps:
            self._lose("a torch.profiler.profile is set up in this run, and torch runs one profiler at a time.")
        return self.lost is not None

    def _stand_aside(self, *args: Any, **kwargs: Any) -> None:
        if not self._ours:
            self._lose("another profiler was set up meanwhile, and torch runs one at a time.")

    def _by_us(self, act: Callable[[], object]) -> None:
        self._ours = True
        try:
            act()
        finally:
            self._ours = False

    def _close_marks(self) -> None:
        while self._marks:
            self._marks.pop().__exit__(None, None, None)

    def _lose(self, why: str) -> None:
        self.lost = f"No step was traced: {why}"
        with Quiet(Exception):
            self.give_up()

    # ---- marks around the forward of every module below the root, on every thread, also where a backward repeats it

    def _running(self) -> list[tuple[nn.Module, str, Any]]:
        return vars(self._local).setdefault("running", [])  # type: ignore[no-any-return]

    def _forward_begins(self, module: nn.Module, args: Any) -> None:
        """A forward begins."""
        running = self._running()
        name = self._names.name_for(module, running[-1][1] if running else "")
        if name is not None:
            # The mark of the phase is the root's. A second one would cross it: hooks of every module run before a
            # module's own, at both ends of a forward.
            mark = optional.new_mark(MODULE_MARK + name) if name else nullcontext()
            mark.__enter__()
            running.append((module, name, mark))

    def _forward_ends(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward ends, and with it those inside that ended by an error that skips hooks."""
        running, ended = self._running(), None
        if any(one is module for one, _, _ in running):
            while ended is not module:
                ended, _, mark = running.pop()
                mark.__exit__(None, None, None)
