from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning_flops.analysis.trace_report import analyze_trace
from lightning_flops.schema.tables import StepTime
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.steps import phase_table, step_filling, step_parts, step_times, steps_of
from lightning_flops.trace.tables import user_scope_table
from tests.analysis.trace_events import (  # fmt: skip
    Event,
    data_loader,
    kernel,
    launch,
    launched,
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
    assert (steps_of(loaded).start_ns // 1000).tolist() == [0, 140]
    assert (steps_of(loaded).end_ns // 1000).tolist() == [140, 205]
    assert [time.kernel_us for time in step_times(loaded).steps] == [45, 10]


def test_a_kernel_launched_before_the_first_step_puts_off_its_start() -> None:
    loaded = trace(launch(1, 0), kernel(1, 5, 20), step(1, 10, 50), operator("aten::mm", 30, 1))
    assert (steps_of(loaded).start_ns // 1000).tolist() == [25]
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


def test_phases_without_scopes_are_known_by_operators_and_called_so() -> None:
    def grad(name: str, start: float, length: float, **more: Any) -> Event:
        return operator(name, start, length, **{"Sequence number": 1, "Fwd thread id": 0, **more})

    loaded = trace(
        step(1, 0, 200),
        data_loader(0, 10), grad("aten::stack", 2, 5),  # the loader's own
        operator("aten::copy_", 12, 3),  # without gradients: not the forward's
        grad("aten::linear", 20, 10), grad("aten::addmm", 22, 4), grad("aten::mse_loss", 35, 5),  # the forward: 20-40
        node(1, 50, 10), operator("aten::mm", 52, 3),
        operator("torch::autograd::AccumulateGrad", 65, 5),  # the backward: 50-70
        data_loader(75, 5), grad("aten::linear", 85, 15),  # 85-100
        node(1, 110, 20, thread=2),
        scope("Optimizer.step#SGD.step", 140, 30), operator("aten::add_", 145, 5),
        grad("aten::mean", 180, 10),  # a metric: no backward follows
    )  # fmt: skip
    assert phases(loaded) == {
        "step": (1, 200, None), "data loader": (2, 15, None), "forward (by operators)": (2, 20 + 15, None),
        "backward (by operators)": (2, 20 + 20, None), "optimizer": (1, 30, None),
        "others": (1, 200 - 35 - 40 - 15 - 30, None),
    }  # fmt: skip
    assert phase_table(trace(step(1, 0, 200), operator("aten::mm", 20, 10))) is None


# ---- parts of traced steps and what filled them; times of events in microseconds, of fillings in nanoseconds

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


# ---- which marks of the profiler are whole steps, and what is said of the others

FORWARD = ("aten::mm", "aten::relu", "aten::addmm")
BACKWARD = ("autograd::engine::evaluate_function: AddmmBackward0", "autograd::engine::evaluate_function: MmBackward0")
OPTIMIZER = ("aten::_foreach_add_",) * 6
MICRO = FORWARD + BACKWARD
WHOLE = MICRO + OPTIMIZER


def marked(*steps: Sequence[str]) -> Trace:
    """A trace with these operators in each mark, from number 1 on."""
    events: list[Event] = []
    for number, names in enumerate(steps, 1):
        events += (step(number, 1000 * number, 1000), data_loader(1000 * number, 5))
        events += [operator(name, 1000 * number + 10 * place, 5) for place, name in enumerate(names, 1)]
    return trace(*events)


def said(loaded: Trace) -> tuple[tuple[int | None, ...], tuple[str, ...]]:
    """The numbers of the steps, and the notes."""
    return steps_of(loaded).numbers, analyze_trace(loaded).notes


def test_steps_with_the_same_calls_are_whole() -> None:
    assert said(marked(WHOLE, WHOLE)) == ((1, 2), ())
    assert said(marked(FORWARD, FORWARD, FORWARD)) == ((1, 2, 3), ())
    assert said(marked(WHOLE)) == ((1,), ())
    # As in gradient accumulation, some lack the optimizer.
    for steps in ((MICRO, WHOLE, MICRO, WHOLE), (WHOLE, MICRO, WHOLE, MICRO)):
        assert said(marked(*steps)) == ((1, 2, 3, 4), ())
    assert said(marked((), (), ())) == ((1, 2, 3), ())


def left_out(number: int, calls: str, others: int) -> str:
    return f"Step {number} is left out: {calls} ran in it, and {others} or more in the others."


def test_an_edge_with_less_than_half_the_backward_of_any_other_is_no_step() -> None:
    assert said(marked(WHOLE, WHOLE, ())) == ((1, 2), (left_out(3, "no call", 2),))
    assert said(marked(WHOLE, WHOLE, (*FORWARD, "aten::argmax"))) == ((1, 2), (left_out(3, "no call", 2),))
    assert said(marked(FORWARD, WHOLE)) == ((2,), (left_out(1, "no call", 2),))
    assert said(marked(WHOLE + BACKWARD, WHOLE + BACKWARD, WHOLE[:4])) == ((1, 2), (left_out(3, "1 calls", 4),))
    # Half of it may be a step.
    assert said(marked(WHOLE, WHOLE, WHOLE[:4])) == ((1, 2, 3), ())
    # Where one in the middle has none, the loop has such steps.
    assert said(marked(WHOLE, FORWARD, WHOLE, FORWARD)) == ((1, 2, 3, 4), ())
    assert said(marked(WHOLE, (), WHOLE)) == ((1, 2, 3), ())


def test_without_a_backward_all_operators_tell() -> None:
    assert said(marked((), FORWARD, ())) == ((2,), (left_out(1, "no call", 3), left_out(3, "no call", 3)))
    assert said(marked(FORWARD, FORWARD[:1])) == ((1,), (left_out(2, "1 calls", 3),))


def test_a_kernel_counts_once_in_scopes_and_phases_that_several_threads_have_open() -> None:
    loaded = trace(
        *(scope(name, 0, 100) for name in ("S", "net.forward")),
        *(scope(name, 50, 100, thread=2) for name in ("S", "net.forward")),
        *launched(1, 8, 20, 10), *launched(2, 60, 70, 7, thread=2), *launched(3, 120, 130, 3, thread=2),
    )  # fmt: skip
    shown = [(row.name, row.calls, row.device and row.device.total_us) for row in user_scope_table(loaded)]
    assert shown == [("S", 2, 20), ("net.forward", 2, 20)]
    assert phases(loaded)["forward"] == (2, 150, 20)
