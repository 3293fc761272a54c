"""What the windows of a run measure with, as the settings, the device and the framework say."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lightning_flops.analysis.traced_step import NEEDS_NUMPY, can_read_traces
from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.instrument.memory import MemoryWatch, memory_reader
from lightning_flops.instrument.recorder import Recorder
from lightning_flops.instrument.timing.clocks import clock_for
from lightning_flops.instrument.timing.forward_timer import ForwardTimer
from lightning_flops.instrument.timing.gpu_counters import GpuWatch
from lightning_flops.instrument.timing.processor_wait import ProcessorWatch
from lightning_flops.instrument.tracing.step_tracer import StepTracer
from lightning_flops.instrument.tracing.trace_cycles import TraceCycles, Tracer
from lightning_flops.session.window import Window

if TYPE_CHECKING:
    from torch import nn

    from lightning_flops.config import ProfilerConfig
    from lightning_flops.instrument.notes import Notes
    from lightning_flops.instrument.patches import Patches
    from lightning_flops.instrument.timing.gpu_counters import GpuMeter
    from lightning_flops.instrument.window_states import CountedStep
    from lightning_flops.session.door import Door, RunPlan


class Instruments:
    """Equips each window of a run with a recorder and with watches of its own.

    Args:
        door: tells what its framework knows.
        root: the model whose modules own the work.
        config: the settings.
        plan: what is known of the run.
        notes: of the run and of its windows.
        gpu_meter: reads the GPU's counters; None without them.
        keeps_traces: this rank keeps trace files, where the settings name a folder.
        taps: of each window.
        counted: is told of each step that was counted.
    """

    def __init__(
        self,
        door: Door,
        root: nn.Module,
        *,
        config: ProfilerConfig,
        plan: RunPlan,
        notes: Notes,
        gpu_meter: GpuMeter | None,
        keeps_traces: bool,
        taps: Patches,
        counted: Callable[[CountedStep], None],
    ) -> None:
        self._door = door
        self._root = root
        self._config = config
        self._plan = plan
        self._notes = notes
        self._gpu_meter = gpu_meter
        self._keeps_traces = keeps_traces
        self._taps = taps
        self._counted = counted

    def window(self, step: int | None, *, steps_done: int) -> Window:
        """A window that opens before *step*, given as the number of steps before it; None: it never opens.

        Args:
            step: the one to profile.
            steps_done: steps of the run so far.
        """
        device = self._plan.device
        return Window(
            step=step,
            recorder=self._recorder(step, steps_done=steps_done),
            memory=MemoryWatch(self._root, read=memory_reader(device), on_device=device.type == "cuda"),
            processors=ProcessorWatch(),
            gpu=GpuWatch(self._gpu_meter),
            taps=self._taps,
            tap_parts=self._door.tap_parts,
        )

    def _recorder(self, step: int | None, *, steps_done: int) -> Recorder:
        config = self._config
        return Recorder(
            self._root,
            profile_step=steps_done + 1 if step is None else step,
            timing_steps=config.timing_steps,
            settle_steps=self._plan.settle_steps,
            feed=self._door.feed(),
            clock=clock_for(self._plan.device),
            new_counter=lambda root: FlopCounter(root, causal_attention=config.causal_attention),
            notes=self._notes,
            tracing=self._tracing() if config.trace and step is not None else None,
            whole=self._door.whole_model,
            counted=self._counted,
        )

    def _tracing(self) -> TraceCycles:
        config, device = self._config, self._plan.device
        tracers: list[Tracer] = []
        keep_file = config.trace_dir is not None and self._keeps_traces
        if keep_file or can_read_traces():
            tracers.append(
                StepTracer(
                    self._root,
                    device=device,
                    record_shapes=config.record_shapes,
                    profile_memory=config.profile_memory,
                    with_stack=config.with_stack,
                    keep_file=keep_file,
                )
            )
        else:
            self._notes.add_for_run(f"No step was traced: {NEEDS_NUMPY}.")
        tracers.append(ForwardTimer(self._root, lambda: clock_for(device)))
        return TraceCycles(tracers, config.trace_schedule)
