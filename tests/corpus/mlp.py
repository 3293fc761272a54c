"""Multilayer perceptrons: what a linear layer costs, and which of its two gradients are computed."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .case import (
    FIRST,
    SECOND,
    Example,
    Family,
    Parts,
    forward_in_inference_mode,
    forward_only,
    forward_without_grad,
    two_layers,
)

FAMILY = Family("mlp")


PRODUCT = 2 * 3 * 5 * 7  # 3 rows through 5 x 7


# The input needs no gradient, so the backward is the weight's gradient alone.
FAMILY.put(
    "linear_without_bias",
    lambda: Example(nn.Linear(5, 7, bias=False), torch.randn(3, 5)).costs(
        PRODUCT, PRODUCT, by_module={"": (PRODUCT, PRODUCT)}
    ),
)
# A bias is an addition: it costs nothing here.
FAMILY.put("linear_with_bias", lambda: Example(nn.Linear(5, 7), torch.randn(3, 5)).costs(PRODUCT, PRODUCT))
# Both gradients are computed: the backward is twice the forward.
FAMILY.put(
    "linear_whose_input_needs_a_gradient",
    lambda: Example(nn.Linear(5, 7), torch.randn(3, 5, requires_grad=True)).costs(PRODUCT, 2 * PRODUCT),
)
# Every position of every sample is a row.
FAMILY.put(
    "linear_over_a_sequence",
    lambda: Example(nn.Linear(5, 7), torch.randn(3, 11, 5)).costs(2 * 3 * 11 * 5 * 7, 2 * 3 * 11 * 5 * 7),
)
# No batch dimension is a batch of one.
FAMILY.put("linear_over_one_vector", lambda: Example(nn.Linear(5, 7), torch.randn(5)).costs(2 * 5 * 7, 2 * 5 * 7))
# A column is still a product.
FAMILY.put("linear_with_one_output", lambda: Example(nn.Linear(5, 1), torch.randn(3, 5)).costs(2 * 3 * 5, 2 * 3 * 5))
# The first layer computes one gradient, the second both: less than twice the forward.
FAMILY.put(
    "two_layers",
    lambda: Example(two_layers(nn.ReLU()), torch.randn(3, 5)).costs(
        FIRST + SECOND,
        FIRST + 2 * SECOND,
        by_module={"": (FIRST + SECOND, FIRST + 2 * SECOND), "0": (FIRST, FIRST), "2": (SECOND, 2 * SECOND)},
    ),
)
# No backward runs, none is counted; and the forward costs the same when no graph is recorded.
FAMILY.put(
    "two_layers_forward_only",
    lambda: Example(two_layers(nn.Tanh()), torch.randn(3, 5), step=forward_only).costs(FIRST + SECOND),
)
FAMILY.put(
    "two_layers_without_grad",
    lambda: Example(two_layers(nn.Tanh()), torch.randn(3, 5), step=forward_without_grad).costs(
        FIRST + SECOND, by_module={"2": (SECOND,)}
    ),
)
# In inference mode operators reach the counter in other forms; the products are the same.
FAMILY.put(
    "two_layers_in_inference_mode",
    lambda: Example(two_layers(nn.Tanh()), torch.randn(3, 13, 5), step=forward_in_inference_mode).costs(
        13 * (FIRST + SECOND), by_module={"0": (13 * FIRST,), "2": (13 * SECOND,)}
    ),
)


@FAMILY.network
def norms_dropouts_and_activations_are_free() -> Example:
    """Only the three linear layers cost anything."""
    batch, inputs, hidden, middle, outputs = 4, 5, 7, 11, 3
    first = 2 * batch * inputs * hidden
    second = 2 * batch * hidden * middle
    third = 2 * batch * middle * outputs
    model = nn.Sequential(
        nn.Linear(inputs, hidden),
        nn.BatchNorm1d(hidden),
        nn.GELU(),
        nn.Dropout(0.3),
        nn.Linear(hidden, middle),
        nn.LayerNorm(middle),
        nn.SiLU(),
        nn.Linear(middle, outputs),
        nn.Softmax(dim=-1),
    )
    return Example(model, torch.randn(batch, inputs, requires_grad=True)).costs(
        first + second + third,
        2 * (first + second + third),
        by_module={"0": (first, 2 * first), "4": (second, 2 * second), "7": (third, 2 * third)},
    )


@FAMILY.network
def embedding_and_classifier() -> Example:
    """A lookup is no product, forward or backward; the classifier behind it computes both gradients."""
    batch, sequence, vocabulary, hidden, classes = 3, 11, 29, 7, 5
    classifier = 2 * batch * sequence * hidden * classes
    model = nn.Sequential(nn.Embedding(vocabulary, hidden), nn.Linear(hidden, classes))
    return Example(model, torch.randint(vocabulary, (batch, sequence))).costs(
        classifier, 2 * classifier, by_module={"1": (classifier, 2 * classifier)}
    )


@FAMILY.network
def bilinear() -> Example:
    """x1 W x2: a product with the weight, then a dot product with x2 for every output.

    Torch sums the gradients slice by slice, one slice for each output: of the three factors in each, two meet in an
    elementwise product and the third in a matrix product over all (batch, left, right).
    """
    batch, left, right, outputs = 3, 5, 7, 11
    weight_product = 2 * batch * outputs * left * right
    model = nn.Bilinear(left, right, outputs)
    return Example(
        model, torch.randn(batch, left, requires_grad=True), torch.randn(batch, right, requires_grad=True)
    ).costs(weight_product + 2 * batch * outputs * right, 3 * weight_product)


@FAMILY.network
def gated_mlp() -> Example:
    """down(silu(gate(x)) * up(x)), as in Llama: three equal products."""
    batch, sequence, hidden, intermediate = 3, 5, 7, 11

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))

    product = 2 * batch * sequence * hidden * intermediate
    model = Parts(
        forward,
        gate=nn.Linear(hidden, intermediate, bias=False),
        up=nn.Linear(hidden, intermediate, bias=False),
        down=nn.Linear(intermediate, hidden, bias=False),
    )
    return Example(model, torch.randn(batch, sequence, hidden)).costs(
        3 * product,
        product + product + 2 * product,
        by_module={"gate": (product, product), "up": (product, product), "down": (product, 2 * product)},
    )
