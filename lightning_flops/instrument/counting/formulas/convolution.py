"""Convolutions: plain, transposed, grouped, dilated, in every backend, forward and backward.

Each output element of a convolution meets C_in/groups × (kernel size) weights; each input element of a transposed one
meets C_out/groups × (kernel size). Taps that fall on padding count like the others, as everywhere in the field.

A complex convolution is three real ones: torch runs it so, and counted is what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch

from lightning_flops.instrument.counting.formulas.contract import RESULT, Arguments, Keywords, Rule


def plain(weight: torch.Tensor, out: torch.Tensor) -> int:
    """A convolution with weight (C_out, C_in/groups, …kernel) that makes *out*; also from a gradient of that shape."""
    return 2 * out.numel() * prod(weight.shape[1:])


def transposed(values: torch.Tensor, weight: torch.Tensor) -> int:
    """A transposed convolution of *values* with weight (C_in, C_out/groups, …kernel)."""
    return 2 * values.numel() * prod(weight.shape[1:])


def convolution(args: Arguments, kwargs: Keywords, out: Any) -> int:
    """``convolution(input, weight, bias, stride, padding, dilation, transposed, …)`` and what shares its order."""
    side = args[0] if args[6] else out
    flops: int = 2 * side.numel() * prod(args[1].shape[1:])
    return flops


def backward(args: Arguments, kwargs: Keywords, out: Any) -> int:
    """``convolution_backward(grad_output, input, weight, …, transposed at 7, …, output_mask)``.

    Input and weight gradient cost one forward each, whatever the groups; the bias's is a reduction.
    """
    mask = args[10]
    forward: int = 2 * args[1 if args[7] else 0].numel() * prod(args[2].shape[1:])
    return (bool(mask[0]) + bool(mask[1])) * forward


def plain_backward(grad: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]) -> int:
    """Backward of a convolution that is not transposed."""
    return (bool(mask[0]) + bool(mask[1])) * plain(weight, grad)


def transposed_backward(values: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]) -> int:
    """Backward of a transposed convolution."""
    return (bool(mask[0]) + bool(mask[1])) * transposed(values, weight)


def reordered(weight: torch.Tensor, out: torch.Tensor) -> int:
    """A convolution whose weight may have been laid out anew: only its number of elements is trusted.

    *out* is (N, C_out, …); the weight has C_out × C_in/groups × (kernel size) elements in any layout.
    """
    return 2 * (out.numel() // int(out.shape[1])) * weight.numel()


def reordered_transposed(values: torch.Tensor, weight: torch.Tensor) -> int:
    """A transposed convolution whose weight may have been laid out anew; *values* is (N, C_in, …)."""
    return 2 * (values.numel() // int(values.shape[1])) * weight.numel()


def deformable_backward(grad: torch.Tensor, weight: torch.Tensor) -> int:
    """The two convolution-sized products of a deformable convolution's backward."""
    return 2 * plain(weight, grad)


def temporal(steps_in: int, values: torch.Tensor, weight: torch.Tensor, pad: int) -> int:
    """``conv_tbc``: a product for each tap of the weight (kernel, C_in, C_out), over the time steps that exist.

    Unlike the other convolutions it leaves the padded steps out: tap *k* looks *k - pad* steps ahead.

    Args:
        steps_in: time steps of the input.
        values: the (T, B, C_out) result, or a gradient of its shape.
        weight: of shape (kernel, C_in, C_out).
        pad: steps of padding at each end.
    """
    taps, steps_out = int(weight.shape[0]), int(values.shape[0])
    steps = sum(min(steps_in + pad - tap, steps_out) - max(0, pad - tap) for tap in range(taps))
    return 2 * steps * int(values.shape[1]) * int(weight.shape[1]) * int(weight.shape[2])


def _plain(values: str = "input") -> Rule:
    return Rule(plain, ("weight", RESULT), values)


def _transposed(values: str = "input") -> Rule:
    return Rule(transposed, (values, "weight"), values)


def _whole(rule: Rule) -> Rule:
    """A form that torch takes apart; of complex numbers it makes three convolutions of real ones."""
    return replace(rule, complex_factor=3)


CONVOLUTION_OVERLOAD_RULES: dict[str, Rule] = {
    # This overload names no mask: it fills the three tensors it is handed.
    "aten::_slow_conv2d_backward.grad_input": Rule(
        lambda grad, weight: plain_backward(grad, weight, (True, True)), ("grad_output", "weight"), "grad_output"
    ),
}

