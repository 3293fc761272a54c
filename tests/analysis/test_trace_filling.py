"""What filled the parts of traced steps; times of events in microseconds, of fillings in nanoseconds."""

from __future__ import annotations

from lightning_flops.trace import step_filling, step_parts
from lightning_flops.trace.columns import Trace
from tests.analysis.trace_events import Event, kernel, launch, on_device, operator, scope, step, trace

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
Filled = tuple[int, int, int, int, int]


def part(name: str, start: float, length: float) -> Event:
    return scope(f"phase: {name}", start, length)


def filling(loaded: Trace, counted: frozenset[str] = frozenset()) -> dict[str, Filled]:
    """Matmul-like, other operators, copies, communication, idle: microseconds of each part that took time."""
    found = step_filling(loaded, counted=counted)
    walls = {one.name: round(one.wall_sec * 1e9) for one in step_parts(loaded)}
    filled = {
        one.name: (one.matmul_ns, one.operators_ns, one.copies_ns, one.communication_ns, one.idle_ns)
        for one in found.parts
    }
    assert {name: sum(each) for name, each in filled.items()} == walls
    return {
        name: (a // 1000, b // 1000, c // 1000, d // 1000, e // 1000)
        for name, (a, b, c, d, e) in filled.items()
        if walls[name]
    }


def test_on_the_host_a_moment_is_of_a_product_if_one_runs_else_of_any_operator_else_communication_or_idle() -> None:
    loaded = trace(
        step(1, 0, 100),
        part("forward", 0, 60),
        operator("aten::linear", 5, 20),
        operator("aten::addmm", 10, 10),
        operator("mylib::fused", 30, 5),
        part("backward", 60, 40),
        # Autograd's thread: the node itself is Python and hooks, only what it calls computes.
        operator("autograd::engine::evaluate_function: AddmmBackward0", 60, 30, thread=2),
        operator("aten::mm", 65, 15, thread=2),
        scope("gloo:all_reduce", 75, 15, thread=3),
        operator("aten::copy_", 82, 2, thread=3),  # a part of it
    )
    # aten::linear is a matrix product with everything it calls.
    assert filling(loaded) == {"forward": (20, 5, 0, 0, 35), "backward": (15, 0, 0, 10, 15)}
    assert step_filling(loaded).clock == "host"
    # What has counted FLOPs is matmul-like, whatever its name.
    assert filling(loaded, frozenset({"mylib.fused"}))["forward"] == (25, 0, 0, 0, 35)


def test_on_a_device_kernels_are_of_the_operator_that_launched_them_and_hide_what_runs_beside_them() -> None:
    loaded = trace(
        step(1, 0, 100),
        part("forward", 0, 100),
        operator("aten::mm", 1, 4),
        launch(1, 2),
        kernel(1, 10, 20, name="something"),
        operator("aten::add", 6, 3),
        launch(2, 7),
        kernel(2, 25, 15, name="gemm_in_name_alone"),
        launch(3, 9),
        on_device("gpu_memcpy", 3, 35, 15, name="Memcpy HtoD (Pageable -> Device)"),
        launch(4, 10),
        kernel(4, 45, 20, name=NCCL, stream=9),
        launch(5, 20),  # by no operator of torch: kernels go by their names
        kernel(5, 70, 10, name="triton_tem_fused_addmm_3"),
        launch(6, 21),
        kernel(6, 80, 5, name="triton_poi_fused_convert_gelu_1"),
    )
    # 10-30 product, 30-40 addition, 40-50 copy, 50-65 communication, 70-80 product, 80-85 another.
    assert filling(loaded) == {"forward": (30, 15, 10, 15, 30)}
    assert step_filling(loaded).clock == "device"
