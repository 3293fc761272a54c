"""Quantized layers: the same counts as their float originals."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_flops.instrument.counting.formulas import lookup
from tests.instrument.counting.recording import flops_by_operator, meta, operator, work_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


def quantized(*shape: int) -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(shape), 0.1, 0, torch.quint8)


def linear(dynamic: bool) -> Any:
    layers: Any = torch.ao.nn.quantized
    layer = layers.dynamic.Linear(8, 4) if dynamic else layers.Linear(8, 4)
    return layer(torch.ones(3, 8) if dynamic else quantized(3, 8))


def convolution(transposed: bool) -> Any:
    layers: Any = torch.ao.nn.quantized
    if transposed:
        return layers.ConvTranspose2d(4, 6, 3)(quantized(1, 4, 6, 6))
    return layers.Conv2d(4, 6, 3, groups=2)(quantized(1, 4, 6, 6))


LAYERS: dict[str, tuple[Callable[[], Any], dict[str, int]]] = {
    "linear": (lambda: linear(False), {"quantized.linear": 2 * 3 * 8 * 4}),
    "dynamic linear": (lambda: linear(True), {"quantized.linear_dynamic": 2 * 3 * 8 * 4}),
    "convolution": (lambda: convolution(False), {"quantized.conv2d": 2 * (6 * 4 * 4) * 2 * 9}),
    "transposed": (lambda: convolution(True), {"quantized.conv_transpose2d": 2 * (4 * 6 * 6) * 6 * 9}),
    "matmul": (
        lambda: torch.ops.quantized.matmul(quantized(3, 8), quantized(8, 5), 0.1, 0),
        {"quantized.matmul": 2 * 3 * 8 * 5},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_quantized_layer_counts_like_the_float_layer(name: str) -> None:
    run, expected = LAYERS[name]
    assert flops_by_operator(run) == expected


def test_dynamic_layers_run_in_eight_bits() -> None:
    assert lookup(operator("quantized::linear_dynamic")).dtype_of((torch.ones(3, 8),), {}, None) is torch.int8


def test_compiled_quantized_code_counts() -> None:
    out = meta(2, 6, 6, 6)
    arguments: tuple[Any, ...] = (
        meta(2, 4, 8, 8),
        1.0,
        0,
        meta(6, 4, 3, 3),
        meta(6),
        meta(6),
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        1,
        1.0,
        0,
    )
    call: tuple[Any, ...] = (*arguments, None, "none", [], "")
    assert work_of("onednn::qconv2d_pointwise", *call, out=out).flops == 2 * out.numel() * 4 * 9
    linear_call: tuple[Any, ...] = (
        meta(3, 8),
        1.0,
        0,
        meta(8, 4),
        meta(4),
        meta(4),
        None,
        1.0,
        0,
        None,
        "none",
        [],
        "",
    )
    assert work_of("onednn::qlinear_pointwise", *linear_call, out=meta(3, 4)).flops == 2 * 3 * 8 * 4
