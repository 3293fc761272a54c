"""Recurrent layers: every time step meets every weight matrix once."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.instrument.counting.recording import meta, work_of

# 4 samples of 5 steps with 8 features, hidden size 6
TOKENS = 4 * 5


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
