"""Parts of traced steps; times in microseconds."""

from __future__ import annotations

from lightning_flops.trace import step_parts
from lightning_flops.trace.columns import Trace
from tests.analysis.trace_events import Event, kernel, launch, operator, scope, step, trace

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def part(name: str, start: float, length: float) -> Event:
    return scope(f"phase: {name}", start, length)


def test_parts_of_several_steps_are_means_and_a_step_without_marks_is_one_part() -> None:
    loaded = trace(step(1, 0, 50), part("forward", 0, 50), step(2, 50, 70), part("forward", 50, 30))
    assert parts(loaded) == {"forward": (40, 0), "other": (20, 0)}
    assert parts(trace(step(1, 0, 50), operator("aten::mm", 1, 1))) == {"other": (50, 0)}


def parts(loaded: Trace) -> dict[str, tuple[float, float]]:
    """Wall time and exposed communication of each part."""
    return {one.name: (round(one.wall_sec * 1e6, 6), round(one.exposed_sec * 1e6, 6)) for one in step_parts(loaded)}


def test_a_moment_belongs_to_the_innermost_part_and_what_is_in_none_to_other() -> None:
    # As in Lightning, forward and backward run in the optimizer's closure.
    loaded = trace(
        step(1, 0, 100),
        part("data_wait", 5, 10),
        part("optimizer", 20, 60),
        part("forward", 25, 10),
        part("backward", 40, 25),
        operator("aten::mm", 26, 1),
    )
    assert parts(loaded) == {
        "other": (5 + 5 + 20, 0),
        "data_wait": (10, 0),
        "optimizer": (5 + 5 + 15, 0),
        "forward": (10, 0),
        "backward": (25, 0),
    }


def test_communication_is_exposed_where_nothing_computes_in_the_part_in_which_it_is_waited_for() -> None:
    loaded = trace(
        step(1, 0, 100),
        part("forward", 0, 40),
        part("backward", 40, 50),
        operator("aten::mm", 45, 15),
        scope("gloo:all_gather", 30, 15, thread=2),
        scope("gloo:all_reduce", 50, 30, thread=3),
    )
    # The gathering goes on from 30 to 45; of the sum from 50 to 80 the product hides the first 10.
    assert parts(loaded) == {"forward": (40, 10), "backward": (50, 5 + 20), "other": (10, 0)}


def test_with_a_device_a_part_ends_when_the_work_launched_in_it_does() -> None:
    loaded = trace(
        step(1, 0, 100),
        part("forward", 0, 10),
        launch(1, 2),
        kernel(1, 5, 30),  # until 35
        part("backward", 10, 10),
        launch(2, 12),
        kernel(2, 35, 40),  # until 75
        launch(3, 15),
        kernel(3, 60, 60, name=NCCL, stream=20),  # until 120, hidden until 75
        part("optimizer", 20, 5),
        launch(4, 21),
        kernel(4, 120, 10),  # until 130, and so does the step
    )
    # The optimizer's part holds the wait for the gradients: on the device it is there that its stream stood still.
    assert parts(loaded) == {"forward": (35, 0), "backward": (40, 0), "optimizer": (55, 45), "other": (0, 0)}


def test_a_device_that_idles_for_a_late_host_spends_its_own_time_and_not_communication() -> None:
    # A rank that reads data until 60 launches late; its collective then needs only the transfer.
    late = trace(
        step(1, 0, 100),
        part("data_wait", 0, 60),
        part("backward", 60, 20),
        launch(1, 61),
        kernel(1, 65, 20),
        launch(2, 70),
        kernel(2, 85, 5, name=NCCL, stream=20),
        part("optimizer", 80, 20),
    )
    assert parts(late) == {"data_wait": (60, 0), "backward": (25, 0), "optimizer": (15, 5)}