CONVOLUTION_RULES: dict[str, Rule] = {
    "aten::convolution": Rule(convolution, dtype="input"),
    "aten::_convolution": Rule(convolution, dtype="input"),
    "aten::convolution_overrideable": Rule(convolution, dtype="input"),
    "aten::convolution_backward": Rule(backward, dtype="grad_output"),
    # The same without the bias's sizes
    "aten::convolution_backward_overrideable": Rule(
        lambda *read: backward((*read[:3], None, None, None, None, read[3], None, None, read[4]), {}, None),
        ("grad_output", "input", "weight", "transposed", "output_mask"),
        "grad_output",
    ),
    # Whole forms, which reach a dispatch mode where autograd's keys are off
    "aten::conv1d": _whole(_plain()),
    "aten::conv2d": _whole(_plain()),
    "aten::conv3d": _whole(_plain()),
    "aten::conv_transpose1d": _whole(_transposed()),
    "aten::conv_transpose2d": _whole(_transposed()),
    "aten::conv_transpose3d": _whole(_transposed()),
    "aten::_convolution_mode": _whole(_plain()),
    "aten::conv_tbc": Rule(
        lambda values, weight, pad, out: temporal(int(values.shape[0]), out, weight, pad),
        ("self", "weight", "pad", RESULT),
        "self",
    ),
    "aten::conv_tbc_backward": Rule(
        lambda grad, values, weight, pad: 2 * temporal(int(values.shape[0]), grad, weight, pad),
        ("self", "input", "weight", "pad"),
        "self",
    ),
    "aten::conv_depthwise3d": _plain("self"),
    "aten::_conv_depthwise2d": _plain("self"),
    # Backends
    "aten::mkldnn_convolution": Rule(reordered, ("weight", RESULT), "self"),
    "aten::cudnn_convolution": _plain("self"),
    "aten::cudnn_convolution_transpose": _transposed("self"),
    "aten::cudnn_convolution_relu": _plain("self"),
    "aten::cudnn_convolution_add_relu": _plain("self"),
    "aten::miopen_convolution": _plain("self"),
    "aten::miopen_convolution_transpose": _transposed("self"),
    "aten::miopen_depthwise_convolution": _plain("self"),
    "aten::miopen_convolution_relu": _plain("self"),
    "aten::miopen_convolution_add_relu": _plain("self"),
    "aten::_mps_convolution": _plain("self"),
    "aten::_mps_convolution_transpose": _transposed("self"),
    "aten::mps_convolution_backward": Rule(plain_backward, ("grad_output", "weight", "output_mask"), "grad_output"),
    "aten::mps_convolution_transpose_backward": Rule(
        transposed_backward, ("self", "weight", "output_mask"), "grad_output"
    ),
    "aten::_nnpack_spatial_convolution": _plain(),
    "aten::thnn_conv2d": _plain("self"),
    "aten::_slow_conv2d_forward": _plain("self"),
    "aten::_slow_conv2d_backward": Rule(plain_backward, ("grad_output", "weight", "output_mask"), "grad_output"),
    "aten::slow_conv_dilated2d": _plain("self"),
    "aten::slow_conv_dilated3d": _plain("self"),
    "aten::slow_conv3d": _plain("self"),
    "aten::slow_conv3d_forward": _plain("self"),
    "aten::slow_conv_transpose2d": _transposed("self"),
    "aten::slow_conv_transpose3d": _transposed("self"),
    # Called by the compiler's CPU code
    "mkldnn::_convolution_pointwise": Rule(reordered, ("W", RESULT), "X"),
    "mkldnn::_convolution_pointwise_": Rule(reordered, ("W", RESULT), "X"),
    "mkldnn::_convolution_transpose_pointwise": Rule(reordered_transposed, ("X", "W"), "X"),
}

_OF_CUDNN = "int[] padding, int[] stride, int[] dilation, int groups, bool benchmark, bool deterministic"


def _retired_backwards(name: str, tail: str) -> dict[str, Rule]:
    """The backward of one backend's convolution: as a whole, of the input alone, and of the weight alone."""
    whole, inside = f"Tensor self, Tensor grad_output, Tensor weight, {tail}", f"{tail}) -> Tensor"
    return {
        f"aten::{name}_backward({whole}, bool[2] output_mask) -> (Tensor, Tensor)": Rule(
            plain_backward, ("grad_output", "weight", "output_mask"), "grad_output"
        ),
        f"aten::{name}_backward_input(int[] self_size, Tensor grad_output, Tensor weight, {inside}": Rule(
            plain, ("weight", "grad_output"), "grad_output"
        ),
        # What it puts out has the weight's shape.
        f"aten::{name}_backward_weight(int[] weight_size, Tensor grad_output, Tensor self, {inside}": Rule(
            plain, (RESULT, "grad_output"), "grad_output"
        ),
    }


RETIRED_CONVOLUTIONS: dict[str, Rule] = {
    **_retired_backwards("cudnn_convolution", _OF_CUDNN),
    **_retired_backwards("cudnn_convolution", f"{_OF_CUDNN}, bool allow_tf32"),
    **_retired_backwards("miopen_convolution", _OF_CUDNN),
    f"aten::cudnn_convolution(Tensor self, Tensor weight, {_OF_CUDNN}) -> Tensor": _plain("self"),
}
"""Operators that torch had before 1.11, which traces of that time still name: declarations, and their rules."""
