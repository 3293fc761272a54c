"""Convolutions: outputs × taps × channels, forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.measure.counting.recording import leaf, meta, total_flops, work_of


def test_a_gradient_penalty_through_a_convolution_counts_every_product() -> None:
    layer, inputs = nn.Conv2d(4, 6, 3, bias=False), leaf(2, 4, 8, 8)
    one = 2 * (2 * 6 * 6 * 6) * 4 * 9
    (gradient,) = torch.autograd.grad(layer(inputs).sum(), inputs, create_graph=True)
    # torch makes the gradients of both factors the gradient was made from, the weight and the incoming gradient.
    assert total_flops(gradient.square().sum().backward) == 2 * one


@pytest.mark.parametrize(
    ("mask", "products"),
    [([True, True, True], 2), ([False, True, True], 1), ([True, False, True], 1), ([False] * 3, 0)],
)
def test_a_convolutions_backward_counts_the_gradients_asked_for(mask: list[bool], products: int) -> None:
    grad, values, weight = meta(2, 6, 6, 6), meta(2, 4, 8, 8), meta(6, 2, 3, 3)
    one = 2 * grad.numel() * 2 * 9
    plain = (grad, values, weight, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 2, mask)
    assert work_of("aten::convolution_backward", *plain).flops == products * one
    overrideable = (grad, values, weight, [1, 1], [0, 0], [1, 1], False, [0, 0], 2, mask)
    assert work_of("aten::convolution_backward_overrideable", *overrideable).flops == products * one


@pytest.mark.parametrize("padding", [1, "same"])
@pytest.mark.parametrize("make", [nn.Conv2d, nn.ConvTranspose2d])
def test_a_complex_convolution_is_three_real_ones(make: Callable[..., nn.Module], padding: int | str) -> None:
    """Torch makes three of it: of the real parts, of the imaginary parts, and of the sums of both."""
    if make is nn.ConvTranspose2d and padding == "same":
        pytest.skip("torch has no such layer")
    layer = make(4, 4, 3, padding=padding, dtype=torch.complex64)
    values = torch.ones(2, 4, 8, 8, dtype=torch.complex64).requires_grad_()
    one = 2 * (2 * 4 * 8 * 8) * 4 * 9
    assert total_flops(lambda: layer(values)) == 3 * one
    with torch.inference_mode():
        assert total_flops(lambda: layer(values)) == 3 * one
    assert total_flops(lambda: layer(values).abs().sum().backward()) == 3 * 3 * one
