"""Operators that libraries and torch's Python code register: a dispatch mode does not see what runs inside them.

Found by name, so none of these libraries is needed; an operator whose schema has changed is listed as uncounted.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from lightning_flops.instrument.counting.formulas.attention import Call, flash, kernel_rules
from lightning_flops.instrument.counting.formulas.contract import RESULT, Rule, Unreadable, Work, no_flops
from lightning_flops.instrument.counting.formulas.convolution import deformable_backward, plain
from lightning_flops.instrument.counting.formulas.matmul import grouped_product, linear, product


def grouped_backward(values: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> int | Work:
    """Gradients of a grouped product's rows and of its weights: one forward each."""
    return grouped_product(values, weight, offsets, times=2)


def gathered_products(values: torch.Tensor, weights: Sequence[torch.Tensor], out: Any) -> int:
    """An all-gather of rows fused with their products: *out* ends with the list of products."""
    return sum(2 * made.numel() * int(weight.shape[0]) for made, weight in zip(out[-1], weights, strict=True))


def scattered_product(values: torch.Tensor, weight: torch.Tensor) -> int:
    """A product fused with a reduce-scatter of its result: this rank computes all of it."""
    return 2 * prod(values.shape[:-1]) * weight.numel()


def variable_length(
    query: torch.Tensor,
    key: torch.Tensor,
    query_offsets: torch.Tensor,
    key_offsets: torch.Tensor | None,
    causal: bool,
    window: Sequence[int] | None,
    used: torch.Tensor | None,
    block_table: torch.Tensor | None,
) -> Call:
    """``torch.nn.attention.varlen.varlen_attn``: packed sequences."""
    left, right = (None, None) if window is None else window
    return flash(query, key, query_offsets, key_offsets, causal, left, right, used, block_table)


def dense_flash(query: torch.Tensor, key: torch.Tensor, causal: bool, left: int | None, right: int | None) -> Call:
    """The flash-attn package's: (batch, sequence, heads, size)."""
    return flash(query, key, None, None, causal, left, right)


_NEIGHBOURS = 4


def pooled_samples(sampling_ratio: int, pooled: torch.Tensor) -> int:
    """``roi_align`` of *pooled* bins, or its backward: each averages ratio² points, each of four neighbours."""
    if sampling_ratio <= 0:
        raise Unreadable("how many points it samples in a bin follows from the boxes' sizes")
    return 2 * _NEIGHBOURS * sampling_ratio**2 * pooled.numel()


_FREE = """
    bitsandbytes::dequantize_4bit bitsandbytes::dequantize_blockwise bitsandbytes::int8_double_quant
    bitsandbytes::int8_mm_dequant bitsandbytes::int8_vectorwise_dequant bitsandbytes::int8_vectorwise_quant
    bitsandbytes::optimizer_update_32bit bitsandbytes::optimizer_update_8bit_blockwise bitsandbytes::quantize_4bit
    bitsandbytes::quantize_blockwise deepspeed::dim_zero_all_to_all torchvision::_ps_roi_pool_backward
    torchvision::_roi_pool_backward torchvision::nms torchvision::ps_roi_pool torchvision::roi_pool
"""
"""Operators that people have read: they convert, compare, pool, update parameters or communicate."""

_FLASH_WINDOW = ("causal", "window_size_left?", "window_size_right?")
_POOLED = "a multiply-add for each of the four neighbours of each sampled point"
_SAMPLING_LEFT_OUT = "the convolution's products; sampling the input at the offsets is left out"

LIBRARY_RULES: dict[str, Rule] = {
    **{name: Rule(no_flops) for name in _FREE.split()},
    **kernel_rules(
        ("torch_attn::_varlen_attn", "torch_attn::_varlen_attn_out"),
        ("torch_attn::_varlen_attn_backward",),
        variable_length,
        ("cu_seq_q", "cu_seq_k", "is_causal", "window_size?", "seqused_k?", "block_table?"),
    ),
    "symm_mem::fused_all_gather_matmul": Rule(gathered_products, ("A", "Bs", RESULT), "A"),
    "symm_mem::fused_all_gather_scaled_matmul": Rule(gathered_products, ("A", "Bs", RESULT), "A"),
    "symm_mem::fused_matmul_reduce_scatter": Rule(scattered_product, ("A", "B"), "A"),
    "symm_mem::fused_scaled_matmul_reduce_scatter": Rule(scattered_product, ("A", "B"), "A"),
    "symm_mem::_async_input_mm": Rule(product, ("a", "b"), "a"),
    "transformers::grouped_mm_fallback": Rule(grouped_product, ("input", "weight", "offs"), "input"),
    "transformers::grouped_mm_fallback_backward": Rule(grouped_backward, ("input", "weight", "offs"), "grad_output"),
    **kernel_rules(
        ("flash_attn::_flash_attn_forward",),
        ("flash_attn::_flash_attn_backward",),
        dense_flash,
        _FLASH_WINDOW,
        ("q", "k", "v"),
    ),
    **kernel_rules(
        ("flash_attn::_flash_attn_varlen_forward",),
        ("flash_attn::_flash_attn_varlen_backward",),
        flash,
        ("cu_seqlens_q", "cu_seqlens_k", *_FLASH_WINDOW, "seqused_k?", "block_table?"),
        ("q", "k", "v"),
    ),
    "torchvision::roi_align": Rule(pooled_samples, ("sampling_ratio", RESULT), "input", _POOLED),
    "torchvision::_roi_align_backward": Rule(pooled_samples, ("sampling_ratio", "grad"), "grad", _POOLED),
    "torchvision::deform_conv2d": Rule(plain, ("weight", RESULT), "input", _SAMPLING_LEFT_OUT),
    "torchvision::_deform_conv2d_backward": Rule(deformable_backward, ("grad", "weight"), "grad", _SAMPLING_LEFT_OUT),
    "bitsandbytes::int8_linear_matmul": Rule(linear, ("A", "B"), "A"),
    "bitsandbytes::int8_scaled_mm": Rule(linear, ("A", "B"), "A"),
    "bitsandbytes::int8_mixed_scaled_mm": Rule(linear, ("A", "CB"), "A"),
    "bitsandbytes::gemv_4bit": Rule(lambda values, shape: 2 * values.numel() * shape[0], ("A", "shapeB"), "A"),
}
