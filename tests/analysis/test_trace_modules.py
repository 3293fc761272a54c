"""What a marked trace says of each module; all times are worked out by hand from the events above them."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.schema.tables import ModuleRow, ModuleTable
from lightning_flops.trace.modules import module_table, place_of
from lightning_flops.trace.tables import operator_table, operators_by_shape
from tests.analysis.in_memory import known
from tests.analysis.trace_events import (
    Event,
    accumulation,
    call,
    kernel,
    launch,
    made,
    module,
    node,
    operator,
    phase,
    scope,
    step,
    trace,
)


def table_of(*events: Event) -> ModuleTable:
    return known(module_table(trace(*events)))


def rows(table: ModuleTable) -> dict[str, ModuleRow]:
    return {row.name: row for row in table.rows}


STEP = (
    step(4, 0, 400), phase("data_wait", 0, 20),
    phase("forward", 20, 100), module("", 30, 80), module("first", 35, 20), made(7, 40),
    module("second", 60, 40), module("second.inner", 70, 10), made(8, 72), made(9, 85),
    made(10, 105),  # in the root, outside of its children
    phase("backward", 130, 200), node(10, 140, 10, name="SumBackward0"), node(9, 152, 30), node(8, 185, 40),
    accumulation(230, 15), node(7, 250, 70),
    phase("optimizer", 340, 50),
)  # fmt: skip


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
        phase("forward", 0, 100), module("block", 10, 50), made(5, 11, 48, name="CheckpointFunction"),
        module("block.layer", 20, 30),
        phase("backward", 100, 200), node(5, 110, 150, name="CheckpointFunctionBackward"),
        module("block.layer", 120, 30), made(6, 125), node(6, 160, 80),
    )  # fmt: skip
    found = rows(table)
    assert found["block.layer"].calls == 1
    assert found["block.layer"].forward_us == 30
    assert found["block.layer"].own_backward_us == 30 + 80  # the repeated forward, and its own node
    assert found["block"].own_backward_us == 150 - 30 - 80
    assert found["block"].backward_us == 150
    assert table.unattributed_backward_us == 200 - 150


def test_what_synchronizes_gradients_is_no_modules() -> None:
    table = table_of(
        *ON_DEVICE,
        launch(8, 148, thread=9),
        kernel(8, 600, 45, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", stream=20),  # by a hook of accumulation
        launch(9, 190),
        kernel(9, 650, 7, name="copy"),  # after the last node
    )
    assert table.gradient_accumulation_us == 8
    assert table.unattributed_backward_us == 45 + 7
    assert table.backward_us == 70 + 30 + 8 + 45 + 7


VALIDATED = (
    phase("forward", 0, 50), module("layer", 10, 20), phase("validation", 60, 90), module("layer", 70, 40),
    phase("transfer", 160, 20), module("layer", 165, 5),
)  # fmt: skip
CASES: dict[str, tuple[tuple[Event, ...], dict[str, tuple[int, float, float]]]] = {
    # With create_graph a backward makes nodes of its own, which a second backward runs.
    "a node that a node made belongs to the same module": (
        (
            module("layer", 0, 20), made(1, 5), node(1, 50, 30), made(2, 60, name="aten::mm"),
            node(2, 100, 40, name="MmBackward0"),
        ), {"layer": (1, 20, 30 + 40)},
    ),
    # Operators that make no node carry the number of the next one, also in other modules.
    "the last operator of a number made the node": (
        (module("without", 0, 10), made(3, 1, name="aten::eq"), module("with", 20, 10), made(3, 21), node(3, 50, 10)),
        {"with": (1, 10, 10), "without": (1, 10, 0)},
    ),
    "threads that number their nodes alike are told apart": (
        (
            module("left", 0, 50), made(11, 1), made(12, 3),
            module("right", 0, 50, thread=2), made(1, 1, thread=2), made(2, 3, thread=2),
            node(12, 100, 10, thread=3), node(11, 110, 20, thread=3),
            node(2, 140, 1, thread=3, made_on=2), node(1, 145, 2, thread=3, made_on=2),
        ), {"left": (1, 50, 30), "right": (1, 50, 3)},
    ),
    "modules that a validation inside the step calls are nobody's": (VALIDATED, {"layer": (2, 20 + 5, 0)}),
    "a wrapper and what it wraps are one": ((module("layer", 0, 50), module("layer", 5, 40)), {"layer": (1, 50, 0)}),
    "a container that nobody calls has the time of what is in it": (
        (module("blocks.0", 0, 10), module("blocks.1", 20, 30)), {"blocks": (0, 10 + 30, 0)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_whose_calls_forward_and_backward_it_is(case: str) -> None:
    events, expected = CASES[case]
    found = rows(table_of(step(0, 0, 200), *events))
    times = {name: (row.calls, row.forward_us, row.backward_us) for name, row in found.items()}
    assert {name: times[name] for name in expected} == expected


def test_the_forward_is_without_a_validation_and_a_container_has_no_time_of_its_own() -> None:
    assert table_of(step(0, 0, 200), *VALIDATED).forward_us == 50 + 5
    assert rows(table_of(step(0, 0, 100), module("blocks.0", 0, 10)))["blocks"].own_forward_us == 0


ON_DEVICE = (
    step(0, 0, 1000), phase("forward", 0, 100),
    module("left", 10, 20), made(1, 11), launch(1, 12), kernel(1, 200, 50),
    module("right", 40, 20), made(2, 41), launch(2, 42), kernel(2, 230, 40, stream=8),  # beside the other at 230
    launch(3, 45), kernel(3, 300, 10),
    phase("backward", 100, 100),
    node(2, 110, 10, thread=9), launch(4, 111, thread=9), kernel(4, 400, 70),
    node(1, 125, 10, thread=9), launch(5, 126, thread=9), kernel(5, 480, 30),
    accumulation(140, 10, thread=9), launch(6, 141, thread=9), kernel(6, 520, 8),
    phase("optimizer", 210, 20), launch(7, 215), kernel(7, 540, 25),
)  # fmt: skip


def test_a_device_is_occupied_by_what_a_module_or_its_node_launched_overlaps_counted_once() -> None:
    table = table_of(*ON_DEVICE)
    found = {row.name: (row.forward_us, row.backward_us) for row in table.rows}
    # The root: 200 to 270, where two kernels overlap, and 300 to 310.
    assert found == {"": (70 + 10, 100), "left": (50, 30), "right": (40 + 10, 70)}
    assert (table.clock, table.gradient_accumulation_us, table.optimizer_us) == ("device", 8, 25)
    assert (table.backward_us, table.unattributed_backward_us) == (70 + 30 + 8, 0)


@pytest.mark.parametrize(
    ("frame", "place"),
    [
        ("train.py(12): step", "train.py:12"),
        ("/home/me/net (2).py(7): forward", "/home/me/net (2).py:7"),
        ("/env/lib/python3.11/site-packages/tv/resnet.py(4): f", "/env/lib/python3.11/site-packages/tv/resnet.py:4"),
        ("/env/lib/python3.11/site-packages/torch/nn/modules/conv.py(440): _conv_forward", None),
        ("torch/nn/modules/module.py(1051): _call_impl", None),
        ("/usr/lib/python3.11/contextlib.py(81): inner", None),
        ("<built-in function linear>", None),
        ("nn.Module: Linear_0", None),
    ],
)
def test_place_is_a_line_of_the_users(frame: str, place: str | None) -> None:
    assert place_of(frame) == place


def test_operators_know_the_users_line_that_called_them_first() -> None:
    table = operator_table(
        trace(
            call("train.py(30): step", 0, 100),
            call("net.py(7): forward", 1, 40), call("torch/nn/functional.py(9): linear", 2, 10), made(5, 3, 8),
            call("net.py(9): loss", 50, 10), made(6, 51, 6),
            # Autograd's own thread, where no Python runs.
            node(5, 60, 12, thread=2), operator("aten::mm", 62, 4, thread=2),
            operator("aten::zero_", 80, 1),
        )
    )  # fmt: skip
    rows = {row.name: row.called_from for row in table or ()}
    assert (rows["aten::addmm"], rows["aten::mm"], rows["aten::zero_"]) == ("net.py:7", "", "train.py:30")


def test_operators_have_a_row_for_each_shape_of_their_inputs() -> None:
    def product(start: float, length: float, rows: int, **more: Any) -> Event:
        shapes: dict[str, Any] = {"Input Dims": [[rows, 4], [4, 5], []], "Input type": ["float", "float", "Scalar"]}
        return operator("aten::mm", start, length, **shapes, **more)

    table = operators_by_shape(
        trace(
            product(0, 10, 3), launch(1, 1), kernel(1, 2, 100),
            product(20, 30, 3, **{"Concrete Inputs": ["", "", "7"]}),
            product(60, 5, 8), launch(2, 61), kernel(2, 200, 50),
            operator("aten::add", 70, 1),
        ),
        {},
    )  # fmt: skip
    assert [(row.name, row.inputs, row.calls, row.host.total_us) for row in known(table)] == [
        ("aten::mm", "[3, 4], [4, 5]", 2, 40),
        ("aten::mm", "[8, 4], [4, 5]", 1, 5),
    ]
    device = known(known(table)[0].device)
    assert (device.total_us, device.mean_us, device.max_us, device.min_us) == (100, 50, 100, 0)
    assert operators_by_shape(trace(operator("aten::add", 0, 1)), {}) == ()


def test_calls_of_modules_that_torch_recorded_are_the_modules_of_the_trace() -> None:
    table = table_of(
        call("train.py(30): step", 0, 100),
        call("nn.Module: Net_0", 10, 50), call("torch/nn/modules/module.py(1): _call_impl", 11, 48),
        call("net.py(7): forward", 12, 46),
        call("nn.Module: Linear_0", 15, 20), call("torch/nn/modules/linear.py(99): forward", 16, 18),
        made(5, 20, 10),
        call("nn.Module: Linear_1", 40, 10),
        node(5, 70, 12, thread=2), operator("aten::mm", 72, 4, thread=2),
        scope("Optimizer.step#SGD.step", 90, 8),
    )  # fmt: skip
    found = rows(table)
    assert list(found) == ["", "Net_0", "Net_0.Linear_0", "Net_0.Linear_1"]
    assert (found["Net_0"].calls, found["Net_0"].forward_us, found["Net_0"].own_forward_us) == (1, 50, 20)
    linear = found["Net_0.Linear_0"]
    assert (linear.forward_us, linear.backward_us) == (20, 12)
    assert (table.forward_us, table.backward_us, table.optimizer_us) == (50, 12, 8)


def test_module_that_is_called_again_in_a_backward_keeps_its_name() -> None:
    table = table_of(
        call("nn.Module: Net_0", 10, 50), call("nn.Module: Linear_0", 15, 20), made(5, 20, 10),
        node(5, 70, 30), call("nn.Module: Linear_0", 75, 20), operator("aten::mm", 97, 2),
    )  # fmt: skip
    found = rows(table)
    assert list(found) == ["", "Net_0", "Net_0.Linear_0"]
    assert (found["Net_0.Linear_0"].calls, found["Net_0.Linear_0"].backward_us) == (1, 30)
