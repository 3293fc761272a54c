"""Recurrent layers: each step multiplies the gates' two weights with the input and with the hidden state.

An LSTM has 4 gates, a GRU 3, a plain RNN 1. One layer and direction over all steps costs
``2 * batch * steps * gates * hidden * (inputs + hidden)``. Where the layer runs as one kernel (float32 LSTM on a CPU)
its backward computes every gradient whether it is asked for or not: twice the forward. Where it runs step by step,
autograd leaves out the gradient of an input that needs none and of the zeros before the first step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from .case import Example, Family, Parts, forward_without_grad, total

FAMILY = Family("recurrent")


def backward_of_first_output(example: Example) -> None:
    """Backward from the output sequence; the final states are unused."""
    total(example.forward()[0]).backward()  # type: ignore[no-untyped-call]


BATCH, STEPS, INPUTS, HIDDEN = 3, 5, 7, 11
SEQUENCE = (STEPS, BATCH, INPUTS)
FROM_INPUT, FROM_STATE = 2 * BATCH * HIDDEN * INPUTS, 2 * BATCH * HIDDEN * HIDDEN  # of one gate, in one step
BOTH = STEPS * (FROM_INPUT + FROM_STATE)
# Weights at every step, the state at every step but the first, whose zeros have no gradient; none of the input.
STEP_BY_STEP = BOTH + (STEPS - 1) * FROM_STATE


def layer(
    name: str,
    made: Callable[[], nn.Module],
    shape: tuple[int, ...],
    forward: int,
    backward: int,
    *,
    of_input: bool = False,
    start: tuple[int, ...] | None = None,
) -> None:
    """Adds one module over a sequence; *of_input*: its gradient is asked for; *start*: of a learned first state."""
    starts = () if start is None else (start,)
    FAMILY.put(
        name,
        lambda: Example(
            made(),
            torch.randn(shape, requires_grad=of_input),
            *(torch.randn(one, requires_grad=True) for one in starts),
            step=backward_of_first_output if backward else forward_without_grad,
        ).costs(forward, backward, by_module={"": (forward, backward)}),
    )


# One kernel: input, hidden state and both weights get their gradients.
layer("lstm", lambda: nn.LSTM(7, 11), SEQUENCE, 4 * BOTH, 8 * BOTH, of_input=True)
# The second layer reads both directions of the first: its input is twice as wide.
FIRST = 2 * 4 * BOTH
SECOND = 2 * (2 * BATCH * STEPS * 4 * HIDDEN * (2 * HIDDEN + HIDDEN))
layer(
    "bidirectional_two_layer_lstm",
    lambda: nn.LSTM(7, 11, num_layers=2, bidirectional=True, batch_first=True),
    (BATCH, STEPS, INPUTS),
    FIRST + SECOND,
    2 * (FIRST + SECOND),
    of_input=True,
)
# An unbatched sequence is a batch of one.
layer("lstm_without_grad", lambda: nn.LSTM(7, 11, bias=False), (STEPS, INPUTS), 2 * 1 * 5 * 4 * 11 * (7 + 11), 0)
# The hidden state is projected to 3 numbers, and those are what the next step reads: step by step on a CPU. Weights at
# every step, the state at every step but the first, both sides of the projection.
NARROW, PROJECTION = 2 * BATCH * 4 * HIDDEN * 3, 2 * BATCH * HIDDEN * 3
PROJECTED = STEPS * (4 * FROM_INPUT + NARROW + PROJECTION)
layer(
    "lstm_with_projection",
    lambda: nn.LSTM(7, 11, proj_size=3),
    SEQUENCE,
    PROJECTED,
    PROJECTED + (STEPS - 1) * NARROW + STEPS * PROJECTION,
)
# Step by step on a CPU: no gradient of the input, none of the zeros before the first step.
layer("gru", lambda: nn.GRU(7, 11), SEQUENCE, 3 * BOTH, 3 * STEP_BY_STEP)
# Input and first state need their gradients: exactly twice the forward.
layer(
    "gru_with_a_learned_start",
    lambda: nn.GRU(7, 11),
    SEQUENCE,
    3 * BOTH,
    6 * BOTH,
    of_input=True,
    start=(1, BATCH, HIDDEN),
)
# Two directions, each from its own zeros; the second layer's input needs a gradient, the first's does not.
SECOND_INPUT = STEPS * 3 * 2 * BATCH * HIDDEN * (2 * HIDDEN)
layer(
    "bidirectional_two_layer_gru",
    lambda: nn.GRU(7, 11, num_layers=2, bidirectional=True, batch_first=True),
    (BATCH, STEPS, INPUTS),
    2 * 3 * BOTH + 2 * (SECOND_INPUT + STEPS * 3 * FROM_STATE),
    2 * 3 * STEP_BY_STEP + 2 * (2 * SECOND_INPUT + (2 * STEPS - 1) * 3 * FROM_STATE),
)
# One gate, a tanh.
layer("plain_rnn", lambda: nn.RNN(7, 11), SEQUENCE, BOTH, STEP_BY_STEP)
# Two layers, no graph.
layer(
    "relu_rnn_without_grad",
    lambda: nn.RNN(7, 11, num_layers=2, nonlinearity="relu"),
    SEQUENCE,
    BOTH + STEPS * 2 * FROM_STATE,
    0,
)


@FAMILY.network
def packed_lstm() -> Example:
    """Sequences of 5, 3 and 2 steps, packed: 3 rows run in the first two steps, 2 in the third, 1 in the last two."""
    lengths, inputs, hidden = (5, 3, 2), 7, 11
    rows = 5 + 3 + 2
    rows_of_first_step = 3
    from_input = 2 * 4 * hidden * inputs
    from_state = 2 * 4 * hidden * hidden

    def packed_lstm_forward(self: Any, padded: Tensor) -> Tensor:
        output, _ = self.lstm(pack_padded_sequence(padded, torch.tensor(lengths)))
        return output.data

    forward = rows * (from_input + from_state)
    backward = rows * (from_input + from_state) + (rows - rows_of_first_step) * from_state
    model = Parts(packed_lstm_forward, lstm=nn.LSTM(inputs, hidden))
    return Example(model, torch.randn(max(lengths), len(lengths), inputs)).costs(
        forward, backward, by_module={"lstm": (forward, backward)}
    )


class Unrolled(nn.Module):
    """A recurrent cell called once a step from the model's own loop, over zeros, with a classifier at the end."""

    def __init__(self, cell: nn.Module, hidden: int, classes: int) -> None:
        super().__init__()
        self.cell = cell
        self.hidden = hidden
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        state = torch.zeros(sequence.shape[1], self.hidden)
        memory = torch.zeros_like(state)
        for step in sequence:
            if isinstance(self.cell, nn.LSTMCell):
                state, memory = self.cell(step, (state, memory))
            else:
                state = self.cell(step, state)
        return self.classifier(state)


def unrolled(cell_type: type[nn.Module], gates: int) -> Example:
    """A cell over some steps: it is one module, called once a step."""
    batch, steps, inputs, hidden, classes = 3, 4, 7, 11, 5
    from_input = 2 * batch * gates * hidden * inputs
    from_state = 2 * batch * gates * hidden * hidden
    classifier = 2 * batch * hidden * classes
    cell_forward = steps * (from_input + from_state)
    cell_backward = steps * (from_input + from_state) + (steps - 1) * from_state
    model = Unrolled(cell_type(inputs, hidden), hidden, classes)
    return Example(model, torch.randn(steps, batch, inputs)).costs(
        cell_forward + classifier,
        cell_backward + 2 * classifier,
        by_module={"cell": (cell_forward, cell_backward), "classifier": (classifier, 2 * classifier)},
    )


# Four gates.
FAMILY.put("lstm_cell_in_a_loop", lambda: unrolled(nn.LSTMCell, 4))
# Three gates.
FAMILY.put("gru_cell_in_a_loop", lambda: unrolled(nn.GRUCell, 3))
# One gate.
FAMILY.put("rnn_cell_in_a_loop", lambda: unrolled(nn.RNNCell, 1))
