"""Attention: two products forward, four backward, one repeated; what masks leave out counted entry by entry."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop, flex_attention_backward
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_flops import count_flops
from lightning_flops.analysis.counts import FlopCounts
from lightning_flops.measure.counting.flop_counter import CausalAttention, FlopCounter
from lightning_flops.measure.counting.formulas.contract import Unreadable, Work
from lightning_flops.measure.counting.formulas.registry import lookup
from tests.measure.counting.recording import Call, meta, total_flops, work_by_name, work_of

# 2 samples, 4 heads, 6 queries, 10 keys, head size 8, value head size 16
QUERY, KEY, VALUE = (2, 4, 6, 8), (2, 4, 10, 8), (2, 4, 10, 16)
SCORES = 2 * 4 * 6 * 10
FORWARD = 2 * SCORES * (8 + 16)
BACKWARD = 2 * SCORES * (8 + 8 + 16 + 16)
REPEATED = 2 * SCORES * 8
# Query i (from 0) sees keys 0 to i.
SEEN = 2 * 4 * (1 + 2 + 3 + 4 + 5 + 6)
SKIPPED = SCORES - SEEN
# Lined up at the last query and key, query i sees keys 0 to i + 4.
SEEN_FROM_THE_END = 2 * 4 * (5 + 6 + 7 + 8 + 9 + 10)


Q, K, V = meta(*QUERY), meta(*KEY), meta(*VALUE)
HEADS_FIRST = {"query": Q, "key": K, "value": V}
SEQUENCE_FIRST = {name: one.transpose(1, 2) for name, one in HEADS_FIRST.items()}
# Packed: two sequences of 2 and 3 queries with 4 and 5 keys; 4 heads of 8
QUERIES_END, KEYS_END = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 9])
PACKED = {"query": meta(5, 4, 8), "key": meta(9, 4, 8), "value": meta(9, 4, 8)}
FLASH_PACKED = {**PACKED, "cum_seq_q": QUERIES_END, "cum_seq_k": KEYS_END, "is_causal": False}
ENTRIES = 4 * (2 * 4 + 3 * 5)
SQUARE = {name: meta(5, 4, 8) for name in ("query", "key", "value")}
# 5 queries and keys; each query sees itself and the two keys before it: 1 + 2 + 3 + 3 + 3 of 25.
FIVE = {name: meta(1, 5, 1, 4) for name in ("query", "key", "value")}
FROM_THE_END = 2 * (SCORES - SEEN_FROM_THE_END) * (8 + 16)

FUSED = [
    f"aten::_scaled_dot_product_{name}"
    for name in (
        "flash_attention_for_cpu flash_attention efficient_attention cudnn_attention fused_attention_overrideable"
    ).split()
]

CALLS = {
    **{name: Call(Work(FORWARD), **HEADS_FIRST, is_causal=False) for name in FUSED},
    **{
        f"{name},causal": Call(Work(FORWARD, skipped=2 * SKIPPED * 24, causal=True), **HEADS_FIRST, is_causal=True)
        for name in FUSED
    },
    **{f"{name}_backward": Call(Work(BACKWARD, REPEATED), **HEADS_FIRST, is_causal=False) for name in FUSED},
    **{
        f"{name}_backward,causal": Call(
            Work(BACKWARD, REPEATED, 2 * SKIPPED * (8 + 8 + 16 + 16 + 8), True), **HEADS_FIRST, is_causal=True
        )
        for name in FUSED
    },
    # Packed operands have the sequence first, others the heads.
    "aten::_cudnn_attention_forward,causal": Call(
        Work(FORWARD, 0, 2 * SKIPPED * 24, True), **HEADS_FIRST, is_causal=True
    ),
    "aten::_cudnn_attention_backward": Call(Work(BACKWARD, REPEATED), **HEADS_FIRST, is_causal=False),
    "aten::_cudnn_attention_forward,packed": Call(Work(32 * ENTRIES, by_values=True), **FLASH_PACKED),
    "aten::_flash_attention_forward": Call(Work(FORWARD), **SEQUENCE_FIRST, is_causal=False),
    # Its causal mask lines the last query up with the last key.
    "aten::_flash_attention_forward,causal": Call(
        Work(FORWARD, 0, FROM_THE_END, True), **SEQUENCE_FIRST, is_causal=True
    ),
    "aten::_flash_attention_backward": Call(Work(BACKWARD, REPEATED), **SEQUENCE_FIRST, is_causal=False),
    "aten::_efficient_attention_forward": Call(Work(FORWARD), **SEQUENCE_FIRST, custom_mask_type=0),
    "aten::_efficient_attention_forward,1": Call(
        Work(FORWARD, 0, 2 * SKIPPED * 24, True), **SEQUENCE_FIRST, custom_mask_type=1
    ),
    "aten::_efficient_attention_forward,2": Call(
        Work(FORWARD, 0, FROM_THE_END, True), **SEQUENCE_FIRST, custom_mask_type=2
    ),
    "aten::_efficient_attention_backward": Call(Work(BACKWARD, REPEATED), **SEQUENCE_FIRST, custom_mask_type=0),
    "aten::_flash_attention_forward,packed": Call(Work(32 * ENTRIES, by_values=True), **FLASH_PACKED),
    "aten::_flash_attention_backward,packed": Call(Work(64 * ENTRIES, 16 * ENTRIES, by_values=True), **FLASH_PACKED),
    "aten::_efficient_attention_forward,packed": Call(
        Work(32 * ENTRIES, by_values=True),
        **{name: one[None] for name, one in PACKED.items()},
        cu_seqlens_q=QUERIES_END,
        cu_seqlens_k=KEYS_END,
        custom_mask_type=0,
    ),
    "aten::_flash_attention_forward,packed and causal": Call(
        Work(32 * 4 * (4 + 9), 0, 32 * 4 * (1 + 3), causal=True, by_values=True),
        **SQUARE,
        cum_seq_q=QUERIES_END,
        cum_seq_k=QUERIES_END,
        is_causal=True,
    ),
    "aten::_flash_attention_forward,window": Call(
        Work(16 * 25, 0, 16 * (25 - 12), True), **FIVE, is_causal=True, window_size_left=2, window_size_right=0
    ),
    "aten::_efficient_attention_forward,window": Call(
        Work(16 * 25, 0, 16 * (25 - 12), True), **FIVE, custom_mask_type=1, window_size=3
    ),
    # One key on either side: 2 + 3 + 3 + 3 + 2.
    "aten::_flash_attention_forward,both sides": Call(
        Work(16 * 25, 0, 16 * (25 - 13)), **FIVE, is_causal=False, window_size_left=1, window_size_right=1
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_fused_kernel_counts_the_full_score_matrix_and_what_its_mask_leaves_out(name: str) -> None:
    assert work_by_name(name, CALLS[name]) == CALLS[name].cost


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (3, 8), (8, 3), (1, 7), (7, 1)])
@pytest.mark.parametrize("left", [None, 0, 1, 4, 20])
@pytest.mark.parametrize("right", [None, 0, 2, 20])
def test_what_a_mask_rules_out_equals_the_entries_of_the_mask_itself(
    queries: int, keys: int, left: int | None, right: int | None
) -> None:
    shift = keys - queries
    visible = sum(
        (left is None or key >= query + shift - left) and (right is None or key <= query + shift + right)
        for query in range(queries)
        for key in range(keys)
    )
    q, k = meta(1, queries, 1, 4), meta(1, keys, 1, 4)
    bounds: dict[str, Any] = {"window_size_left": left, "window_size_right": right}
    work = work_of("aten::_flash_attention_forward", q, k, k, None, None, queries, keys, 0.0, False, False, **bounds)
    assert work.skipped == 16 * (queries * keys - visible)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_attention_counts_each_samples_scores() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    with torch.no_grad():
        assert total_flops(lambda: F.scaled_dot_product_attention(nested, nested, nested)) == 4 * 2 * (9 + 25) * 4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_cuts_blocks_at_the_end_of_the_sequences() -> None:
    # Rows of 64, 64, 64, 64 and 44; each keeps its own block and the one before it.
    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < 64)

    mask = create_block_mask(near, None, None, 300, 300, device="cpu", BLOCK_SIZE=64)
    q = torch.randn(2, 2, 300, 16)
    kept = 64 * 64 + 3 * 64 * 128 + 44 * (64 + 44)
    with count_flops() as counts:
        flex_attention(q, q, q, block_mask=mask)
    assert (counts.forward, counts.skipped) == (64 * (2 * 2) * 300 * 300, 64 * (2 * 2) * (300 * 300 - kept))


def test_a_flex_backward_counts_four_products_and_repeats_one() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    q = meta(1, 2, 256, 16)
    args: tuple[Any, ...] = (q, q, q, q, meta(1, 2, 256), q, None, None, None, mask.as_tuple(), 1.0, {})
    entries, skipped = 2 * 256 * 256, 2 * 128 * 128
    work = lookup(flex_attention_backward).compute(args, {}, None)
    assert work == Work(128 * entries, 32 * entries, 160 * skipped)


def test_block_masks_without_values_cannot_be_counted() -> None:
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu").as_tuple()
    on_meta = tuple(part.to("meta") if isinstance(part, torch.Tensor) else part for part in mask)
    q = meta(1, 2, 256, 16)
    with pytest.raises(Unreadable):
        lookup(flex_attention_hop).compute((q, q, q, None, on_meta), {}, None)


# causal_attention="half": half of a fused kernel, and the hardware FLOPs of "full"
BATCH, HEADS, QUERIES, KEYS, SIZE = 2, 3, 6, 8, 4
PRODUCT = 2 * BATCH * HEADS * QUERIES * KEYS * SIZE
NOT_RUN = 2 * BATCH * HEADS * (7 + 6 + 5 + 4 + 3 + 2) * SIZE  # query i sees keys 0 to i, of 8


def counted(backend: SDPBackend, setting: CausalAttention, mask: torch.Tensor | None = None) -> FlopCounts:
    """One forward and backward of attention with the causal flag, or with a *mask* in its place."""
    lengths = (QUERIES, KEYS, KEYS)
    query, key, value = (torch.randn(BATCH, HEADS, length, SIZE, requires_grad=True) for length in lengths)
    with FlopCounter(None, causal_attention=setting) as counter, sdpa_kernel(backend):
        F.scaled_dot_product_attention(query, key, value, mask, is_causal=mask is None).sum().backward()  # type: ignore[no-untyped-call]
    return FlopCounts(counter.record())


def test_half_is_half_of_a_fused_kernel_and_what_is_executed_stays() -> None:
    full, half = (counted(SDPBackend.FLASH_ATTENTION, setting) for setting in ("full", "half"))
    assert (full.forward, full.backward, full.recompute) == (2 * PRODUCT, 4 * PRODUCT, PRODUCT)
    assert (half.forward, half.backward, half.recompute) == (PRODUCT, 2 * PRODUCT, PRODUCT // 2)
    assert [one.hardware_flops - one.skipped for one in (full, half)] == [7 * (PRODUCT - NOT_RUN)] * 2
    assert (full.hardware_flops, half.hardware_flops) == (7 * PRODUCT, 3 * PRODUCT + PRODUCT // 2)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
@pytest.mark.parametrize(("asking", "products"), [("query", 2), ("key", 2), ("value", 1), ("query key", 3)])
def test_gradients_that_nobody_asked_for_are_no_model_flops(backend: SDPBackend, asking: str, products: int) -> None:
    """The value's gradient is one product, the scores' another, each of query's and key's one more.

    The fused kernel runs four, and repeats the scores.
    """
    operands: dict[str, Any] = {name: torch.randn(BATCH, HEADS, 5, SIZE) for name in ("query", "key", "value")}
    for name in asking.split():
        operands[name].requires_grad_()
    product = 2 * BATCH * HEADS * 5 * 5 * SIZE
    with FlopCounter(None) as counter, sdpa_kernel(backend):
        F.scaled_dot_product_attention(**operands).sum().backward()  # type: ignore[no-untyped-call]
    total = FlopCounts(counter.record()).total
    assert (total.forward, total.backward) == (2 * product, products * product)
    assert total.recompute == (0 if backend == SDPBackend.MATH else 5 - products) * product


def test_separate_products_do_not_show_the_flag_and_count_full() -> None:
    half = counted(SDPBackend.MATH, "half")
    assert (half.forward, half.backward, half.hardware_flops) == (2 * PRODUCT, 4 * PRODUCT, 6 * PRODUCT)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_mask_that_the_caller_made_is_no_flag(backend: SDPBackend) -> None:
    counts = counted(backend, "half", torch.ones(QUERIES, KEYS, dtype=torch.bool).tril())
    assert (counts.forward, counts.backward) == (2 * PRODUCT, 4 * PRODUCT)
