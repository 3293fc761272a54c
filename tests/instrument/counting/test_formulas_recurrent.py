"""Recurrent layers: every time step meets every weight matrix once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from tests.instrument.counting.recording import (
    flops_by_operator,
    forward_and_backward,
    leaf,
    meta,
    total_flops,
    work_of,
)

# 4 samples of 5 steps with 8 features, hidden size 6
TOKENS = 4 * 5
LAYERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lstm": (lambda: nn.LSTM(8, 6, batch_first=True), 2 * TOKENS * 4 * 6 * (8 + 6)),
    "gru": (lambda: nn.GRU(8, 6, batch_first=True), 2 * TOKENS * 3 * 6 * (8 + 6)),
    "tanh": (lambda: nn.RNN(8, 6, batch_first=True), 2 * TOKENS * 6 * (8 + 6)),
    "relu": (lambda: nn.RNN(8, 6, batch_first=True, nonlinearity="relu"), 2 * TOKENS * 6 * (8 + 6)),
    "two layers": (lambda: nn.LSTM(8, 6, 2, batch_first=True), 2 * TOKENS * 24 * (8 + 6 + 6 + 6)),
    "both directions": (
        lambda: nn.LSTM(8, 6, 2, batch_first=True, bidirectional=True),
        2 * 2 * TOKENS * 24 * (8 + 6 + 12 + 6),
    ),
    "dropout": (lambda: nn.LSTM(8, 6, 2, batch_first=True, dropout=0.5), 2 * TOKENS * 24 * (8 + 6 + 6 + 6)),
    "no bias": (lambda: nn.LSTM(8, 6, batch_first=True, bias=False), 2 * TOKENS * 24 * (8 + 6)),
    # Gates from 8 features and a state of 3, then a projection from 6 to 3
    "projection": (lambda: nn.LSTM(8, 6, proj_size=3, batch_first=True), 2 * TOKENS * (24 * (8 + 3) + 3 * 6)),
}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", LAYERS)
def test_every_step_meets_every_weight_once(name: str) -> None:
    make, forward = LAYERS[name]
    layer, inputs = make(), leaf(4, 5, 8)
    assert total_flops(lambda: layer(inputs)) == forward
    with torch.no_grad():
        assert total_flops(lambda: layer(inputs)) == forward
    with torch.inference_mode():
        assert total_flops(lambda: layer(inputs)) == forward


def test_a_fused_lstm_costs_its_forward_twice_in_the_backward() -> None:
    layer, inputs = nn.LSTM(8, 6, 2, batch_first=True), leaf(4, 5, 8)
    forward = 2 * TOKENS * 24 * (8 + 6 + 6 + 6)
    assert forward_and_backward(lambda: layer(inputs)[0]) == (forward, 2 * forward)


def test_an_unfused_layer_makes_no_gradient_of_the_initial_state() -> None:
    layer, inputs = nn.GRU(8, 6, batch_first=True), leaf(4, 5, 8)
    forward = 2 * TOKENS * 18 * (8 + 6)
    first_state = 2 * 4 * 18 * 6
    assert forward_and_backward(lambda: layer(inputs)[0]) == (forward, 2 * forward - first_state)


def test_a_packed_sequence_counts_the_steps_there_are() -> None:
    layer, packed = nn.LSTM(8, 6, batch_first=True), pack_padded_sequence(torch.ones(4, 5, 8), [5, 3, 2, 1], True)
    forward = 2 * (5 + 3 + 2 + 1) * 24 * (8 + 6)
    assert total_flops(lambda: layer(packed)) == forward
    with torch.inference_mode():
        packed = pack_padded_sequence(torch.ones(4, 5, 8), [5, 3, 2, 1], True)
        assert total_flops(lambda: layer(packed)) == forward


CELLS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "lstm": (lambda: nn.LSTMCell(8, 6), 2 * 4 * 24 * (8 + 6)),
    "gru": (lambda: nn.GRUCell(8, 6), 2 * 4 * 18 * (8 + 6)),
    "tanh": (lambda: nn.RNNCell(8, 6), 2 * 4 * 6 * (8 + 6)),
    "relu": (lambda: nn.RNNCell(8, 6, nonlinearity="relu"), 2 * 4 * 6 * (8 + 6)),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_is_one_step(name: str) -> None:
    make, forward = CELLS[name]
    cell, inputs = make(), leaf(4, 8)
    assert total_flops(lambda: cell(inputs)) == forward
    with torch.inference_mode():
        assert total_flops(lambda: cell(inputs)) == forward


def weights(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [meta(*shape) for shape in shapes]


# Two layers, both directions, hidden size 6: matrices and biases in cuDNN's order
LSTM_WEIGHTS = weights(*[(24, 8), (24, 6), (24,), (24,)] * 2, *[(24, 12), (24, 6), (24,), (24,)] * 2)
LSTM_FORWARD = 2 * TOKENS * 2 * 24 * (8 + 6 + 12 + 6)
STATE = meta(4, 4, 6)


def test_cudnn_layers_count_all_their_weights() -> None:
    call: tuple[Any, ...] = (
        meta(4, 5, 8),
        LSTM_WEIGHTS,
        4,
        None,
        STATE,
        STATE,
        2,
        6,
        0,
        2,
        True,
        0.0,
        True,
        True,
        [],
        None,
    )
    assert work_of("aten::_cudnn_rnn", *call).flops == LSTM_FORWARD
    packed = (
        meta(11, 8),
        LSTM_WEIGHTS,
        4,
        None,
        STATE,
        STATE,
        2,
        6,
        0,
        2,
        False,
        0.0,
        True,
        True,
        [4, 3, 2, 1, 1],
        None,
    )
    assert work_of("aten::_cudnn_rnn", *packed).flops == LSTM_FORWARD * 11 // 20
    projected = weights((24, 8), (24, 3), (24,), (24,), (3, 6))
    call = (meta(4, 5, 8), projected, 5, None, STATE, STATE, 2, 6, 3, 1, True, 0.0, True, False, [], None)
    assert work_of("aten::_cudnn_rnn", *call).flops == 2 * TOKENS * (24 * (8 + 3) + 3 * 6)


def test_miopen_layers_count_all_their_weights() -> None:
    call: tuple[Any, ...] = (meta(4, 5, 8), LSTM_WEIGHTS, 4, STATE, STATE, 2, 6, 2, True, 0.0, True, True, [], None)
    assert work_of("aten::miopen_rnn", *call).flops == LSTM_FORWARD


@pytest.mark.parametrize(
    ("mask", "forwards"),
    [([True] * 4, 2), ([True, True, True, False], 1), ([False, False, False, True], 2), ([False] * 4, 0)],
)
def test_fused_backwards_walk_the_sequence_and_then_make_weight_gradients(mask: list[bool], forwards: int) -> None:
    values, out = meta(4, 5, 8), meta(4, 5, 12)
    states = (STATE, STATE, out, out, STATE, STATE)
    cudnn: tuple[Any, ...] = (
        values,
        LSTM_WEIGHTS,
        4,
        meta(1),
        *states,
        2,
        6,
        0,
        2,
        True,
        0.0,
        True,
        True,
        [],
        None,
        meta(1),
        mask,
    )
    assert work_of("aten::_cudnn_rnn_backward", *cudnn).flops == forwards * LSTM_FORWARD
    miopen: tuple[Any, ...] = (
        values,
        LSTM_WEIGHTS,
        4,
        meta(1),
        *states,
        2,
        6,
        2,
        True,
        0.0,
        True,
        True,
        [],
        None,
        meta(1),
        mask,
    )
    assert work_of("aten::miopen_rnn_backward", *miopen).flops == forwards * LSTM_FORWARD


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated", "ignore:.*quantize")
def test_quantized_layers_count_from_sizes_because_their_weights_are_packed() -> None:
    dynamic: Any = torch.ao.nn.quantized.dynamic
    inputs = torch.ones(4, 5, 8)
    both = dynamic.LSTM(8, 6, 2, bidirectional=True, batch_first=True)
    assert flops_by_operator(lambda: both(inputs)) == {"aten.quantized_lstm": LSTM_FORWARD}
    gru = dynamic.GRU(8, 6, batch_first=True)
    assert flops_by_operator(lambda: gru(inputs)) == {"aten.quantized_gru": 2 * TOKENS * 18 * 14}
    cell = dynamic.LSTMCell(8, 6)
    assert total_flops(lambda: cell(torch.ones(4, 8))) == 2 * 4 * 24 * 14
