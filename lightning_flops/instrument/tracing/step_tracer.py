"""Runs one step under torch.profiler, with marks around modules and phases, and keeps what it recorded.

The user's profiler always has priority: ours does not start beside one, and stops when one is set up.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import import_module
from typing import Any

import torch
import torch.autograd.profiler as autograd_profiler
from torch import distributed, nn
from torch.profiler import ProfilerActivity, record_function

from lightning_flops import host_clock
from lightning_flops.instrument.border import UndoLedger
from lightning_flops.instrument.module_hooks import module_hooks
from lightning_flops.instrument.patches import Patches
from lightning_flops.instrument.torch_private import profiling
from lightning_flops.instrument.tracing import module_marks, raw_events
from lightning_flops.records import METADATA_KEY, StepSignature, TracedStepRecord, phase_mark
from lightning_flops.signals import words_of
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)

_LOG_LEVEL = "KINETO_LOG_LEVEL"
_SILENT = "6"
"""At this level Kineto does not report every start and stop on stderr."""


class StepTracer:
    """Traces steps: ``warm_up`` ahead, ``start`` at each batch, ``stop`` after the last, ``enter``/``leave`` the parts.

    No failure reaches the step: neither one of ours, nor one of the profiler when a profiler of the user's ends it.

    Args:
        root: the model whose modules are marked.
        device: where the model computes.
        record_shapes: record the shapes of operators' inputs.
        profile_memory: record allocations and frees.
        with_stack: record the Python calls.
        keep_file: write a trace file, even if the events can be read without one.
    """

    def __init__(
        self,
        root: nn.Module,
        *,
        device: torch.device,
        record_shapes: bool = False,
        profile_memory: bool = False,
        with_stack: bool = False,
        keep_file: bool = False,
    ) -> None:
        self._root = root
        self._device = device
        self._settings = {"record_shapes": record_shapes, "profile_memory": profile_memory, "with_stack": with_stack}
        self._keep_file = keep_file
        self._folder: str | None = None
        self._profiler: Any = None
        self._prepared = False
        self._recording = False
        self._ours = False
        self._undo = ExitStack()
        self._step_mark: Any = None
        self._phases: list[Any] = []
        self._marks: module_marks.ModuleMarks | None = None
        self._use: _ProcessorUse | None = None
        self._index = self._first_index = -1
        self.record: TracedStepRecord | None = None
        """The latest step that was traced to its end."""
        self.lost: str | None = None
        """Why something cannot be traced, in a sentence; None if everything can."""

    # ---- the schedule

    def warm_up(self) -> None:
        """The next step will be traced: put up the marks, and start a device's tracing early."""
        if self._marks is not None or self.lost is not None:
            return
        try:
            if (other := _other_profiler()) is not None:
                self._lose(f"No step was traced: {other}, and torch runs one profiler at a time.")
                return
            self._index = -1
            self._put_up()
            if self._device.type != "cpu":
                self._prepare()
        except Exception as error:
            self._failed(error)

    def start(self, index: int) -> None:
        """The step begins, or the next one of its batches.

        Args:
            index: steps of this fit before it.
        """
        if self.lost is not None:
            return
        try:
            if self._recording:
                self._mark_step(index)
                return
            if self._marks is None:
                self.warm_up()
            elif (other := _other_profiler()) is not None:
                self._lose(f"No step was traced: {other}, and torch runs one profiler at a time.")
            if self.lost is not None:
                return
            if not self._prepared:
                self._prepare()
            with self._by_us():
                self._profiler.start_trace()
            self._recording = True
            self._use = _ProcessorUse()
            self._first_index = index
            self._mark_step(index)
        except Exception as error:
            self._failed(error)

    def enter(self, part: str) -> None:
        """*part* of the step begins; in a forward, work outside of module calls is the root's."""
        if self._recording:
            mark = profiling.new_mark(phase_mark(part))
            mark.__enter__()
            self._phases.append(mark)

    def leave(self) -> None:
        """The part entered last ends."""
        if self._phases:
            self._phases.pop().__exit__(None, None, None)

    def stop(self, signature: StepSignature) -> None:
        """The last step is over: keep what was recorded, and remove everything from torch.

        Args:
            signature: of the steps.
        """
        if not self._recording:
            return
        try:
            self._close_marks()
            assert self._use is not None
            use = {**self._use.so_far(), "rank": _rank()}
            self._profiler.add_metadata_json(METADATA_KEY, json.dumps(use))
            with self._by_us():
                self._profiler.stop_trace()
            self._recording = self._prepared = False
            profiler, self._profiler = self._profiler, None
            metadata = {METADATA_KEY: use, **profiling.place_in_run(profiler)}
            self.record = record = self._read(profiler, signature, metadata)
            if record.columns is not None and self._device.type != "cpu":
                self.lost = (
                    f"The trace has no event of the {self._device.type} device (it may not be permitted here): kernels "
                    "and device times of modules are n/a."
                )
            self.give_up()
        except Exception as error:
            self._failed(error)

    def give_up(self) -> None:
        """Stop tracing, and remove everything of ours from torch. What was traced before stays."""
        ledger = UndoLedger()  # it runs each of these, the last one first, also if another one raises
        ledger.add(self._undo.close)
        ledger.add(self._stop_profiler)
        ledger.add(self._close_marks)
        self._marks = None
        ledger.close()

    def _stop_profiler(self) -> None:
        """May be called again if it was interrupted: what it has done shows in what it would do next."""
        if self._prepared:
            try:
                with self._by_us():
                    # Torch says whether it records: we may have failed right after it began, or after it ended.
                    if not self._recording and not profiling.profiler_is_recording():
                        self._recording = True  # torch crashes if it starts what was not prepared: try this only once
                        self._profiler.start_trace()  # only a start and a stop make Kineto drop what it prepared
                    if profiling.profiler_is_recording():
                        self._profiler.stop_trace()
            except Exception:  # of torch, or of whatever else listens to its profiler; the rest is undone all the same
                logger.warning("torch.profiler could not be stopped", exc_info=True)
        self._prepared = self._recording = False
        self._profiler = None

    # ---- inside

    def _put_up(self) -> None:
        marks = module_marks.ModuleMarks(self._root)
        with ExitStack() as undo:
            patches = Patches()
            undo.callback(patches.undo)
            for name in profiling.functions_that_set_up():
                patches.replace(autograd_profiler, name, self._stand_aside)
            undo.enter_context(module_hooks(marks.enter, marks.leave))
            self._undo = undo.pop_all()
        self._marks = marks

    def _prepare(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        elif self._device.type == "xpu":
            activities.append(ProfilerActivity.XPU)
        self._profiler = profiling.new_profiler()(activities=activities, **self._settings)
        with self._by_us(), _silent_kineto():
            self._profiler.prepare_trace()
        self._prepared = True  # not before: torch crashes if it starts a trace that was not prepared

    def _mark_step(self, index: int) -> None:
        if index == self._index:
            return  # another batch of the same step
        if self._step_mark is not None:
            self._step_mark.__exit__(None, None, None)
        self._index = index
        mark: Any = record_function(f"ProfilerStep#{index}")
        mark.__enter__()
        self._step_mark = mark  # once it was entered: leaving it before raises

    def _stand_aside(self, original: Callable[..., Any]) -> Callable[..., Any]:
        whole = weakref.ref(self)  # an undone patch may live until the next garbage collection

        def begin(*args: Any, **kwargs: Any) -> Any:
            tracer = whole()
            if tracer is not None and not tracer._ours:
                tracer._lose("No step was traced: another profiler was set up meanwhile, and torch runs one at a time.")
            return original(*args, **kwargs)

        return begin

    @contextmanager
    def _by_us(self) -> Iterator[None]:
        self._ours = True
        try:
            yield
        finally:
            self._ours = False

    def _close_marks(self) -> None:
        while self._phases:
            self.leave()
        mark, self._step_mark = self._step_mark, None
        if mark is not None:
            mark.__exit__(None, None, None)

    def _lose(self, why: str) -> None:
        self.lost = why
        with suppress(Exception):
            self.give_up()

    def _failed(self, error: Exception) -> None:
        logger.debug("a step could not be traced", exc_info=True)
        self._lose("No step was traced: torch.profiler failed.")
        self.lost = f"No step was traced: torch.profiler failed ({words_of(error)})."

    def _read(self, profiler: Any, signature: StepSignature, metadata: Mapping[str, Any]) -> TracedStepRecord:
        events = profiler.profiler.kineto_results.events()
        # Arguments of calls and addresses of memory stand in the file alone.
        in_file_alone = self._settings["record_shapes"] or self._settings["profile_memory"]
        columns = None if in_file_alone else raw_events.columns_of(events)
        path = self._export(profiler) if self._keep_file or columns is None else None
        return TracedStepRecord(
            index=self._first_index,
            signature=signature,
            process=os.getpid(),
            columns=columns,
            path=path,
            metadata=metadata,
        )

    def _export(self, profiler: Any) -> str:
        """Let torch write the trace to a file, which is deleted with this tracer."""
        if self._folder is None:
            self._folder = tempfile.mkdtemp(prefix="lightning_flops-")
            weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        path = f"{self._folder}/step{self._first_index}.pt.trace.json"
        profiler.export_chrome_trace(path)
        return path


def _other_profiler() -> str | None:
    """The user's profiler that is on, or may be switched on at any moment, in words; None if there is none."""
    if profiling.profiler_is_recording():
        return "another profiler is running"
    if profiling.profiler_is_set_up():
        return "a torch.profiler.profile is set up in this run"
    return None


@contextmanager
def _silent_kineto() -> Iterator[None]:
    """Inside, Kineto does not report our trace on stderr. It reads its log level when it is first used."""
    if _LOG_LEVEL in os.environ:
        yield
        return
    os.environ[_LOG_LEVEL] = _SILENT
    try:
        yield
    finally:
        os.environ.pop(_LOG_LEVEL, None)


def _rank() -> int:
    """This process's rank; 0 without a process group."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0


class _ProcessorUse:
    """Seconds of processor time since it was made: of this process, and with psutil of the whole machine."""

    def __init__(self) -> None:
        self._start = self._now()

    def so_far(self) -> dict[str, float]:
        """The seconds so far, by the names that they have in a trace."""
        return {name: now - self._start[name] for name, now in self._now().items() if name in self._start}

    @staticmethod
    def _now() -> dict[str, float]:
        times = {"process_cpu_sec": host_clock.processor_sec(), "elapsed_sec": host_clock.now()}
        try:
            machine = import_module("psutil").cpu_times()
            idle = machine.idle + getattr(machine, "iowait", 0.0)
            # On Linux the hosts' time already includes the guests' time.
            total = sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)
            times |= {"system_busy_sec": total - idle, "system_idle_sec": idle}
        except Exception:  # not installed, or not on this system
            logger.debug("no system CPU times: psutil is not there", exc_info=True)
        return times
