"""Multilayer perceptrons: what a linear layer costs, and which of its two gradients are computed."""

from __future__ import annotations

import torch
from torch import nn

from .case import Example, Expected, Family, Network, forward_in_inference_mode, forward_only, forward_without_grad

FAMILY = Family("mlp")


@FAMILY.network
def linear_without_bias() -> Network:
    """The input needs no gradient, so the backward is the weight's gradient alone."""
    batch, inputs, outputs = 3, 5, 7
    product = 2 * batch * inputs * outputs
    return Network(
        build=lambda: Example(nn.Linear(inputs, outputs, bias=False), torch.randn(batch, inputs)),
        expected=Expected(product, product, by_module={"": (product, product)}),
    )


@FAMILY.network
def linear_with_bias() -> Network:
    """A bias is an addition: it costs nothing here."""
    batch, inputs, outputs = 3, 5, 7
    return Network(
        build=lambda: Example(nn.Linear(inputs, outputs), torch.randn(batch, inputs)),
        expected=Expected(2 * batch * inputs * outputs, 2 * batch * inputs * outputs),
    )


@FAMILY.network
def linear_whose_input_needs_a_gradient() -> Network:
    """Both gradients are computed: the backward is twice the forward."""
    batch, inputs, outputs = 3, 5, 7
    product = 2 * batch * inputs * outputs
    return Network(
        build=lambda: Example(nn.Linear(inputs, outputs), torch.randn(batch, inputs, requires_grad=True)),
        expected=Expected(product, 2 * product),
    )


@FAMILY.network
def linear_over_a_sequence() -> Network:
    """Every position of every sample is a row."""
    batch, sequence, inputs, outputs = 3, 11, 5, 7
    product = 2 * batch * sequence * inputs * outputs
    return Network(
        build=lambda: Example(nn.Linear(inputs, outputs), torch.randn(batch, sequence, inputs)),
        expected=Expected(product, product),
    )


@FAMILY.network
def linear_over_one_vector() -> Network:
    """No batch dimension is a batch of one."""
    inputs, outputs = 5, 7
    return Network(
        build=lambda: Example(nn.Linear(inputs, outputs), torch.randn(inputs)),
        expected=Expected(2 * inputs * outputs, 2 * inputs * outputs),
    )


@FAMILY.network
def linear_with_one_output() -> Network:
    """A column is still a product."""
    batch, inputs = 3, 5
    return Network(
        build=lambda: Example(nn.Linear(inputs, 1), torch.randn(batch, inputs)),
        expected=Expected(2 * batch * inputs * 1, 2 * batch * inputs * 1),
    )


@FAMILY.network
def two_layers() -> Network:
    """The first layer computes one gradient, the second both: less than twice the forward."""
    batch, inputs, hidden, outputs = 3, 5, 7, 11
    first = 2 * batch * inputs * hidden
    second = 2 * batch * hidden * outputs
    return Network(
        build=lambda: Example(
            nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, outputs)), torch.randn(batch, inputs)
        ),
        expected=Expected(
            first + second,
            first + 2 * second,
            by_module={"": (first + second, first + 2 * second), "0": (first, first), "2": (second, 2 * second)},
        ),
    )


@FAMILY.network
def norms_dropouts_and_activations_are_free() -> Network:
    """Only the three linear layers cost anything."""
    batch, inputs, hidden, middle, outputs = 4, 5, 7, 11, 3
    first = 2 * batch * inputs * hidden
    second = 2 * batch * hidden * middle
    third = 2 * batch * middle * outputs
    return Network(
        build=lambda: Example(
            nn.Sequential(
                nn.Linear(inputs, hidden),
                nn.BatchNorm1d(hidden),
                nn.GELU(),
                nn.Dropout(0.3),
                nn.Linear(hidden, middle),
                nn.LayerNorm(middle),
                nn.SiLU(),
                nn.Linear(middle, outputs),
                nn.Softmax(dim=-1),
            ),
            torch.randn(batch, inputs, requires_grad=True),
        ),
        expected=Expected(
            first + second + third,
            2 * (first + second + third),
            by_module={"0": (first, 2 * first), "4": (second, 2 * second), "7": (third, 2 * third)},
        ),
    )


