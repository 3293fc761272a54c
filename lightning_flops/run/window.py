"""What measures one window of a run: its recorder and the watches beside it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.instrument.memory import MemoryWatch, memory_reader
from lightning_flops.instrument.recorder import Recorder
from lightning_flops.instrument.timing.clocks import clock_for
from lightning_flops.instrument.timing.forward_timer import ForwardTimer
from lightning_flops.instrument.timing.gpu_counters import GpuMeter, GpuWatch
from lightning_flops.instrument.timing.processor_wait import ProcessorWatch
from lightning_flops.instrument.tracing.step_tracer import StepTracer
from lightning_flops.instrument.tracing.trace_cycles import TraceCycles

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.notes import Notes
    from lightning_flops.instrument.window_states import CountedStep
    from lightning_flops.run.adapter import Facts


@dataclass(slots=True)
class Window:
    """One window; steps outside of windows are counted by the recorder of the next one."""

    step: int | None
    """It opens before this step, given as the number of steps before it; None: it never opens."""
    recorder: Recorder
    memory: MemoryWatch
    processors: ProcessorWatch
    gpu: GpuWatch
    is_open: bool = False
    micro_batch_size: int | None = None
    fetches: int = 0
    """Seen since the window was made."""

    @property
    def profiles(self) -> bool:
        """Whether the running step is slowed down: it is counted, traced, or the warm-up of a trace."""
        return self.recorder.counting or self.recorder.tracing

    def follow(self) -> None:
        """Have the watches on while steps are timed."""
        timer = self.recorder.timer
        self.processors.follow(timed=timer is not None)
        if self.gpu.follow(timed=timer is not None) and timer is not None:
            timer.go_on()  # what the watch has just read is in no step

    def end_watches(self) -> None:
        """The timed steps are over."""
        self.processors.follow(timed=False)
        self.gpu.follow(timed=False)


def new_window(
    step: int | None,
    *,
    facts: Facts,
    config: ProfilerConfig,
    notes: Notes,
    gpu_meter: GpuMeter | None,
    counted: Callable[[CountedStep], None],
) -> Window:
    """A window that opens before *step*, or never; *counted* gets each step that was counted."""
    device = facts.device
    recorder = Recorder(
        facts.root,
        profile_step=sys.maxsize if step is None else step,
        timing_steps=config.timing_steps,
        settle_steps=facts.settle_steps,
        clock=clock_for(device),
        new_counter=lambda root: FlopCounter(root, causal_attention=config.causal_attention),
        notes=notes,
        tracing=_tracing(facts, config) if config.trace and step is not None else None,
        whole=facts.whole_model,
        counted=counted,
    )
    memory = MemoryWatch(facts.root, read=memory_reader(device), on_device=device.type == "cuda")
    return Window(step, recorder, memory, ProcessorWatch(), GpuWatch(gpu_meter))


def _tracing(facts: Facts, config: ProfilerConfig) -> TraceCycles:
    tracer = StepTracer(
        facts.root,
        device=facts.device,
        record_shapes=config.record_shapes,
        profile_memory=config.profile_memory,
        with_stack=config.with_stack,
        keep_file=config.trace_dir is not None and (facts.rank == 0 or config.all_ranks),
    )
    return TraceCycles([tracer, ForwardTimer(facts.root, lambda: clock_for(facts.device))], config.trace_schedule)
