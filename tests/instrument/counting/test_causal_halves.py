"""``causal_attention="half"``: the same model FLOPs under every backend, the same hardware FLOPs as with ``"full"``."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.instrument.counting.flop_counter import CausalAttention, FlopCounter

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


@pytest.mark.parametrize(("backend", "repeated"), [(SDPBackend.MATH, 0), (SDPBackend.FLASH_ATTENTION, PRODUCT)])
def test_half_is_half_under_every_backend_and_what_is_executed_stays(backend: SDPBackend, repeated: int) -> None:
    full, half = (counted(backend, setting, inputs()) for setting in ("full", "half"))
    assert (full.forward, full.backward, full.recompute) == (2 * PRODUCT, 4 * PRODUCT, repeated)
    assert (half.forward, half.backward, half.recompute) == (PRODUCT, 2 * PRODUCT, repeated // 2)
    executed = 6 * PRODUCT if backend is SDPBackend.MATH else 7 * (PRODUCT - SKIPPED)
    assert full.hardware_flops == half.hardware_flops == executed


def test_with_dropout_only_separate_products_will_do_and_they_count_half_too() -> None:
    half = counted(SDPBackend.MATH, "half", inputs(), dropout_p=0.1)
    assert (half.forward, half.backward, half.hardware_flops) == (PRODUCT, 2 * PRODUCT, 6 * PRODUCT)


def test_query_heads_that_share_keys_count_half_too() -> None:
    query, key, value = inputs()
    half = counted(SDPBackend.MATH, "half", [query, key[:, :1], value[:, :1]], enable_gqa=True)
    assert (half.forward, half.backward) == (PRODUCT, 2 * PRODUCT)


def test_bfloat16_that_is_computed_in_float32_counts_half_too() -> None:
    half = counted(SDPBackend.MATH, "half", inputs(dtype=torch.bfloat16))
    assert (half.forward, half.backward) == (PRODUCT, 2 * PRODUCT)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_half_without_grad_is_half(context: Any) -> None:
    with FlopCounter(None, causal_attention="half") as counter, sdpa_kernel(SDPBackend.MATH), context():
        attend(inputs())
    assert FlopCounts(counter.record()).forward == PRODUCT


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_what_a_checkpoint_repeats_of_the_math_backend_counts_half(use_reentrant: bool) -> None:
    def block(query: Tensor, key: Tensor, value: Tensor) -> Any:
        return torch.sigmoid(attend([query, key, value]))

    with FlopCounter(None, causal_attention="half") as counter, sdpa_kernel(SDPBackend.MATH):
        checkpoint(block, *inputs(), use_reentrant=use_reentrant).sum().backward()
    counts = FlopCounts(counter.record())
    assert (counts.forward, counts.backward, counts.recompute) == (PRODUCT, 2 * PRODUCT, PRODUCT)
    assert counts.hardware_flops == 2 * (PRODUCT + 2 * PRODUCT + PRODUCT)


def test_products_around_a_causal_call_count_full() -> None:
    square = [torch.randn(BATCH, HEADS, 8, 8, requires_grad=True) for _ in range(3)]
    product = 2 * BATCH * HEADS * 8 * 8 * 8
    with FlopCounter(None, causal_attention="half") as counter, sdpa_kernel(SDPBackend.MATH):
        mixed = attend([square[0] @ square[1], square[1], square[2]])
        (mixed @ square[2]).sum().backward()
    counts = FlopCounts(counter.record())
    assert (counts.forward, counts.backward) == (2 * product + product, 2 * 2 * product + 2 * product)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_mask_that_the_caller_made_is_no_flag(backend: SDPBackend) -> None:
    with FlopCounter(None, causal_attention="half") as counter, sdpa_kernel(backend):
        query, key, value = inputs()
        query = query * 2.0
        mask = torch.ones(QUERIES, KEYS, dtype=torch.bool).tril()
        attend([query, key, value], attn_mask=mask, is_causal=False).sum().backward()
    counts = FlopCounts(counter.record())
    assert (counts.forward, counts.backward) == (2 * PRODUCT, 4 * PRODUCT)


def test_a_thread_of_its_own_counts_half_too() -> None:
    counter = FlopCounter(None, causal_attention="half")

    def work() -> None:
        with counter:
            attend(inputs()).sum().backward()

    threads = [threading.Thread(target=work) for _ in range(2)]
    with sdpa_kernel(
        SDPBackend.MATH
    ):  # for the whole process: threads that choose and put back would disturb each other
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counts = FlopCounts(counter.record())
    assert (counts.forward, counts.backward) == (2 * PRODUCT, 2 * 2 * PRODUCT)


def test_compiled_separate_products_count_full_forward_and_backward() -> None:
    torch._dynamo.reset()
    compiled: Any = torch.compile(lambda *tensors: attend(list(tensors)), backend="aot_eager")
    tensors = inputs()
    with sdpa_kernel(SDPBackend.MATH):
        compiled(*tensors).sum().backward()
        with FlopCounter(None, causal_attention="half") as counter:
            compiled(*tensors).sum().backward()
    counts = FlopCounts(counter.record())
    assert (counts.forward, counts.backward) == (2 * PRODUCT, 4 * PRODUCT)