@FAMILY.network
def embedding_and_classifier() -> Network:
    """A lookup is no product, forward or backward; the classifier behind it computes both gradients."""
    batch, sequence, vocabulary, hidden, classes = 3, 11, 29, 7, 5
    classifier = 2 * batch * sequence * hidden * classes
    return Network(
        build=lambda: Example(
            nn.Sequential(nn.Embedding(vocabulary, hidden), nn.Linear(hidden, classes)),
            torch.randint(vocabulary, (batch, sequence)),
        ),
        expected=Expected(classifier, 2 * classifier, by_module={"1": (classifier, 2 * classifier)}),
    )


@FAMILY.network
def two_layers_forward_only() -> Network:
    """No backward runs, none is counted."""
    batch, inputs, hidden, outputs = 3, 5, 7, 11
    return Network(
        build=lambda: Example(
            nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)),
            torch.randn(batch, inputs),
            step=forward_only,
        ),
        expected=Expected(2 * batch * inputs * hidden + 2 * batch * hidden * outputs),
    )


@FAMILY.network
def two_layers_without_grad() -> Network:
    """The forward costs the same when no graph is recorded."""
    batch, inputs, hidden, outputs = 3, 5, 7, 11
    return Network(
        build=lambda: Example(
            nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs)),
            torch.randn(batch, inputs),
            step=forward_without_grad,
        ),
        expected=Expected(
            2 * batch * inputs * hidden + 2 * batch * hidden * outputs, by_module={"2": (2 * batch * hidden * outputs,)}
        ),
    )


@FAMILY.network
def two_layers_in_inference_mode() -> Network:
    """In inference mode operators reach the counter in other forms; the products are the same."""
    batch, sequence, inputs, hidden, outputs = 3, 13, 5, 7, 11
    first = 2 * batch * sequence * inputs * hidden
    second = 2 * batch * sequence * hidden * outputs
    return Network(
        build=lambda: Example(
            nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, outputs, bias=False)),
            torch.randn(batch, sequence, inputs),
            step=forward_in_inference_mode,
        ),
        expected=Expected(first + second, by_module={"0": (first,), "2": (second,)}),
    )


@FAMILY.network
def bilinear() -> Network:
    """x1 W x2: a product with the weight, then a dot product with x2 for every output.

    Torch sums the gradients slice by slice, one slice for each output: of the three factors in each, two meet in an
    elementwise product and the third in a matrix product over all (batch, left, right).
    """
    batch, left, right, outputs = 3, 5, 7, 11
    weight_product = 2 * batch * outputs * left * right
    return Network(
        build=lambda: Example(
            nn.Bilinear(left, right, outputs),
            torch.randn(batch, left, requires_grad=True),
            torch.randn(batch, right, requires_grad=True),
        ),
        expected=Expected(weight_product + 2 * batch * outputs * right, 3 * weight_product),
    )


@FAMILY.network
def gated_mlp() -> Network:
    """down(silu(gate(x)) * up(x)), as in Llama: three equal products."""
    batch, sequence, hidden, intermediate = 3, 5, 7, 11

    class GatedMlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Linear(hidden, intermediate, bias=False)
            self.up = nn.Linear(hidden, intermediate, bias=False)
            self.down = nn.Linear(intermediate, hidden, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    product = 2 * batch * sequence * hidden * intermediate
    return Network(
        build=lambda: Example(GatedMlp(), torch.randn(batch, sequence, hidden)),
        expected=Expected(
            3 * product,
            product + product + 2 * product,
            by_module={"gate": (product, product), "up": (product, product), "down": (product, 2 * product)},
        ),
    )
