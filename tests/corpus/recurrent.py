"""Recurrent layers: each step multiplies the gates' two weights with the input and with the hidden state.

An LSTM has 4 gates, a GRU 3, a plain RNN 1. One layer and direction over all steps costs
``2 * batch * steps * gates * hidden * (inputs + hidden)``. Where the layer runs as one kernel (float32 LSTM on a CPU)
its backward computes every gradient whether it is asked for or not: twice the forward. Where it runs step by step,
autograd leaves out the gradient of an input that needs none and of the zeros before the first step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from .case import Example, Expected, Family, Network, forward_without_grad, total

FAMILY = Family("recurrent")


def backward_of_first_output(example: Example) -> None:
    """Backward from the output sequence; the final states are unused."""
    total(example.forward()[0]).backward()  # type: ignore[no-untyped-call]


@FAMILY.network
def lstm() -> Network:
    """One kernel: input, hidden state and both weights get their gradients."""
    batch, steps, inputs, hidden = 3, 5, 7, 11
    layer = 2 * batch * steps * 4 * hidden * (inputs + hidden)
    return Network(
        build=lambda: Example(
            nn.LSTM(inputs, hidden),
            torch.randn(steps, batch, inputs, requires_grad=True),
            step=backward_of_first_output,
        ),
        expected=Expected(layer, 2 * layer, by_module={"": (layer, 2 * layer)}),
    )


@FAMILY.network
def bidirectional_two_layer_lstm() -> Network:
    """The second layer reads both directions of the first: its input is twice as wide."""
    batch, steps, inputs, hidden = 3, 5, 7, 11
    first = 2 * (2 * batch * steps * 4 * hidden * (inputs + hidden))
    second = 2 * (2 * batch * steps * 4 * hidden * (2 * hidden + hidden))
    return Network(
        build=lambda: Example(
            nn.LSTM(inputs, hidden, num_layers=2, bidirectional=True, batch_first=True),
            torch.randn(batch, steps, inputs, requires_grad=True),
            step=backward_of_first_output,
        ),
        expected=Expected(first + second, 2 * (first + second)),
    )


@FAMILY.network
def lstm_without_grad() -> Network:
    """An unbatched sequence is a batch of one."""
    steps, inputs, hidden = 5, 7, 11
    return Network(
        build=lambda: Example(
            nn.LSTM(inputs, hidden, bias=False), torch.randn(steps, inputs), step=forward_without_grad
        ),
        expected=Expected(2 * 1 * steps * 4 * hidden * (inputs + hidden)),
    )


@FAMILY.network
def lstm_with_projection() -> Network:
    """The hidden state is projected to 3 numbers, and those are what the next step reads: step by step on a CPU."""
    batch, steps, inputs, hidden, projected = 2, 5, 7, 11, 3
    from_input = 2 * batch * 4 * hidden * inputs
    from_state = 2 * batch * 4 * hidden * projected
    projection = 2 * batch * hidden * projected
    return Network(
        build=lambda: Example(
            nn.LSTM(inputs, hidden, proj_size=projected),
            torch.randn(steps, batch, inputs),
            step=backward_of_first_output,
        ),
        expected=Expected(
            forward=steps * (from_input + from_state + projection),
            # Weights at every step, the state at every step but the first, both sides of the projection.
            backward=steps * (from_input + from_state + projection) + (steps - 1) * from_state + steps * projection,
        ),
    )


@FAMILY.network
def gru() -> Network:
    """Step by step on a CPU: no gradient of the input, none of the zeros before the first step."""
    batch, steps, inputs, hidden = 3, 5, 7, 11
    from_input = 2 * batch * 3 * hidden * inputs
    from_state = 2 * batch * 3 * hidden * hidden
    forward = steps * (from_input + from_state)
    backward = steps * from_input + steps * from_state + (steps - 1) * from_state
    return Network(
        build=lambda: Example(nn.GRU(inputs, hidden), torch.randn(steps, batch, inputs), step=backward_of_first_output),
        expected=Expected(forward, backward, by_module={"": (forward, backward)}),
    )


@FAMILY.network
def gru_with_a_learned_start() -> Network:
    """Input and first state need their gradients: exactly twice the forward."""
    batch, steps, inputs, hidden = 3, 5, 7, 11
    layer = 2 * batch * steps * 3 * hidden * (inputs + hidden)
    return Network(
        build=lambda: Example(
            nn.GRU(inputs, hidden),
            torch.randn(steps, batch, inputs, requires_grad=True),
            torch.randn(1, batch, hidden, requires_grad=True),
            step=backward_of_first_output,
        ),
        expected=Expected(layer, 2 * layer),
    )


@FAMILY.network
def bidirectional_two_layer_gru() -> Network:
    """Two directions, each from its own zeros; the second layer's input needs a gradient, the first's does not."""
    batch, steps, inputs, hidden = 3, 5, 7, 11
    first_input = 2 * batch * steps * 3 * hidden * inputs
    second_input = 2 * batch * steps * 3 * hidden * (2 * hidden)
    state = 2 * batch * 3 * hidden * hidden
    return Network(
        build=lambda: Example(
            nn.GRU(inputs, hidden, num_layers=2, bidirectional=True, batch_first=True),
            torch.randn(batch, steps, inputs),
            step=backward_of_first_output,
        ),
        expected=Expected(
            2 * (first_input + steps * state) + 2 * (second_input + steps * state),
            2 * (first_input + steps * state + (steps - 1) * state)
            + 2 * (2 * second_input + steps * state + (steps - 1) * state),
        ),
    )


@FAMILY.network
def plain_rnn() -> Network:
    """One gate, a tanh."""
    batch, steps, inputs, hidden = 3, 5, 7, 11
    from_input = 2 * batch * hidden * inputs
    from_state = 2 * batch * hidden * hidden
    return Network(
        build=lambda: Example(nn.RNN(inputs, hidden), torch.randn(steps, batch, inputs), step=backward_of_first_output),
        expected=Expected(
            steps * (from_input + from_state), steps * from_input + steps * from_state + (steps - 1) * from_state
        ),
    )


@FAMILY.network
def relu_rnn_without_grad() -> Network:
    """Two layers, no graph."""
    batch, steps, inputs, hidden = 3, 5, 7, 11
    return Network(
        build=lambda: Example(
            nn.RNN(inputs, hidden, num_layers=2, nonlinearity="relu"),
            torch.randn(steps, batch, inputs),
            step=forward_without_grad,
        ),
        expected=Expected(
            2 * batch * steps * hidden * (inputs + hidden) + 2 * batch * steps * hidden * (hidden + hidden)
        ),
    )


@FAMILY.network
def packed_lstm() -> Network:
    """Sequences of 5, 3 and 2 steps, packed: 3 rows run in the first two steps, 2 in the third, 1 in the last two."""
    lengths, inputs, hidden = (5, 3, 2), 7, 11
    rows = 5 + 3 + 2
    rows_of_first_step = 3
    from_input = 2 * 4 * hidden * inputs
    from_state = 2 * 4 * hidden * hidden

    class PackedLstm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(inputs, hidden)

        def forward(self, padded: Tensor) -> Tensor:
            output, _ = self.lstm(pack_padded_sequence(padded, torch.tensor(lengths)))
            return output.data

    forward = rows * (from_input + from_state)
    backward = rows * (from_input + from_state) + (rows - rows_of_first_step) * from_state
    return Network(
        build=lambda: Example(PackedLstm(), torch.randn(max(lengths), len(lengths), inputs)),
        expected=Expected(forward, backward, by_module={"lstm": (forward, backward)}),
    )


class Unrolled(nn.Module):
    """A recurrent cell called once a step from the model's own loop, over zeros, with a classifier at the end."""

    def __init__(self, cell: nn.Module, hidden: int, classes: int) -> None:
        """Unrolls *cell*, whose state has *hidden* numbers."""
        super().__init__()
        self.cell = cell
        self.hidden = hidden
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, sequence: Tensor) -> Tensor:
        """The class scores after the last step of a (steps, batch, inputs) sequence."""
        state = torch.zeros(sequence.shape[1], self.hidden)
        memory = torch.zeros_like(state)
        for step in sequence:
            if isinstance(self.cell, nn.LSTMCell):
                state, memory = self.cell(step, (state, memory))
            else:
                state = self.cell(step, state)
        return self.classifier(state)


def unrolled(cell_type: type[nn.Module], gates: int) -> Network:
    """A cell over some steps: it is one module, called once a step."""
    batch, steps, inputs, hidden, classes = 3, 4, 7, 11, 5
    from_input = 2 * batch * gates * hidden * inputs
    from_state = 2 * batch * gates * hidden * hidden
    classifier = 2 * batch * hidden * classes
    cell_forward = steps * (from_input + from_state)
    cell_backward = steps * (from_input + from_state) + (steps - 1) * from_state
    return Network(
        build=lambda: Example(Unrolled(cell_type(inputs, hidden), hidden, classes), torch.randn(steps, batch, inputs)),
        expected=Expected(
            cell_forward + classifier,
            cell_backward + 2 * classifier,
            by_module={"cell": (cell_forward, cell_backward), "classifier": (classifier, 2 * classifier)},
        ),
    )


# Four gates.
FAMILY.put("lstm_cell_in_a_loop", unrolled(nn.LSTMCell, 4))
# Three gates.
FAMILY.put("gru_cell_in_a_loop", unrolled(nn.GRUCell, 3))
# One gate.
FAMILY.put("rnn_cell_in_a_loop", unrolled(nn.RNNCell, 1))
