"""Quantized layers, whose weights are packed in objects only torch's kernels read.

Integer kernels count like any other: two FLOPs (here integer operations) for a multiply-add.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from lightning_flops.instrument.counting.formulas.contract import RESULT, Rule
from lightning_flops.instrument.counting.formulas.convolution import plain, reordered, transposed
from lightning_flops.instrument.counting.formulas.matmul import linear_from_result, product

_LINEAR_NAMES = (
    "linear",
    "linear_relu",
    "linear_leaky_relu",
    "linear_tanh",
    "linear_dynamic",
    "linear_relu_dynamic",
    "linear_with_input_q_dq_qweight_dq_output_fp32",
    "linear_with_input_q_dq_qweight_dq_relu_output_fp32",
)
_CONVOLUTION_NAMES = tuple(
    f"conv{dims}d{suffix}" for dims in (1, 2, 3) for suffix in ("", "_relu", "_dynamic", "_add", "_add_relu")
)
_TRANSPOSED_NAMES = tuple(f"conv_transpose{dims}d{suffix}" for dims in (1, 2, 3) for suffix in ("", "_dynamic"))


def _unpacked_weight(packed: Any) -> torch.Tensor:
    """Weight inside a packed convolution: (C_out, C_in/groups, …kernel), or (C_in, C_out/groups, …) if transposed."""
    weight = packed.unpack()[0]
    assert isinstance(weight, torch.Tensor)
    return weight


def packed_convolution(packed: Any, out: torch.Tensor) -> int:
    """A quantized convolution that makes *out*."""
    return plain(_unpacked_weight(packed), out)


def packed_transposed(values: torch.Tensor, packed: Any) -> int:
    """A quantized transposed convolution of *values*."""
    return transposed(values, _unpacked_weight(packed))


def sparse_linear(values: torch.Tensor, out: torch.Tensor) -> int:
    """``sparse::qlinear``: how many blocks are stored is out of sight, so the dense product is what can be said."""
    return linear_from_result(values, out)


def half_precision_linear(values: torch.Tensor, weight: torch.Tensor) -> int:
    """A linear layer with its weight at hand."""
    return 2 * prod(values.shape[:-1]) * weight.numel()


def _rules(names: tuple[str, ...], flops: Callable[..., int], *arguments: str) -> dict[str, Rule]:
    return {
        f"{namespace}::{name}": Rule(flops, arguments, torch.int8)
        for namespace in ("quantized", "_quantized")
        for name in names
    }


_DENSE = "as if dense: how many of the weight's blocks are stored is not shown"

QUANTIZED_RULES: dict[str, Rule] = {
    **_rules(_LINEAR_NAMES, linear_from_result, "X", RESULT),
    **_rules(_CONVOLUTION_NAMES, packed_convolution, "packed_weight", RESULT),
    **_rules(_TRANSPOSED_NAMES, packed_transposed, "qx", "packed_weight"),
    "quantized::linear_dynamic_fp16": Rule(linear_from_result, ("X", RESULT), "X"),
    "quantized::linear_relu_dynamic_fp16": Rule(linear_from_result, ("X", RESULT), "X"),
    "quantized::linear_dynamic_fp16_unpacked_weight": Rule(half_precision_linear, ("X", "weight"), "X"),
    "_quantized::_wrapped_quantized_linear_prepacked": Rule(linear_from_result, ("X", RESULT), torch.int8),
    "_quantized::wrapped_quantized_linear": Rule(linear_from_result, ("X", RESULT), torch.int8),
    "_quantized::wrapped_fbgemm_linear_fp16_weight": Rule(linear_from_result, ("X", RESULT), "X"),
    "quantized::matmul": Rule(product, ("qa", "qb"), "qa"),
    **{
        f"sparse::{name}": Rule(sparse_linear, ("X", RESULT), torch.int8, _DENSE)
        for name in ("qlinear", "qlinear_dynamic", "qlinear_relu", "qlinear_relu_dynamic")
    },
    "onednn::qlinear_pointwise": Rule(linear_from_result, ("qx", RESULT), "qx"),
    **{
        f"onednn::{name}": Rule(reordered, ("qw", RESULT), "qx")
        for name in ("qconv_pointwise", "qconv1d_pointwise", "qconv2d_pointwise", "qconv3d_pointwise")
    },
}

QUANTIZED_OVERLOAD_RULES: dict[str, Rule] = {
    # The first overload kept an older argument's name.
    "quantized::conv2d": Rule(packed_convolution, ("weight", RESULT), torch.int8),
    "quantized::conv2d_relu": Rule(packed_convolution, ("weight", RESULT), torch.int8),
    "quantized::conv3d": Rule(packed_convolution, ("weight", RESULT), torch.int8),
    "quantized::conv3d_relu": Rule(packed_convolution, ("weight", RESULT), torch.int8),
}
