"""What measures one window of a run: its recorder, its other watches, and what is on torch for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from lightning_flops.config import ProfilerConfig
from lightning_flops.measure.counting.flop_counter import CountedStep, FlopCounter
from lightning_flops.measure.lines import LineSampler
from lightning_flops.measure.memory import MemoryWatch, memory_reader
from lightning_flops.measure.notes import Notes
from lightning_flops.measure.parts import Parts
from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.measure.recorder import Phase, Recorder
from lightning_flops.measure.run_facts import gather_run_facts
from lightning_flops.measure.timing.phase_timer import clock_for
from lightning_flops.measure.timing.processor_wait import Heat, ProcessorWatch
from lightning_flops.measure.tracing.step_tracer import StepTracer
from lightning_flops.records import RunContext, WindowRecord
from lightning_flops.run.adapter import Adapter
from lightning_flops.signals import Undo, words_of


@dataclass(slots=True)
class Window:
    """One window; steps outside of windows are counted by the recorder of the next one."""

    step: int | None  # it opens before this step, given as the number of steps before it; None: it never opens
    recorder: Recorder
    memory: MemoryWatch
    processors: ProcessorWatch
    is_open: bool = False
    micro_batch_size: int | None = None
    fetches: int = 0  # seen since the window was made
    scope: Undo | None = None  # of the running batch, if it is counted or traced
    marks: Undo | None = None  # of the parts of a step, where they are needed
    parts: Parts | None = None  # takes those of the running step; None: nothing asks for them
    ends_at: tuple[int, int] | None = None  # where the run and its loggers were after the last step that is in a figure

    @property
    def is_idle(self) -> bool:
        """Whether nothing of a step is measured, and nothing is in place for that."""
        return self.recorder.state is Phase.WAITING and self.marks is None

    def open(self, *, steps_done: int) -> None:
        """The step that begins now is the one to count."""
        self.recorder.open(steps_done=steps_done)
        self.is_open = True

    def follow(self, mark_parts: Callable[[Undo], None], *, outside: bool) -> None:
        """Have in place what the next batch needs: *mark_parts*, a scope unless it is *outside* of steps, watches."""
        recorder = self.recorder
        self.processors.follow(timed=recorder.state is Phase.TIMING)
        if not recorder.marking:
            self.unmark()
        elif self.marks is None:
            self.marks = Undo()
            mark_parts(self.marks)
        if not outside:
            self.enter_scope()
        self.parts = recorder.parts
        recorder.resume()  # what was read and put in place here is in no step

    def enter_scope(self) -> None:
        """What runs from here on is counted or traced, if the running step is."""
        if self.scope is None and (self.recorder.counting or self.recorder.tracing):
            self.scope = Undo()
            self.scope.enter_context(self.recorder.batch_scope())

    def leave_scope(self) -> None:
        """What was counted until here is a whole batch, or what the loop did before something outside of steps."""
        if self.scope is not None:
            self.scope.close()
            self.scope = None  # last: what an interrupt leaves of it, the next call undoes

    def unmark(self) -> None:
        """Take the marks off."""
        self.parts = None
        if self.marks is not None:
            self.marks.close()
            self.marks = None

    def finish(
        self, adapter: Adapter, context: RunContext, notes: Notes, *, padding: float | None
    ) -> WindowRecord | None:
        """The window is over: what it measured, with what the user's objects say; None if it counted no whole step."""
        self.processors.follow(timed=False)
        self.unmark()
        if unseen := adapter.facts.unseen:
            self.recorder.cannot_tell_apart(unseen if self.fetches else ("data_wait", *unseen))
            if not self.fetches:
                notes.add_for_run(
                    "The wait for data could not be seen, because the batches did not come from a torch DataLoader on "
                    "the training thread: it is in other."
                )
        record = self.recorder.close(context=context)
        if record is None:
            return None
        try:
            with random_state_kept():  # the questions call methods of the user's modules and optimizers
                optimizers = adapter.optimizers()
                record = replace(
                    record,
                    facts=gather_run_facts(
                        adapter.facts.root,
                        device=adapter.facts.device,
                        optimizers=optimizers,
                        loader_workers=min(adapter.loader_workers(), default=None),
                        padding_ratio=padding,
                    ),
                    memory=self.memory.record(optimizers=optimizers),
                    tensors=self.memory.tensors(
                        optimizers=optimizers, step=record.counted_steps[0], samples=self.micro_batch_size
                    ),
                )
        except Exception as error:  # the report lacks these answers
            notes.speak(f"how the run is set up, or what its memory is for, could not be read: {words_of(error)}")
        return replace(record, processor=self.processors.loss())

    def close(self) -> None:
        """Remove everything of this window."""
        with Undo() as undo:
            undo.callback(self.unmark)
            undo.callback(self.recorder.abandon)
            undo.callback(self.leave_scope)


def new_window(
    step: int | None,
    *,
    adapter: Adapter,
    config: ProfilerConfig,
    notes: Notes,
    heat: Heat,
    counted: Callable[[CountedStep], None],
    may_time: Callable[[int, int], bool],
) -> Window:
    """A window that opens before *step*, or never; *counted* and *may_time* (after *step*) as of ``Recorder``."""
    facts, device, tracer = adapter.facts, adapter.facts.device, None
    held = weakref.ref(adapter)  # what counts keeps no run alive
    if config.trace and step is not None:
        tracer = StepTracer(
            facts.root,
            device=device,
            schedule=config.trace_schedule,
            record_shapes=config.record_shapes,
            profile_memory=config.profile_memory,
            with_stack=config.with_stack,
        )
    memory = MemoryWatch(facts.root, read=memory_reader(device), device=device)
    recorder = Recorder(
        facts.root,
        timing_steps=config.timing_steps,
        settle_steps=facts.settle_steps,
        clock=clock_for(device),
        new_counter=lambda root: FlopCounter(
            root,
            causal_attention=config.causal_attention,
            lives=memory,
            looks=lambda model: None if (one := held()) is None else one.looks(model),
        ),
        notes=notes,
        memory=memory,
        tracer=tracer,
        lines=LineSampler(asked=config.lines),
        whole=facts.whole,
        counted=counted,
        may_time=partial(may_time, step or 0),
    )
    return Window(step, recorder, memory, ProcessorWatch(heat=heat))
