from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.trace.modules import module_table, place_of
from lightning_flops.trace.tables import operator_table, operators_by_shape
from tests.analysis.trace_events import Event, call, kernel, launch, made, node, operator, scope, trace


@pytest.mark.parametrize(
    ("frame", "place"),
    [
        ("train.py(12): step", "train.py:12"),
        ("/home/me/net (2).py(7): forward", "/home/me/net (2).py:7"),
        ("torchvision/models/resnet.py(124): forward", "torchvision/models/resnet.py:124"),
        ("/env/lib/python3.11/site-packages/tv/resnet.py(4): f", "/env/lib/python3.11/site-packages/tv/resnet.py:4"),
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
        )
    )  # fmt: skip
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
            call("nn.Module: Net_0", 10, 50), call("torch/nn/modules/module.py(1): _call_impl", 11, 48),
            call("net.py(7): forward", 12, 46),
            call("nn.Module: Linear_0", 15, 20), call("torch/nn/modules/linear.py(99): forward", 16, 18),
            made(5, 20, 10),
            call("nn.Module: Linear_1", 40, 10),
            node(5, 70, 12, thread=2), operator("aten::mm", 72, 4, thread=2),
            scope("Optimizer.step#SGD.step", 90, 8),
        )
    )  # fmt: skip
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
            call("nn.Module: Net_0", 10, 50), call("nn.Module: Linear_0", 15, 20), made(5, 20, 10),
            node(5, 70, 30), call("nn.Module: Linear_0", 75, 20), operator("aten::mm", 97, 2),
        )
    )  # fmt: skip
    assert table is not None
    rows = {row.name: row for row in table.rows}
    assert list(rows) == ["", "Net_0", "Net_0.Linear_0"]
    assert (rows["Net_0.Linear_0"].calls, rows["Net_0.Linear_0"].backward_us) == (1, 30)
