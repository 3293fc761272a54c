"""What a marked trace says of each module; all times are worked out by hand from the events above them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.schema.trace_steps import ModuleRow, ModuleTable
from lightning_flops.trace.modules import module_table, place_of
from lightning_flops.trace.tables import operator_table, operators_by_shape
from tests.analysis.trace_events import (
    Event,
    accumulation,
    kernel,
    launch,
    launched,
    made,
    module,
    node,
    operator,
    phase,
    scope,
    span,
    step,
    trace,
)


def table_of(*events: Event) -> ModuleTable:
    table = module_table(trace(*events))
    assert table is not None
    return table


def rows(table: ModuleTable) -> dict[str, ModuleRow]:
    return {row.name: row for row in table.rows}


STEP = (
    step(4, 0, 400),
    phase("data_wait", 0, 20),
    phase("forward", 20, 100),
    module("", 30, 80),
    module("first", 35, 20),
    made(7, 40),
    module("second", 60, 40),
    module("second.inner", 70, 10),
    made(8, 72),
    made(9, 85),
    made(10, 105),  # in the root, outside of its children
    phase("backward", 130, 200),
    node(10, 140, 10, name="SumBackward0"),
    node(9, 152, 30),
    node(8, 185, 40),
    accumulation(230, 15),
    node(7, 250, 70),
    phase("optimizer", 340, 50),
)


def test_every_moment_belongs_to_the_innermost_module_and_a_node_to_the_one_whose_operator_made_it() -> None:
    table = table_of(*STEP)
    own = {row.name: (row.calls, row.own_forward_us, row.own_backward_us) for row in table.rows}
    # The root has the phase without its module, and itself without its children: 20 + 80 - 20 - 40.
    assert own == {"": (1, 40, 10), "first": (1, 20, 70), "second": (1, 30, 30), "second.inner": (1, 10, 40)}
    total = {row.name: (row.forward_us, row.backward_us) for row in table.rows}
    assert total == {"": (100, 150), "first": (20, 70), "second": (40, 70), "second.inner": (10, 40)}
    assert (table.clock, table.steps, table.forward_us, table.unattributed_forward_us) == ("host", 1, 100, 0)
    assert (table.backward_us, table.gradient_accumulation_us, table.optimizer_us) == (200, 15, 50)
    assert table.unattributed_backward_us == 200 - 150 - 15


def test_nodes_inside_a_node_are_taken_out_of_its_time_and_what_it_repeats_is_backward() -> None:
    # A reentrant checkpoint of "block": its node runs the block again, and then the nodes that this made.
    table = table_of(
        step(0, 0, 300),
        phase("forward", 0, 100),
        module("block", 10, 50),
        made(5, 11, 48, name="CheckpointFunction"),
        module("block.layer", 20, 30),
        phase("backward", 100, 200),
        node(5, 110, 150, name="CheckpointFunctionBackward"),
        module("block.layer", 120, 30),
        made(6, 125),
        node(6, 160, 80),
    )
    found = rows(table)
    assert found["block.layer"].calls == 1
    assert found["block.layer"].forward_us == 30
    assert found["block.layer"].own_backward_us == 30 + 80  # the repeated forward, and its own node
    assert found["block"].own_backward_us == 150 - 30 - 80
    assert found["block"].backward_us == 150
    assert table.unattributed_backward_us == 200 - 150


def test_a_node_that_a_node_made_belongs_to_the_same_module() -> None:
    # With create_graph a backward makes nodes of its own, which a second backward runs.
    table = table_of(
        step(0, 0, 300),
        module("layer", 0, 20),
        made(1, 5),
        node(1, 50, 30),
        made(2, 60, name="aten::mm"),
        node(2, 100, 40, name="MmBackward0"),
    )
    assert rows(table)["layer"].backward_us == 30 + 40


def test_the_last_operator_of_a_number_made_the_node() -> None:
    # Operators that make no node carry the number of the next one, also in other modules.
    table = table_of(
        step(0, 0, 100),
        module("without", 0, 10),
        made(3, 1, name="aten::eq"),
        module("with", 20, 10),
        made(3, 21),
        node(3, 50, 10),
    )
    assert rows(table)["with"].backward_us == 10
    assert rows(table)["without"].backward_us == 0


def test_what_synchronizes_gradients_is_no_modules() -> None:
    table = table_of(
        *ON_DEVICE,
        launch(8, 148, thread=9),
        kernel(8, 600, 45, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", stream=20),  # by a hook of accumulation
        *launched(9, 190, 650, 7, name="copy"),  # after the last node
    )
    assert table.gradient_accumulation_us == 8
    assert table.unattributed_backward_us == 45 + 7
    assert table.backward_us == 70 + 30 + 8 + 45 + 7


def test_threads_that_number_their_nodes_alike_are_told_apart() -> None:
    table = table_of(
        step(0, 0, 200),
        module("left", 0, 50, thread=1),
        made(11, 1, thread=1),
        made(12, 3, thread=1),
        module("right", 0, 50, thread=2),
        made(1, 1, thread=2),
        made(2, 3, thread=2),
        node(12, 100, 10, thread=3, made_on=1),
        node(11, 110, 20, thread=3, made_on=1),
        node(2, 140, 1, thread=3, made_on=2),
        node(1, 145, 2, thread=3, made_on=2),
    )
    found = rows(table)
    assert (found["left"].backward_us, found["right"].backward_us) == (30, 3)


def test_modules_that_a_validation_inside_the_step_calls_are_nobodys() -> None:
    table = table_of(
        step(0, 0, 200), phase("forward", 0, 50), module("layer", 10, 20), phase("validation", 60, 90),
        module("layer", 70, 40), phase("transfer", 160, 20), module("layer", 165, 5),
    )  # fmt: skip
    assert rows(table)["layer"].calls == 2
    assert rows(table)["layer"].forward_us == 20 + 5
    assert table.forward_us == 50 + 5


def test_a_wrapper_and_what_it_wraps_are_one_call() -> None:
    table = table_of(step(0, 0, 100), module("layer", 0, 50), module("layer", 5, 40))
    assert rows(table)["layer"].calls == 1
    assert rows(table)["layer"].forward_us == 50


def test_a_container_that_nobody_calls_has_the_time_of_what_is_in_it() -> None:
    table = table_of(step(0, 0, 100), module("blocks.0", 0, 10), module("blocks.1", 20, 30))
    assert rows(table)["blocks"].forward_us == 10 + 30
    assert (rows(table)["blocks"].own_forward_us, rows(table)["blocks"].calls) == (0, 0)


ON_DEVICE = (
    step(0, 0, 1000),
    phase("forward", 0, 100),
    module("left", 10, 20),
    made(1, 11),
    *launched(1, 12, 200, 50),
    module("right", 40, 20),
    made(2, 41),
    *launched(2, 42, 230, 40, stream=8),  # runs beside the other from 230 to 250
    *launched(3, 45, 300, 10),
    phase("backward", 100, 100),
    node(2, 110, 10, thread=9),
    *launched(4, 111, 400, 70, thread=9),
    node(1, 125, 10, thread=9),
    *launched(5, 126, 480, 30, thread=9),
    operator("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 140, 10, thread=9),
    *launched(6, 141, 520, 8, thread=9),
    phase("optimizer", 210, 20),
    *launched(7, 215, 540, 25),
)


def test_a_device_is_occupied_by_what_a_module_or_its_node_launched_overlaps_counted_once() -> None:
    table = table_of(*ON_DEVICE)
    found = {row.name: (row.forward_us, row.forward_kernels, row.backward_us) for row in table.rows}
    # The root: 200 to 270, where two kernels overlap, and 300 to 310.
    assert found == {"": (70 + 10, 3, 100), "left": (50, 1, 30), "right": (40 + 10, 2, 70)}
    assert (table.clock, table.gradient_accumulation_us, table.optimizer_us) == ("device", 8, 25)
    assert (table.backward_us, table.unattributed_backward_us) == (70 + 30 + 8, 0)


def call(name: str, start: float, length: float, *, thread: int = 1) -> Event:
    """A Python call."""
    return span("python_function", name, start, length, thread=thread)


@pytest.mark.parametrize(
    ("frame", "place"),
    [
        ("train.py(12): step", "train.py:12"),
        ("/home/me/net (2).py(7): forward", "/home/me/net (2).py:7"),
        ("torchvision/models/resnet.py(124): forward", "torchvision/models/resnet.py:124"),
        (
            "/env/lib/python3.11/site-packages/torchvision/models/resnet.py(124): forward",
            "/env/lib/python3.11/site-packages/torchvision/models/resnet.py:124",
        ),
        ("/env/lib/python3.11/site-packages/torch/nn/modules/conv.py(440): _conv_forward", None),
        ("torch/nn/modules/module.py(1051): _call_impl", None),
        ("/usr/lib/python3.11/contextlib.py(81): inner", None),
        ("functools.py(65): wraps", None),
        ("<built-in function linear>", None),
        ("<string>(1): forward", None),
        ("nn.Module: Linear_0", None),
        ("", None),
    ],
)
def test_place_is_a_line_of_the_users(frame: str, place: str | None) -> None:
    assert place_of(frame) == place


def test_operators_know_the_users_line_that_called_them_first() -> None:
    table = operator_table(
        trace(
            call("train.py(30): step", 0, 100),
            call("net.py(7): forward", 1, 40),
            call("torch/nn/functional.py(9): linear", 2, 10),
            made(5, 3, 8),
            call("net.py(9): loss", 50, 10),
            made(6, 51, 6),
            # autograd's own thread, where no Python runs
            node(5, 60, 12, thread=2),
            operator("aten::mm", 62, 4, thread=2),
            operator("aten::zero_", 80, 1),
        )
    )
    rows = {row.name: row.called_from for row in table or ()}
    assert (rows["aten::addmm"], rows["aten::mm"], rows["aten::zero_"]) == ("net.py:7", "", "train.py:30")


def test_operators_have_a_row_for_each_shape_of_their_inputs() -> None:
    def product(start: float, length: float, rows: int, **more: Any) -> Event:
        shapes: dict[str, Any] = {
            "Input Dims": [[rows, 4], [4, 5], []],
            "Input type": ["float", "float", "Scalar"],
            **more,
        }
        return operator("aten::mm", start, length, **shapes)

    table = operators_by_shape(
        trace(
            product(0, 10, 3),
            product(20, 30, 3, **{"Concrete Inputs": ["", "", "7"]}),
            product(60, 5, 8),
            operator("aten::add", 70, 1),
            *launched(1, 1, 2, 100),
            *launched(2, 61, 200, 50),
        )
    )
    assert table is not None
    assert [(row.name, row.inputs, row.dtypes, row.calls, row.host.total_us) for row in table] == [
        ("aten::mm", "[3, 4], [4, 5]", "float, float", 2, 40),
        ("aten::mm", "[8, 4], [4, 5]", "float, float", 1, 5),
    ]
    device = table[0].device
    assert device is not None
    assert (device.total_us, device.mean_us, device.max_us, device.min_us) == (100, 50, 100, 0)
    assert operators_by_shape(trace(operator("aten::add", 0, 1))) is None


def test_calls_of_modules_that_torch_recorded_are_the_modules_of_the_trace() -> None:
    table = module_table(
        trace(
            call("train.py(30): step", 0, 100),
            call("nn.Module: Net_0", 10, 50),
            call("torch/nn/modules/module.py(1): _call_impl", 11, 48),
            call("net.py(7): forward", 12, 46),
            call("nn.Module: Linear_0", 15, 20),
            call("torch/nn/modules/linear.py(99): forward", 16, 18),
            made(5, 20, 10),
            call("nn.Module: Linear_1", 40, 10),
            node(5, 70, 12, thread=2),
            operator("aten::mm", 72, 4, thread=2),
            scope("Optimizer.step#SGD.step", 90, 8),
        )
    )
    assert table is not None
    rows = {row.name: row for row in table.rows}
    assert list(rows) == ["", "Net_0", "Net_0.Linear_0", "Net_0.Linear_1"]
    assert (rows["Net_0"].calls, rows["Net_0"].forward_us, rows["Net_0"].own_forward_us) == (1, 50, 20)
    linear = rows["Net_0.Linear_0"]
    assert (linear.forward_us, linear.backward_us) == (20, 12)
    assert (table.forward_us, table.backward_us, table.optimizer_us) == (50, 12, 8)


def test_module_that_is_called_again_in_a_backward_keeps_its_name() -> None:
    table = module_table(
        trace(
            call("nn.Module: Net_0", 10, 50),
            call("nn.Module: Linear_0", 15, 20),
            made(5, 20, 10),
            node(5, 70, 30),
            call("nn.Module: Linear_0", 75, 20),
            operator("aten::mm", 97, 2),
        )
    )
    assert table is not None
    rows = {row.name: row for row in table.rows}
    assert list(rows) == ["", "Net_0", "Net_0.Linear_0"]
    assert (rows["Net_0.Linear_0"].calls, rows["Net_0.Linear_0"].backward_us) == (1, 30)
