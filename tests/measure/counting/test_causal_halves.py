"""``causal_attention="half"``: half of a fused kernel, and the hardware FLOPs of ``"full"``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.measure.counting.flop_counter import CausalAttention, FlopCounter

BATCH, HEADS, QUERIES, KEYS, SIZE = 2, 3, 6, 8, 4
PRODUCT = 2 * BATCH * HEADS * QUERIES * KEYS * SIZE
SKIPPED = 2 * BATCH * HEADS * (7 + 6 + 5 + 4 + 3 + 2) * SIZE  # query i sees keys 0 to i, of 8


def inputs(**options: Any) -> list[Tensor]:
    """Queries, keys and values that need gradients."""
    return [torch.randn(BATCH, HEADS, length, SIZE, requires_grad=True, **options) for length in (QUERIES, KEYS, KEYS)]


def attend(tensors: list[Tensor], **options: Any) -> Any:
    """Attention with the causal flag, unless *options* say otherwise."""
    query, key, value = tensors
    return scaled_dot_product_attention(query, key, value, **{"is_causal": True, **options})


def counted(backend: SDPBackend, setting: CausalAttention, tensors: list[Tensor], **options: Any) -> FlopCounts:
    """One forward and backward of causal attention."""
    with FlopCounter(None, causal_attention=setting) as counter, sdpa_kernel(backend):
        attend(tensors, **options).sum().backward()
    return FlopCounts(counter.record())


def test_half_is_half_of_a_fused_kernel_and_what_is_executed_stays() -> None:
    full, half = (counted(SDPBackend.FLASH_ATTENTION, setting, inputs()) for setting in ("full", "half"))
    assert (full.forward, full.backward, full.recompute) == (2 * PRODUCT, 4 * PRODUCT, PRODUCT)
    assert (half.forward, half.backward, half.recompute) == (PRODUCT, 2 * PRODUCT, PRODUCT // 2)
    assert full.hardware_flops == half.hardware_flops == 7 * (PRODUCT - SKIPPED)


def test_separate_products_do_not_show_the_flag_and_count_full() -> None:
    half = counted(SDPBackend.MATH, "half", inputs())
    assert (half.forward, half.backward, half.hardware_flops) == (2 * PRODUCT, 4 * PRODUCT, 6 * PRODUCT)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_mask_that_the_caller_made_is_no_flag(backend: SDPBackend) -> None:
    with FlopCounter(None, causal_attention="half") as counter, sdpa_kernel(backend):
        query, key, value = inputs()
        query = query * 2.0
        mask = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()
        attend([query, key, value], attn_mask=mask, is_causal=False).sum().backward()
    counts = FlopCounts(counter.record())
    assert (counts.forward, counts.backward) == (2 * PRODUCT, 4 * PRODUCT)
