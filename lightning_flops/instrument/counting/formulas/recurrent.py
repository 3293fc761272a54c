"""Recurrent layers: RNN, LSTM and GRU in every backend, with projections, both directions, packed sequences.

Every time step of every sample meets each weight matrix of the layer once (input, hidden and projection weights of all
gates), so a forward is 2 × tokens × (elements of the weight matrices); a packed sequence's tokens are its rows. The
gates' elementwise work counts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_flops.instrument.counting.formulas.contract import Rule


def _matrix_elements(weights: Sequence[torch.Tensor]) -> int:
    return sum(weight.numel() for weight in weights if weight.dim() == 2)


def _tokens(values: torch.Tensor) -> int:
    return values.numel() // max(int(values.shape[-1]), 1)


def layers(values: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """All layers and directions at once: *weights* lists their matrices and biases."""
    return 2 * _tokens(values) * _matrix_elements(weights)


def layers_backward(values: torch.Tensor, weights: Sequence[torch.Tensor], mask: Sequence[bool]) -> int:
    """Backward of all layers: one forward's work down the sequence, one more for the weights if they are asked for.

    *mask* is (input, hidden, cell, weights): the backend walks the whole sequence for any of the first three, and the
    weights' gradients need that walk too.
    """
    return (1 + bool(mask[3])) * layers(values, weights) if any(mask) else 0


def both_gradients(values: torch.Tensor, weights: Sequence[torch.Tensor]) -> int:
    """Backward of a backend that always makes the input's, the hidden state's and the weights' gradients."""
    return 2 * layers(values, weights)


def one_layer(values: torch.Tensor, input_weight: torch.Tensor, hidden_weight: torch.Tensor) -> int:
    """One layer in one direction (oneDNN), or one step of a cell."""
    return layers(values, (input_weight, hidden_weight))


def one_layer_backward(values: torch.Tensor, input_weight: torch.Tensor, hidden_weight: torch.Tensor) -> int:
    """Backward of one layer by oneDNN, which always makes every gradient."""
    return 2 * one_layer(values, input_weight, hidden_weight)


def _packed_layers(gates: int, values: torch.Tensor, hidden: torch.Tensor, count: int, bidirectional: bool) -> int:
    """Layers whose weights are packed out of sight, from the sizes of input and hidden state."""
    directions = 2 if bidirectional else 1
    size, hidden_size = int(values.shape[-1]), int(hidden.shape[-1])
    rows = directions * gates * hidden_size
    elements = rows * (size + hidden_size) + (count - 1) * rows * (directions * hidden_size + hidden_size)
    return 2 * _tokens(values) * elements


def quantized_lstm(values: torch.Tensor, hidden: Sequence[torch.Tensor], count: int, bidirectional: bool) -> int:
    """``quantized_lstm``: four gates."""
    return _packed_layers(4, values, hidden[0], count, bidirectional)


def quantized_gru(values: torch.Tensor, hidden: torch.Tensor, count: int, bidirectional: bool) -> int:
    """``quantized_gru``: three gates."""
    return _packed_layers(3, values, hidden, count, bidirectional)


def _packed_cell(gates: int, values: torch.Tensor, hidden: Any) -> int:
    state = hidden[0] if isinstance(hidden, (list, tuple)) else hidden
    return _packed_layers(gates, values, state, 1, bidirectional=False)


_CELL = Rule(one_layer, ("input", "w_ih", "w_hh"), "input")
_WHOLE = Rule(layers, ("input", "params"), "input")

RECURRENT_RULES: dict[str, Rule] = {
    "aten::mkldnn_rnn_layer": Rule(one_layer, ("input", "weight0", "weight1"), "input"),
    "aten::mkldnn_rnn_layer_backward": Rule(one_layer_backward, ("input", "weight1", "weight2"), "input"),
    "aten::_cudnn_rnn": Rule(layers, ("input", "weight"), "input"),
    "aten::_cudnn_rnn_backward": Rule(layers_backward, ("input", "weight", "output_mask"), "input"),
    "aten::miopen_rnn": Rule(layers, ("input", "weight"), "input"),
    "aten::miopen_rnn_backward": Rule(layers_backward, ("input", "weight", "output_mask"), "input"),
    "aten::_lstm_mps": Rule(layers, ("input", "params"), "input"),
    "aten::lstm_mps_backward": Rule(both_gradients, ("input", "params"), "input"),
    # Cells, and whole forms that reach a dispatch mode where autograd's keys are off
    "aten::lstm_cell": _CELL,
    "aten::gru_cell": _CELL,
    "aten::rnn_tanh_cell": _CELL,
    "aten::rnn_relu_cell": _CELL,
    "aten::quantized_lstm_cell": _CELL,
    "aten::quantized_gru_cell": _CELL,
    "aten::quantized_rnn_tanh_cell": _CELL,
    "aten::quantized_rnn_relu_cell": _CELL,
    "quantized::quantized_lstm_cell_dynamic": Rule(lambda x, h: _packed_cell(4, x, h), ("input", "hx"), torch.int8),
    "quantized::quantized_gru_cell_dynamic": Rule(lambda x, h: _packed_cell(3, x, h), ("input", "hx"), torch.int8),
    "quantized::quantized_rnn_tanh_cell_dynamic": Rule(lambda x, h: _packed_cell(1, x, h), ("input", "hx"), torch.int8),
    "quantized::quantized_rnn_relu_cell_dynamic": Rule(lambda x, h: _packed_cell(1, x, h), ("input", "hx"), torch.int8),
}

RECURRENT_OVERLOAD_RULES: dict[str, Rule] = {
    # The two overloads of each name their input differently.
    "aten::lstm.input": _WHOLE,
    "aten::gru.input": _WHOLE,
    "aten::rnn_tanh.input": _WHOLE,
    "aten::rnn_relu.input": _WHOLE,
    **{
        f"aten::{name}.data": Rule(layers, ("data", "params"), "data")
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")
    },
    **{
        f"aten::quantized_lstm.{overload}": Rule(
            quantized_lstm, (overload.split("_")[0], "hx", "num_layers", "bidirectional"), torch.int8
        )
        for overload in ("input", "data", "input_legacy", "data_legacy")
    },
    **{
        f"aten::quantized_gru.{overload}": Rule(
            quantized_gru, (overload.split("_")[0], "hx", "num_layers", "bidirectional"), torch.int8
        )
        for overload in ("input", "data", "input_legacy", "data_legacy")
    },
}
