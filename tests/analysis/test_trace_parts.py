"""Parts of traced steps and what filled them; times of events in microseconds, of fillings in nanoseconds."""

from __future__ import annotations

from lightning_flops.trace import step_filling, step_parts
from lightning_flops.trace.columns import Trace
from tests.analysis.trace_events import kernel, launch, node, on_device, operator, phase, scope, step, trace

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def parts(loaded: Trace) -> dict[str, tuple[float, float]]:
    """Wall time and exposed communication of each part."""
    return {one.name: (round(one.wall_sec * 1e6, 6), round(one.exposed_sec * 1e6, 6)) for one in step_parts(loaded)}


def test_parts_of_several_steps_are_means_and_a_step_without_marks_is_one_part() -> None:
    loaded = trace(step(1, 0, 50), phase("forward", 0, 50), step(2, 50, 70), phase("forward", 50, 30))
    assert parts(loaded) == {"forward": (40, 0), "other": (20, 0)}
    assert parts(trace(step(1, 0, 50), operator("aten::mm", 1, 1))) == {"other": (50, 0)}


def test_a_moment_belongs_to_the_innermost_part_and_what_is_in_none_to_other() -> None:
    # As in Lightning, forward and backward run in the optimizer's closure.
    loaded = trace(
        step(1, 0, 100), phase("data_wait", 5, 10), phase("optimizer", 20, 60), phase("forward", 25, 10),
        phase("backward", 40, 25), operator("aten::mm", 26, 1),
    )  # fmt: skip
    of_optimizer, of_none = 5 + 5 + 15, 5 + 5 + 20
    expected = {"other": of_none, "data_wait": 10, "optimizer": of_optimizer, "forward": 10, "backward": 25}
    assert parts(loaded) == {name: (wall, 0) for name, wall in expected.items()}


def test_communication_is_exposed_where_nothing_computes_in_the_part_in_which_it_is_waited_for() -> None:
    loaded = trace(
        step(1, 0, 100), phase("forward", 0, 40), phase("backward", 40, 50), operator("aten::mm", 45, 15),
        scope("gloo:all_gather", 30, 15, thread=2), scope("gloo:all_reduce", 50, 30, thread=3),
    )  # fmt: skip
    # The gathering goes on from 30 to 45; of the sum from 50 to 80 the product hides the first 10.
    assert parts(loaded) == {"forward": (40, 10), "backward": (50, 5 + 20), "other": (10, 0)}


def test_with_a_device_a_part_ends_when_the_work_launched_in_it_does() -> None:
    loaded = trace(
        step(1, 0, 100),
        phase("forward", 0, 10), launch(1, 2), kernel(1, 5, 30),  # until 35
        phase("backward", 10, 10), launch(2, 12), kernel(2, 35, 40),  # until 75
        launch(3, 15), kernel(3, 60, 60, name=NCCL, stream=20),  # until 120, hidden until 75
        phase("optimizer", 20, 5), launch(4, 21), kernel(4, 120, 10),  # until 130, and so does the step
    )  # fmt: skip
    # The optimizer's part holds the wait for the gradients: on the device it is there that its stream stood still.
    assert parts(loaded) == {"forward": (35, 0), "backward": (40, 0), "optimizer": (55, 45), "other": (0, 0)}


def test_a_device_that_idles_for_a_late_host_spends_its_own_time_and_not_communication() -> None:
    # A rank that reads data until 60 launches late; its collective then needs only the transfer.
    late = trace(
        step(1, 0, 100), phase("data_wait", 0, 60),
        phase("backward", 60, 20), launch(1, 61), kernel(1, 65, 20), launch(2, 70),
        kernel(2, 85, 5, name=NCCL, stream=20),
        phase("optimizer", 80, 20),
    )  # fmt: skip
    assert parts(late) == {"data_wait": (60, 0), "backward": (25, 0), "optimizer": (15, 5)}


def filling(loaded: Trace, counted: frozenset[str] = frozenset()) -> dict[str, tuple[int, ...]]:
    """Matmul-like, other operators, copies, communication, idle: microseconds of each part that took time."""
    filled = {
        name: (one.matmul_ns, one.operators_ns, one.copies_ns, one.communication_ns, one.idle_ns)
        for name, one in step_filling(loaded, counted=counted).items()
    }
    walls = {one.name: round(one.wall_sec * 1e9) for one in step_parts(loaded)}
    assert {name: sum(each) for name, each in filled.items()} == walls
    return {name: tuple(ns // 1000 for ns in each) for name, each in filled.items() if walls[name]}


def test_on_the_host_a_moment_is_of_a_product_if_one_runs_else_of_any_operator_else_communication_or_idle() -> None:
    loaded = trace(
        step(1, 0, 100), phase("forward", 0, 60),
        operator("aten::linear", 5, 20), operator("aten::addmm", 10, 10), operator("mylib::fused", 30, 5),
        phase("backward", 60, 40),
        # Autograd's thread: the node itself is Python and hooks, only what it calls computes.
        node(1, 60, 30, thread=2), operator("aten::mm", 65, 15, thread=2),
        scope("gloo:all_reduce", 75, 15, thread=3), operator("aten::copy_", 82, 2, thread=3),  # a part of it
    )  # fmt: skip
    # aten::linear is a matrix product with everything it calls.
    assert filling(loaded) == {"forward": (20, 5, 0, 0, 35), "backward": (15, 0, 0, 10, 15)}
    # What has counted FLOPs is matmul-like, whatever its name.
    assert filling(loaded, frozenset({"mylib.fused"}))["forward"] == (25, 0, 0, 0, 35)


def test_on_a_device_kernels_are_of_the_operator_that_launched_them_and_hide_what_runs_beside_them() -> None:
    loaded = trace(
        step(1, 0, 100), phase("forward", 0, 100),
        operator("aten::mm", 1, 4), launch(1, 2), kernel(1, 10, 20, name="something"),
        operator("aten::add", 6, 3), launch(2, 7), kernel(2, 25, 15, name="gemm_in_name_alone"),
        launch(3, 9), on_device("gpu_memcpy", 3, 35, 15, name="Memcpy HtoD (Pageable -> Device)"),
        launch(4, 10), kernel(4, 45, 20, name=NCCL, stream=9),
        # By no operator of torch: kernels go by their names.
        launch(5, 20), kernel(5, 70, 10, name="triton_tem_fused_addmm_3"),
        launch(6, 21), kernel(6, 80, 5, name="triton_poi_fused_convert_gelu_1"),
    )  # fmt: skip
    # 10-30 product, 30-40 addition, 40-50 copy, 50-65 communication, 70-80 product, 80-85 another.
    assert filling(loaded) == {"forward": (30, 15, 10, 15, 30)}
