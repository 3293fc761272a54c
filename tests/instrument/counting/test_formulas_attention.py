"""Attention: two products forward, four backward, one repeated; what masks leave out counted entry by entry."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_attention_hop
from torch._higher_order_ops.flex_attention import flex_attention_backward
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from lightning_flops.instrument.counting.formulas import Unreadable, Work, lookup
from lightning_flops.pytorch import count_flops
from lightning_flops.records import PhaseFlops
from tests.instrument.counting.recording import meta, record, total_flops, work_of

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


def sequence_first(shape: tuple[int, int, int, int]) -> torch.Tensor:
    batch, heads, length, size = shape
    return meta(batch, length, heads, size)


HEADS_FIRST_FORWARDS = {
    # arguments between value and is_causal
    "aten::_scaled_dot_product_flash_attention_for_cpu": (0.0,),
    "aten::_scaled_dot_product_flash_attention": (0.0,),
    "aten::_scaled_dot_product_efficient_attention": (None, True, 0.0),
    "aten::_scaled_dot_product_cudnn_attention": (None, True, 0.0),
    "aten::_scaled_dot_product_fused_attention_overrideable": (None, 0.0),
}
OUT, SUM, SEED = meta(2, 4, 6, 16), meta(2, 4, 6), meta(1)
HEADS_FIRST_BACKWARDS = {
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": (OUT, SUM, 0.0),
    "aten::_scaled_dot_product_flash_attention_backward": (OUT, SUM, SEED, SEED, 6, 10, 0.0),
    "aten::_scaled_dot_product_efficient_attention_backward": (None, OUT, SUM, SEED, SEED, 0.0, [True] * 4),
    "aten::_scaled_dot_product_cudnn_attention_backward": (OUT, SUM, SEED, SEED, None, SEED, SEED, 6, 10, 0.0),
}


@pytest.mark.parametrize("name", HEADS_FIRST_FORWARDS)
def test_every_fused_forward_counts_the_full_score_matrix(name: str) -> None:
    between = HEADS_FIRST_FORWARDS[name]
    call = (meta(*QUERY), meta(*KEY), meta(*VALUE), *between)
    assert work_of(name, *call) == Work(FORWARD)
    assert work_of(name, *call, True) == Work(FORWARD, skipped=2 * SKIPPED * (8 + 16), causal=True)


@pytest.mark.parametrize("name", HEADS_FIRST_BACKWARDS)
def test_every_fused_backward_counts_four_products_and_repeats_one(name: str) -> None:
    between = HEADS_FIRST_BACKWARDS[name]
    call = (OUT, meta(*QUERY), meta(*KEY), meta(*VALUE), *between)
    assert work_of(name, *call, False) == Work(BACKWARD, recompute=REPEATED)
    skipped = 2 * SKIPPED * (8 + 8 + 16 + 16 + 8)
    assert work_of(name, *call, True) == Work(BACKWARD, REPEATED, skipped, causal=True)


def test_raw_flash_attention_reads_sequence_before_heads() -> None:
    q, k, v = sequence_first(QUERY), sequence_first(KEY), sequence_first(VALUE)
    call = (q, k, v, None, None, 6, 10, 0.0)
    assert work_of("aten::_flash_attention_forward", *call, False, False) == Work(FORWARD)
    # Its causal mask lines the last query up with the last key.
    skipped = 2 * (SCORES - SEEN_FROM_THE_END) * (8 + 16)
    assert work_of("aten::_flash_attention_forward", *call, True, False) == Work(FORWARD, 0, skipped, True)
    backward = (q, q, k, v, q, SUM, meta(0), meta(0), 6, 10, 0.0, False, SEED, SEED)
    assert work_of("aten::_flash_attention_backward", *backward) == Work(BACKWARD, recompute=REPEATED)


def test_raw_efficient_attention_reads_sequence_before_heads() -> None:
    q, k, v = sequence_first(QUERY), sequence_first(KEY), sequence_first(VALUE)
    call = (q, k, v, None, None, None, None, None, 0.0)
    name = "aten::_efficient_attention_forward"
    assert work_of(name, *call, 0) == Work(FORWARD)
    assert work_of(name, *call, 1) == Work(FORWARD, 0, 2 * SKIPPED * 24, True)
    assert work_of(name, *call, 2) == Work(FORWARD, 0, 2 * (SCORES - SEEN_FROM_THE_END) * 24, True)
    backward = (q, q, k, v, None, q, None, None, 6, 10, SUM, 0.0, SEED, SEED, 0, False)
    assert work_of("aten::_efficient_attention_backward", *backward) == Work(BACKWARD, recompute=REPEATED)


def test_raw_cudnn_attention_reads_heads_first_unless_packed() -> None:
    call = (meta(*QUERY), meta(*KEY), meta(*VALUE), None, None, None, 6, 10, True)
    assert work_of("aten::_cudnn_attention_forward", *call) == Work(FORWARD)
    ends = torch.tensor([0, 2, 5])
    packed = (meta(5, 4, 8), meta(5, 4, 8), meta(5, 4, 8), None, ends, ends, 3, 3, True)
    assert work_of("aten::_cudnn_attention_forward", *packed) == Work(2 * 4 * (2 * 2 + 3 * 3) * 16, by_values=True)


def test_packed_sequences_count_their_own_lengths() -> None:
    # Two sequences of 2 and 3 queries with 4 and 5 keys; 4 heads of 8.
    queries, keys = torch.tensor([0, 2, 5]), torch.tensor([0, 4, 9])
    q, k = meta(5, 4, 8), meta(9, 4, 8)
    entries = 4 * (2 * 4 + 3 * 5)
    assert (
        work_of("aten::_flash_attention_forward", q, k, k, queries, keys, 3, 5, 0.0, False, False).flops == 32 * entries
    )
    backward = (q, q, k, k, q, SUM, queries, keys, 3, 5, 0.0, False, SEED, SEED)
    work = work_of("aten::_flash_attention_backward", *backward)
    assert work == Work(64 * entries, recompute=16 * entries, by_values=True)
    q, k = meta(1, 5, 4, 8), meta(1, 9, 4, 8)
    call = (q, k, k, None, queries, keys, 3, 5, 0.0, 0)
    assert work_of("aten::_efficient_attention_forward", *call).flops == 32 * entries


def test_a_sliding_window_is_skipped_outside_and_counted_inside() -> None:
    # 5 queries and keys; each query sees itself and the two keys before it: 1 + 2 + 3 + 3 + 3 of 25.
    q = meta(1, 5, 1, 4)
    window = {"window_size_left": 2, "window_size_right": 0}
    work = work_of("aten::_flash_attention_forward", q, q, q, None, None, 5, 5, 0.0, True, False, **window)
    assert work == Work(16 * 25, 0, 16 * (25 - 12), True)
    efficient = (q, q, q, None, None, None, None, None, 0.0, 1)
    assert work_of("aten::_efficient_attention_forward", *efficient, window_size=3).skipped == 16 * (25 - 12)
    # One key on either side: 2 + 3 + 3 + 3 + 2.
    both = {"window_size_left": 1, "window_size_right": 1}
    work = work_of("aten::_flash_attention_forward", q, q, q, None, None, 5, 5, 0.0, False, False, **both)
    assert work == Work(16 * 25, 0, 16 * (25 - 13), False)


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
def test_a_padded_encoder_counts_tokens_and_the_longest_samples_scores() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 1).eval()
    padding = torch.tensor([[False, False, False, True], [False, False, True, True]])
    tokens, longest = 3 + 2, 3
    expected = 2 * tokens * 8 * 24 + 4 * (2 * longest * longest) * 8 + 2 * tokens * 8 * 8 + 4 * tokens * 8 * 16
    with torch.no_grad():
        assert total_flops(lambda: encoder(torch.randn(2, 4, 8), src_key_padding_mask=padding)) == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_attention_counts_each_samples_scores() -> None:
    nested = torch.nested.nested_tensor([torch.randn(2, 3, 4), torch.randn(2, 5, 4)])
    with torch.no_grad():
        assert total_flops(lambda: F.scaled_dot_product_attention(nested, nested, nested)) == 4 * 2 * (9 + 25) * 4


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_counts_the_full_score_matrix_and_skips_the_blocks_that_its_mask_leaves_out() -> None:
    # 2 × 2 blocks of 128, of which a causal mask leaves out 1.
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 256, 256, device="cpu")
    q = torch.randn(1, 2, 256, 16)
    ((entry, work),) = record(lambda: flex_attention(q, q, q, block_mask=mask)).work
    assert (entry.name, work) == ("higher_order.flex_attention", Work(64 * 2 * 256 * 256, 0, 64 * 2 * 128 * 128))
    assert not entry.estimate


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_cuts_blocks_at_the_end_of_the_sequences() -> None:
    # Rows of 64, 64, 64, 64 and 44; each keeps its own block and the one before it.
    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q >= k) & (q - k < 64)

    mask = create_block_mask(near, None, None, 300, 300, device="cpu", BLOCK_SIZE=64)
    q = torch.randn(2, 2, 300, 16)
    kept = 64 * 64 + 3 * 64 * 128 + 44 * (64 + 44)
    ((_, work),) = record(lambda: flex_attention(q, q, q, block_mask=mask)).work
    assert work == Work(64 * (2 * 2) * 300 * 300, 0, 64 * (2 * 2) * (300 * 300 - kept))


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


HEADS, QUERIES, KEYS, SIZE, VALUE_SIZE = 6, 4, 8, 8, 16


def math(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value)


KERNELS: dict[str, tuple[str, Callable[..., torch.Tensor]]] = {
    "math": ("cpu", math),
    "flash for cpu": ("cpu", lambda *qkv: torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*qkv)[0]),
    "flash": ("meta", lambda *qkv: torch.ops.aten._scaled_dot_product_flash_attention(*qkv)[0]),
    "efficient": ("meta", lambda *qkv: torch.ops.aten._scaled_dot_product_efficient_attention(*qkv, None, True)[0]),
    "cudnn": ("meta", lambda *qkv: torch.ops.aten._scaled_dot_product_cudnn_attention(*qkv, None, True)[0]),
}

# Which of Q, K, V needs a gradient: the products of head size D and of value size Dv that these are
ASKED_FOR = {"q": (1, 1), "k": (1, 1), "v": (0, 1), "qk": (2, 1), "qv": (1, 2), "kv": (1, 2), "qkv": (2, 2)}


@pytest.mark.parametrize("asked", ASKED_FOR)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_backward_is_the_gradients_asked_for_under_every_kernel(kernel: str, asked: str) -> None:
    """dV is one product; dQ and dK are one each, behind that of the scores' gradient; a kernel runs all, and Q·Kᵀ."""
    device, attention = KERNELS[kernel]
    value_size = SIZE if "flash" in kernel else VALUE_SIZE  # flash kernels have one head size
    shapes = {"q": (2, 3, QUERIES, SIZE), "k": (2, 3, KEYS, SIZE), "v": (2, 3, KEYS, value_size)}
    qkv = [torch.zeros(shape, device=device, requires_grad=name in asked) for name, shape in shapes.items()]
    with count_flops(None) as counts:
        torch.autograd.backward(attention(*qkv).sum())
    of_head_size, of_value_size = ASKED_FOR[asked]
    one, one_of_values = 2 * HEADS * QUERIES * KEYS * SIZE, 2 * HEADS * QUERIES * KEYS * value_size
    backward = of_head_size * one + of_value_size * one_of_values
    everything = 3 * one + 2 * one_of_values
    assert counts.total == PhaseFlops(
        forward=one + one_of_values, backward=backward, recompute=0 if kernel == "math" else everything - backward
    )
