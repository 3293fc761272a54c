from __future__ import annotations

from typing import Any

from lightning_flops.schema.trace_steps import StepTime
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.steps import phase_table, step_times
from tests.analysis.trace_events import (
    data_loader,
    kernel,
    launch,
    made,
    node,
    on_device,
    operator,
    phase,
    scope,
    step,
    trace,
)


def test_each_moment_of_a_step_goes_to_the_first_kind_that_ran_in_it() -> None:
    loaded = trace(
        step(4, 0, 100),
        data_loader(0, 30),  # 0-30, less 10-20 of the copy: 20
        operator("aten::mm", 25, 35),  # 25-60, less the loader to 30, the call 40-50 and the kernel from 55: 15
        launch(1, 40, 10),  # 10
        kernel(1, 55, 15),  # 55-70: 15
        launch(2, 41, 1),  # inside the other call: nothing
        kernel(2, 60, 20, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", stream=9),  # what the kernel leaves: 10
        launch(3, 5, 1),  # 1 of the loader's
        on_device("gpu_memcpy", 3, 10, 10, name="Memcpy HtoD (Pinned -> Device)"),  # 10
        launch(4, 43, 1),
        on_device("gpu_memset", 4, 80, 5, name="Memset (Device)"),  # 5
    )
    assert step_times(loaded).marked
    (found,) = step_times(loaded).steps
    assert found == StepTime(
        number=4, wall_us=100, kernel_us=15, memcpy_us=10, memset_us=5, communication_us=10, runtime_us=11,
        data_loader_us=19, cpu_us=15, other_us=15,
    )  # fmt: skip


def test_a_step_lasts_to_the_last_kernel_launched_in_it_and_the_next_begins_there() -> None:
    loaded = trace(
        step(1, 0, 100), launch(1, 90), kernel(1, 95, 45),  # to 140, 35 into the next step
        step(2, 105, 100), launch(2, 110), kernel(2, 140, 10),  # ends before its step does
    )  # fmt: skip
    assert (loaded.steps.start_ns // 1000).tolist() == [0, 140]
    assert (loaded.steps.end_ns // 1000).tolist() == [140, 205]
    assert [time.kernel_us for time in step_times(loaded).steps] == [45, 10]


def test_a_kernel_launched_before_the_first_step_puts_off_its_start() -> None:
    loaded = trace(launch(1, 0), kernel(1, 5, 20), step(1, 10, 50), operator("aten::mm", 30, 1))
    assert (loaded.steps.start_ns // 1000).tolist() == [25]
    assert step_times(loaded).mean.kernel_us == 0


def phases(loaded: Trace) -> dict[str, tuple[Any, ...]]:
    """Calls, host time and device time of each phase."""
    return {
        row.name: (row.calls, row.host and row.host.total_us, row.device and row.device.total_us)
        for row in phase_table(loaded) or ()
    }


def test_phases_named_by_scopes_are_taken_from_them() -> None:
    loaded = trace(
        step(1, 0, 100), data_loader(0, 10),
        scope("[pl][profile][Strategy]SingleDeviceStrategy.training_step", 10, 20),
        scope("DistributedDataParallel.forward", 12, 15),  # inside: no call of its own
        launch(1, 15), kernel(1, 16, 30),
        scope("[pl][profile][Strategy]SingleDeviceStrategy.backward", 35, 25),
        launch(2, 40, thread=2),  # autograd's thread
        kernel(2, 50, 20),
        scope("Optimizer.step#AdamW.step", 65, 15), launch(3, 66), kernel(3, 70, 5),
        launch(4, 90), kernel(4, 91, 2),
    )  # fmt: skip
    assert phases(loaded) == {
        "step": (1, 100, 57), "data loader": (1, 10, 0), "forward": (1, 20, 30), "backward": (1, 25, 20),
        "optimizer": (1, 15, 5), "others": (1, 30, 2),
    }  # fmt: skip
    *_, others = phase_table(loaded) or ()
    assert others.host is not None and others.device is not None
    assert (others.host.ratio, others.device.ratio) == (0.3, 2 / 57)


def test_what_marks_tell_apart_inside_an_optimizers_step_is_not_the_optimizers() -> None:
    loaded = trace(
        step(1, 0, 100),
        phase("optimizer", 10, 80), scope("Optimizer.step#SGD.step", 12, 76),
        phase("other", 14, 56),  # the closure, with a trainer's hooks in it: 14-70
        phase("forward", 20, 10), launch(1, 25), kernel(1, 26, 7),
        launch(2, 32), kernel(2, 33, 11),  # of a hook
        phase("optimizer", 35, 5), launch(3, 36), kernel(3, 50, 13),  # dropping the gradients
        phase("backward", 45, 20),
        launch(4, 80), kernel(4, 81, 3),
    )  # fmt: skip
    # 10-14, 35-40 and 70-90; what is before and after the optimizer's scope, and the rest of the closure, is others'.
    assert phases(loaded) == {
        "step": (1, 100, 34), "forward": (1, 10, 7), "backward": (1, 20, 0), "optimizer": (1, 4 + 5 + 20, 13 + 3),
        "others": (1, 100 - 29 - 10 - 20, 11),
    }  # fmt: skip


def test_without_scopes_there_are_no_phases() -> None:
    assert phase_table(trace(step(1, 0, 200), made(1, 20, 10), node(1, 50, 10))) is None
