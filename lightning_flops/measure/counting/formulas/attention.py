"""Attention: every fused kernel, forward and backward, and the fused transformer layers.

With H query heads, Sq queries, Sk keys, head size D and value head size Dv, a forward is two products over the full
score matrix, 2·B·H·Sq·Sk·(D + Dv) FLOPs. A backward is four: those for V and the scores' gradient (Dv each), for Q and
K (D each). A fused kernel runs all of them and repeats Q·Kᵀ; this, and what is not asked for, is ``Work.recompute``:
model FLOPs are the same under every backend. What a causal mask, a sliding window or a block mask rules out is
``Work.skipped``.

Sizes are the kernel's: before its CUDA flash kernel torch pads head sizes to a multiple of 8, and the padding counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, zip_longest
from math import prod
from typing import Any, TypeGuard

import numpy
from torch import Tensor, arange, int64

from lightning_flops.measure.counting.formulas.contract import (
    RESULT,
    Arguments,
    Formula,
    Keywords,
    Rule,
    Unreadable,
    Work,
    host_integers,
    rules,
)
from lightning_flops.measure.counting.formulas.products import rows_of, sizes_of
from lightning_flops.measure.torch_private.needed import current_node, modes_off

_NODES = re.compile(r"(ScaledDotProduct|Flash|Efficient|Cudnn)\w*Attention\w*Backward\d")
_TOP_LEFT, _BOTTOM_RIGHT = 1, 2  # values of the memory-efficient kernels' custom_mask_type

#: Score matrices: how many heads (batch included) have each, its queries and its keys.
Matrices = Sequence[tuple[int, int, int]]


def _entries(
    matrices: Matrices,
    causal: bool,
    left: int | None = None,
    right: int | None = None,
    *,
    bottom_right: bool = False,
    by_values: bool = False,
) -> Work:
    """The entries of all score matrices, each of one FLOP, and those that the mask rules out.

    Query i sees the keys from ``i - left`` to ``i + right``; None is no bound. *bottom_right*: the last query lines up
    with the last key; else the first with the first.
    """
    entries = sum(map(prod, matrices))
    seen = sum(
        heads * _seen(queries, keys, left, right, keys - queries if bottom_right else 0)
        for heads, queries, keys in matrices
    )
    return Work(entries, skipped=entries - seen, causal=bool(causal), by_values=by_values)


def _seen(queries: int, keys: int, left: int | None, right: int | None, shift: int) -> int:
    """Entries of one score matrix that a window leaves, whose query 0 stands at key *shift*."""
    if left is None and right is None:
        return queries * keys
    at = numpy.arange(shift, shift + queries)
    begins = numpy.clip(at - (keys + queries if left is None else left), 0, keys)
    ends = numpy.clip(at + (keys + queries if right is None else right) + 1, 0, keys)
    return int((ends - begins).sum())


def _work(entries: Work, head_size: int, value_size: int, out: Any, *, is_backward: bool) -> Work:
    """FLOPs of two products over each score matrix; of a backward's four, and of the scores that it computes again.

    *entries* are the entries of all score matrices, and those that the mask rules out; *out* is the kernel's result.
    """
    # FLOPs by entry of a score matrix: of the gradients that are asked for, and of all that the kernel executes.
    asked = executed = 2 * (head_size + value_size)
    if is_backward:
        query, key, value, *bias = _gradients_asked_for(out)
        # The gradient of the scores, which all but that of the values need, is a product itself.
        asked = 2 * (value_size * (value + max(query, key, *bias)) + head_size * (query + key))
        executed = 4 * (head_size + value_size) + 2 * head_size
    return entries._replace(
        flops=asked * entries.flops,
        recompute=(executed - asked) * entries.flops,
        skipped=executed * entries.skipped,
    )


def _gradients_asked_for(out: Any) -> list[bool]:
    """Whether gradients of query, key, value and what follows are asked for.

    Torch's own node, if it runs the kernel, says so; else what is there of *out*: of a compiled graph what it reads.
    """
    node = current_node()
    if node is not None and _NODES.fullmatch(node.name()) is not None:
        return [edge is not None for edge, _ in node.next_functions]
    return [one is not None for one, _ in zip_longest(out, range(3))] if isinstance(out, tuple) else [True] * 3


def heads_first(query: Tensor, key: Tensor) -> Matrices:
    """Score matrices of (…, heads, sequence, head size) operands; nested ones give one for each sample."""
    return [(prod(q[:-2]), q[-2], k[-2]) for q, k in zip(sizes_of(query), sizes_of(key), strict=True)]


def _has_values(offsets: Tensor | None) -> TypeGuard[Tensor]:
    """Whether there are *offsets*: backwards are handed empty ones where there are none."""
    return offsets is not None and offsets.numel() > 0


def _lengths(offsets: Tensor) -> list[int]:
    return [stop - start for start, stop in pairwise(host_integers(offsets))]


def sequence_first(
    query: Tensor, key: Tensor, query_offsets: Tensor | None, key_offsets: Tensor | None, *cache: Tensor | None
) -> Matrices:
    """Score matrices of (batch, sequence, heads, head size) operands, or of packed ones with cumulative lengths."""
    if any(part is not None for part in cache):
        raise Unreadable("it reads a cache of keys, of which only a part is used")
    heads = int(query.shape[-2])
    if not _has_values(query_offsets):
        return [(prod(query.shape[:-3]) * heads, int(query.shape[-3]), int(key.shape[-3]))]
    queries = _lengths(query_offsets)
    keys = queries if key_offsets is None else _lengths(key_offsets)
    return [(heads, q, k) for q, k in zip(queries, keys, strict=True)]


def fused(query: Tensor, key: Tensor, causal: bool) -> Work:
    """Kernels behind ``scaled_dot_product_attention``: a causal mask starts at the first query and key."""
    return _entries(heads_first(query, key), causal, right=0 if causal else None)


def flash(
    query: Tensor,
    key: Tensor,
    query_offsets: Tensor | None,
    key_offsets: Tensor | None,
    causal: bool,
    left: int | None,
    right: int | None,
    *cache: Tensor | None,
    bottom_right: bool = True,
) -> Work:
    """Flash attention's kernels: sequence before heads, packed when there are offsets.

    They spell "no bound" of a window as -1 or None, and line the last query up with the last key (*bottom_right*).
    """
    left = None if left is None or left < 0 else int(left)
    right = 0 if causal else None if right is None or right < 0 else int(right)
    matrices = sequence_first(query, key, query_offsets, key_offsets, *cache)
    return _entries(matrices, causal, left, right, bottom_right=bottom_right, by_values=_has_values(query_offsets))


def _efficient(
    query: Tensor,
    key: Tensor,
    query_offsets: Tensor | None,
    key_offsets: Tensor | None,
    mask_type: int,
    size: int | None,
    *cache: Tensor | None,
) -> Work:
    """The memory-efficient kernels: sequence before heads; packed operands have a batch of one and offsets."""
    causal = mask_type in (_TOP_LEFT, _BOTTOM_RIGHT)
    # The kernel's window holds the query's own key and those before it.
    left = (size or 0) - 1 if causal else None
    offsets, is_last = (query_offsets, key_offsets), mask_type == _BOTTOM_RIGHT
    return flash(query, key, *offsets, causal, left, None, *cache, bottom_right=is_last)


def _entries_in_blocks(counts: Tensor, columns: Tensor, lengths: tuple[int, int], block: tuple[int, int]) -> int:
    """Entries of the blocks that each row of blocks lists, cut where the sequences end."""
    (queries, keys), (tall, wide) = lengths, block
    with modes_off():
        listed = arange(columns.shape[-1], device=columns.device) < counts.unsqueeze(-1)
        widths = (keys - columns * wide).clamp(0, wide) * listed
        heights = (queries - arange(counts.shape[-1], device=counts.device) * tall).clamp(0, tall)
        # 64 bits: a long sequence's entries outgrow 32.
        entries = (widths.sum(-1, dtype=int64) * heights).sum()
    return host_integers(entries)[0]


def _flex(is_backward: bool, args: Arguments, kwargs: Keywords, out: Any) -> Work:
    """``flex_attention(query, key, value, score_mod, block_mask, …)``, or its backward, with the mask elsewhere.

    The kernel skips the blocks that the mask does not keep. ``BlockMask.as_tuple()`` is (queries, keys, kept blocks per
    row, their columns, full blocks per row, their columns, …, block rows, block columns, mask function); the counts are
    (batch or 1, heads or 1, rows of blocks).
    """
    (query, key, value), block_mask = args[:3], args[9 if is_backward else 4]
    heads, lengths = prod(query.shape[:-2]), (int(query.shape[-2]), int(key.shape[-2]))
    counts, columns, full, full_columns = block_mask[2:6]
    block = int(block_mask[-3]), int(block_mask[-2])
    entries = kept = heads * prod(lengths)
    if counts is not None and not (block[0] >= lengths[0] and block[1] >= lengths[1]):
        listed = [(counts, columns), (full, full_columns)]
        kept = sum(_entries_in_blocks(*each, lengths, block) for each in listed if each[0] is not None)
        kept *= heads // max(prod(counts.shape[:-1]), 1)
    return _work(
        Work(entries, skipped=entries - kept), int(query.shape[-1]), int(value.shape[-1]), out, is_backward=is_backward
    )


def native_multi_head(query: Tensor, key: Tensor, value: Tensor, qkv_weight: Tensor, out_weight: Tensor) -> int:
    """``_native_multi_head_attention``: input projections, attention, output projection.

    Nested samples are projected as they are; their scores are computed over the longest sample's length.
    """
    size = int(qkv_weight.shape[1])
    projections = 2 * (rows_of(query) + rows_of(key) + rows_of(value)) * size * (int(qkv_weight.shape[0]) // 3)
    queries, keys = sizes_of(query), sizes_of(key)
    samples = len(queries) if query.is_nested else queries[0][0]
    scores = samples * max(shape[-2] for shape in queries) * max(shape[-2] for shape in keys)
    return projections + 4 * scores * size + 2 * rows_of(query) * out_weight.numel()


def encoder_layer(source: Tensor, qkv_weight: Tensor, out_weight: Tensor, *feed_forward: Tensor) -> int:
    """``_transformer_encoder_layer_fwd``: self-attention and the two linear layers behind it."""
    attention = native_multi_head(source, source, source, qkv_weight, out_weight)
    return attention + 2 * rows_of(source) * sum(weight.numel() for weight in feed_forward)


def _kernel(
    names: str, read: Callable[..., Work], arguments: str, operands: str = "query key value"
) -> dict[str, Rule]:
    """Rules of a fused kernel's operators, of which *read* says alike what query, key and *arguments* multiply.

    Those with ``backward`` in their names run it backward. *operands* are the schema names of query, key and value.
    """
    found: dict[str, Rule] = {}
    for name in names.split():
        found |= rules(name, partial(_kernel_work, "backward" in name, read), f"{operands} {RESULT} {arguments}")
    return found


def _kernel_work(
    is_backward: bool, read: Callable[..., Work], query: Tensor, key: Tensor, value: Tensor, out: Any, *rest: Any
) -> Work:
    return _work(read(query, key, *rest), sizes_of(query)[0][-1], sizes_of(value)[0][-1], out, is_backward=is_backward)


_WINDOW = "window_size_left? window_size_right?"
_CACHE = "seqused_k? block_table?"

ATTENTION_RULES: dict[str, Rule] = {
    **_kernel(
        " ".join(
            f"_scaled_dot_product_{kernel}{direction}"
            for kernel in "flash_attention_for_cpu flash_attention efficient_attention cudnn_attention "
            "fused_attention_overrideable".split()
            for direction in ("", "_backward")
        ),
        fused,
        "is_causal",
    ),
    # Separate products, called as one operator: nothing is skipped.
    **_kernel(
        "_scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps",
        lambda query, key, causal: _entries(heads_first(query, key), causal),
        "is_causal",
    ),
    **_kernel(
        "_flash_attention_forward _flash_attention_forward_no_dropout_inplace _flash_attention_backward",
        flash,
        f"cum_seq_q cum_seq_k is_causal {_WINDOW} {_CACHE}",
    ),
    **_kernel(
        "_efficient_attention_forward _efficient_attention_backward",
        _efficient,
        "cu_seqlens_q cu_seqlens_k custom_mask_type window_size? seqlen_k?",
    ),
    # Heads first, as the fused operators, unless they are packed; so a causal mask starts at the first query and key.
    **_kernel(
        "_cudnn_attention_forward _cudnn_attention_backward",
        lambda query, key, starts, stops, causal: _entries(
            sequence_first(query, key, starts, stops) if _has_values(starts) else heads_first(query, key),
            causal,
            right=0 if causal else None,
            by_values=_has_values(starts),
        ),
        "cum_seq_q cum_seq_k is_causal",
    ),
    **_kernel(
        "torch_attn::_varlen_attn torch_attn::_varlen_attn_out torch_attn::_varlen_attn_backward",
        lambda query, key, starts, stops, causal, window, *cache: flash(
            query, key, starts, stops, causal, *(window or (None, None)), *cache
        ),
        f"cu_seq_q cu_seq_k is_causal window_size? {_CACHE}",
    ),
    **_kernel(
        "flash_attn::_flash_attn_forward flash_attn::_flash_attn_backward",
        lambda query, key, *mask: flash(query, key, None, None, *mask),
        f"causal {_WINDOW}",
        "q k v",
    ),
    **_kernel(
        "flash_attn::_flash_attn_varlen_forward flash_attn::_flash_attn_varlen_backward",
        flash,
        f"cu_seqlens_q cu_seqlens_k causal {_WINDOW} {_CACHE}",
        "q k v",
    ),
    **rules("_native_multi_head_attention", native_multi_head, "query key value qkv_weight proj_weight"),
    **rules("_transformer_encoder_layer_fwd", encoder_layer, "src qkv_weight proj_weight ffn_weight_1 ffn_weight_2"),
}

HIGHER_ORDER_FORMULAS: dict[str, Formula] = {
    "flex_attention": partial(_flex, False),
    "flex_attention_backward": partial(_flex, True),
}
