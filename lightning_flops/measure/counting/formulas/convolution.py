"""Convolutions: plain, transposed, grouped, dilated, in every backend, forward and backward.

Each output element of a convolution meets C_in/groups × (kernel size) weights; each input element of a transposed one
meets C_out/groups × (kernel size). Taps that fall on padding count like the others, as everywhere in the field.

Torch's own rule for the backward leaves the groups out. A complex convolution is three real ones, which torch runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from lightning_flops.measure.counting.formulas.contract import RESULT, Rule, rules


def plain(weight: Tensor, out: Tensor) -> int:
    """A convolution with weight (C_out, C_in/groups, …kernel) that makes *out*; also from a gradient of that shape."""
    return 2 * out.numel() * prod(weight.shape[1:])


def plain_backward(grad: Tensor, weight: Tensor, mask: Sequence[bool] | None) -> int:
    """Input and weight gradient cost one forward each, whatever the groups; *grad* is the input of a transposed one."""
    wanted = (True, True) if mask is None else mask[:2]
    return sum(map(bool, wanted)) * plain(weight, grad)


def reordered(values: Tensor, weight: Tensor, out: Tensor) -> int:
    """A convolution whose weight may have been laid out anew: only its number of elements is trusted.

    *out* is (N, C_out, …); the weight has C_out × C_in/groups × (kernel size) elements in any layout.
    """
    return 2 * (out.numel() // int(out.shape[1])) * weight.numel()


_DEFORMED = "the convolution's products; sampling the input at the offsets is left out"

CONVOLUTION_RULES: dict[str, Rule] = {
    **rules(
        "convolution _convolution convolution_overrideable",
        lambda values, weight, turned, out: plain(weight, values if turned else out),
        f"input weight transposed? {RESULT}",
    ),
    **rules(
        "convolution_backward convolution_backward_overrideable",
        lambda grad, values, weight, turned, mask: plain_backward(values if turned else grad, weight, mask),
        "grad_output input weight transposed output_mask",
    ),
    **rules(
        "conv_depthwise3d _conv_depthwise2d cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu "
        "miopen_convolution miopen_depthwise_convolution miopen_convolution_relu miopen_convolution_add_relu "
        "_mps_convolution _nnpack_spatial_convolution _slow_conv2d_forward slow_conv_dilated2d slow_conv_dilated3d "
        "slow_conv3d_forward",
        plain,
        f"weight {RESULT}",
    ),
    **rules(
        "cudnn_convolution_transpose miopen_convolution_transpose _mps_convolution_transpose slow_conv_transpose2d "
        "slow_conv_transpose3d",
        plain,
        "weight self",
    ),
    **rules("_slow_conv2d_backward mps_convolution_backward", plain_backward, "grad_output weight output_mask?"),
    **rules("mps_convolution_transpose_backward", plain_backward, "self weight output_mask"),
    # The compiler's CPU code
    **rules("mkldnn_convolution", reordered, f"self weight {RESULT}"),
    **rules("mkldnn::_convolution_pointwise mkldnn::_convolution_pointwise_", reordered, f"X W {RESULT}"),
    **rules("mkldnn::_convolution_transpose_pointwise", lambda x, w: reordered(x, w, x), "X W"),
    **rules("torchvision::deform_conv2d", plain, f"weight {RESULT}", estimate=_DEFORMED),
    **rules(
        "torchvision::_deform_conv2d_backward",
        lambda grad, weight: 2 * plain(weight, grad),
        "grad weight",
        estimate=_DEFORMED,
    ),
}
