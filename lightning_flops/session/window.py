"""One window of a run: its recorder, with the wrappers, the scope and the watches, for as long as each is needed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lightning_flops.instrument.border import UndoLedger

if TYPE_CHECKING:
    from lightning_flops.instrument.memory import MemoryWatch
    from lightning_flops.instrument.patches import Patches
    from lightning_flops.instrument.recorder import Recorder
    from lightning_flops.instrument.timing.gpu_counters import GpuWatch
    from lightning_flops.instrument.timing.processor_wait import ProcessorWatch
    from lightning_flops.records import RunContext, WindowRecord


class Window:
    """A window that waits for its step, is open, or is closed.

    Args:
        step: it opens before this step, given as the number of steps of the run before it; None: it never opens.
        recorder: decides what to do with each step.
        memory: follows the counted step.
        processors: watches the timed steps, as *gpu* does.
        gpu: reads the GPU's counters.
        taps: holds the wrappers around the parts of a step.
        tap_parts: adds them.
    """

    def __init__(
        self,
        *,
        step: int | None,
        recorder: Recorder,
        memory: MemoryWatch,
        processors: ProcessorWatch,
        gpu: GpuWatch,
        taps: Patches,
        tap_parts: Callable[[Patches], None],
    ) -> None:
        self.step = step
        self.recorder = recorder
        self.memory = memory
        self.processors = processors
        self.gpu = gpu
        self.is_open = False
        self.marking = False
        """The parts of the running step are marked."""
        self.in_scope = False
        """A batch is running inside the recorder's scope."""
        self._taps = taps
        self._tap_parts = tap_parts
        self._scope = ExitStack()

    def open(self, *, steps_done: int) -> None:
        """The step that begins now is counted; *steps_done* steps of the run came before it."""
        self.recorder.open(steps_done=steps_done)
        self.is_open = True

    def begin_sample(self, *, steps_done: int) -> None:
        """The step whose first batch begins is counted, though the window is not open."""
        self.recorder.sample(steps_done=steps_done)
        self.follow()
        self.enter_scope()

    def begin_check(self, *, steps_done: int) -> None:
        """The step that begins now is counted, though the window is not open; its door enters the scope of a batch."""
        self.recorder.sample(steps_done=steps_done)
        self.follow()

    def end_sample(self) -> None:
        """The batch of a sampled step, or all of the step, is over."""
        self.leave_scope()
        self.follow()

    def drop_sample(self) -> None:
        """The sampled step will not end."""
        self.leave_scope()
        self.recorder.drop_sample()
        self.follow()

    def follow(self) -> None:
        """Have the wrappers around the parts of a step in place while the recorder needs them, and only then."""
        timer = self.recorder.timer
        if self._watch(timed=timer is not None) and timer is not None:
            timer.go_on()  # what the watches have just read is in no step
        self.marking = self.recorder.marking
        if self.marking == bool(self._taps):
            return
        if self.marking:
            self._tap_parts(self._taps)
        else:
            self._taps.undo()

    def end_watches(self) -> None:
        """The timed steps are over."""
        self._watch(timed=False)

    def _watch(self, *, timed: bool) -> bool:
        """Whether a watch took some time, because the first timed step is next."""
        self.processors.follow(timed=timed)
        return self.gpu.follow(timed=timed)

    def next_timed_step(self) -> None:
        """A timed step is over, and the next begins here: what we do in between is in neither."""
        if (timer := self.recorder.timer) is not None:
            self.gpu.between_steps()
            timer.go_on()

    # ---- the step that is running

    def enter_scope(self) -> None:
        """A batch begins, including the wait for it."""
        self._scope.enter_context(self.recorder.batch_scope())
        self.in_scope = True

    def leave_scope(self) -> None:
        """The batch is over, and so is what ran after its end was reported."""
        self.in_scope = False
        self._scope.close()

    def enter(self, part: str, *, counts: bool) -> None:
        """*part* of a step begins, inside whatever part is running."""
        if self.marking:
            if self.is_open and self.recorder.counting:
                self.memory.enter(part)
            self.recorder.enter(part, counts=counts)

    def leave(self) -> None:
        """The part entered last ends."""
        if self.marking:
            self.recorder.leave()  # first, so that the rest is not in the part's time
            if self.is_open and self.recorder.counting:
                self.memory.leave()

    # ---- the end

    def close(self, *, context: RunContext, run_goes_on: bool) -> WindowRecord | None:
        """End the window and return what it measured, as ``Recorder.close`` does."""
        self.is_open = False
        record = self.recorder.close(context=context, run_goes_on=run_goes_on)
        self._taps.undo()
        return record

    def abandon(self) -> None:
        """Remove everything of the window from torch and from the framework's objects."""
        self.is_open = self.marking = self.in_scope = False
        undo = UndoLedger()
        undo.add(self._scope.close)
        undo.add(self.recorder.abandon)
        undo.add(self._taps.undo)
        undo.close()
