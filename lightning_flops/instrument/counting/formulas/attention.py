"""Attention: every fused kernel, forward and backward, and the fused transformer layers.

With H query heads, Sq queries, Sk keys, head size D and value head size Dv, a forward is two products over the full
score matrix, 2·B·H·Sq·Sk·(D + Dv) FLOPs. A backward is four: those for V and the scores' gradient (Dv each), for Q and
K (D each). A fused kernel also repeats Q·Kᵀ in its backward, which is ``Work.recompute``, so that model FLOPs are the
same under every backend. What a causal mask or a sliding window rules out is ``Work.causal_skipped``.

Where not all of Q, K and V need a gradient, a backward is what those that do need: V's is one product, Q's and K's one
each and the scores' gradient before it. Attention as separate products runs no more than that. A fused kernel runs all
five, whatever is asked for: the rest of them is ``Work.recompute`` too. Which gradients are asked for is read from the
running autograd node, in eager code and where torch's own node runs the kernel; elsewhere it is all three.

Sizes are the kernel's: before its CUDA flash kernel torch pads head sizes to a multiple of 8, and the padding counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod
from typing import Any, NamedTuple, TypeGuard

import torch

from lightning_flops.instrument.counting.formulas.contract import (
    Arguments,
    Keywords,
    Rule,
    Unreadable,
    Work,
    host_integers,
)
from lightning_flops.instrument.counting.formulas.matmul import sizes_of
from lightning_flops.instrument.torch_private.autograd import current_node
from lightning_flops.instrument.torch_private.dispatch import out_of_sight

_TOP_LEFT, _BOTTOM_RIGHT = 1, 2  # values of the memory-efficient kernels' custom_mask_type


class Scores(NamedTuple):
    """One score matrix: queries by keys, and how many heads (batch included) have it."""

    heads: int
    queries: int
    keys: int


class Window(NamedTuple):
    """Keys that query i sees: ``i + shift - left`` to ``i + shift + right``; None is no bound."""

    left: int | None
    right: int | None
    bottom_right: bool
    """The last query lines up with the last key; else the first with the first."""


def _sum_of_clamped(first: int, count: int, top: int) -> int:
    """Sum of ``min(max(first + i, 0), top)`` over i from 0 to count - 1, without a loop."""
    zeros = min(max(-first, 0), count)
    low = first + zeros
    rising = min(max(top - low, 0), count - zeros)
    flat = count - zeros - rising
    return rising * low + rising * (rising - 1) // 2 + flat * top


def visible_entries(scores: Scores, window: Window | None) -> int:
    """Entries of one head's score matrix that *window* leaves."""
    if window is None:
        return scores.queries * scores.keys
    shift = scores.keys - scores.queries if window.bottom_right else 0
    # Query i sees the keys below i + shift + right + 1, less those below i + shift - left.
    seen = scores.queries * scores.keys
    if window.right is not None:
        seen = _sum_of_clamped(shift + window.right + 1, scores.queries, scores.keys)
    if window.left is not None:
        seen -= _sum_of_clamped(shift - window.left, scores.queries, scores.keys)
    return max(seen, 0)


class Call(NamedTuple):
    """What one call of a fused kernel multiplies."""

    matrices: list[Scores]
    window: Window | None = None
    causal: bool = False
    """Whether it was flagged causal."""
    by_values: bool = False
    """Numbers in its tensors tell the sizes of the matrices."""

    def entries(self) -> tuple[int, int]:
        """Entries of all its score matrices, and those of them that the window rules out."""
        entries = skipped = 0
        for scores in self.matrices:
            full = scores.queries * scores.keys
            entries += scores.heads * full
            skipped += scores.heads * (full - visible_entries(scores, self.window))
        return entries, skipped


def forward_work(call: Call, head_size: int, value_size: int) -> Work:
    """Two products over each score matrix."""
    entries, skipped = call.entries()
    per_entry = 2 * (head_size + value_size)
    return Work(per_entry * entries, causal_skipped=per_entry * skipped, causal=call.causal, by_values=call.by_values)


def _asked_for() -> tuple[bool, bool, bool, bool]:
    """Whether the running autograd node is asked for the gradients of Q, K, V, and of what is added to the scores."""
    node = current_node()
    name = "" if node is None else str(node.name())
    edges = node.next_functions if "Attention" in name and name.endswith("Backward0") else ()
    if len(edges) < 3:
        return True, True, True, False
    asked = [edge is not None for edge, _ in edges[:4]]
    return asked[0], asked[1], asked[2], len(asked) > 3 and asked[3]


def _per_entry(head_size: int, value_size: int) -> tuple[int, int]:
    """FLOPs of a fused backward for an entry of the score matrix: of the gradients asked for, and of all else it runs.

    All else is the scores once more, and gradients that nobody asked for.
    """
    query, key, value, bias = _asked_for()
    gradients = 2 * head_size * (query + key) + 2 * value_size * (value + (query or key or bias))
    return gradients, 6 * head_size + 4 * value_size - gradients


def backward_work(call: Call, head_size: int, value_size: int) -> Work:
    """The gradients asked for, of four products over each score matrix; the scores once more, and the others."""
    entries, skipped = call.entries()
    gradients, repeated = _per_entry(head_size, value_size)
    return Work(
        gradients * entries,
        recompute=repeated * entries,
        causal_skipped=(gradients + repeated) * skipped,
        causal=call.causal,
        by_values=call.by_values,
    )


_CAUSAL_TOP_LEFT = Window(None, 0, bottom_right=False)


def heads_first(query: torch.Tensor, key: torch.Tensor) -> list[Scores]:
    """Score matrices of (…, heads, sequence, head size) operands; nested ones give one for each sample."""
    if not query.is_nested and not key.is_nested:
        *heads, queries, _ = query.shape
        return [Scores(prod(heads), queries, int(key.shape[-2]))]
    pairs = zip(sizes_of(query), sizes_of(key), strict=True)
    return [Scores(prod(q[:-2]), q[-2], k[-2]) for q, k in pairs]


def _top_left(query: torch.Tensor, key: torch.Tensor, causal: bool) -> Call:
    """Heads before sequence; a causal mask starts at the first query and key."""
    return Call(heads_first(query, key), _CAUSAL_TOP_LEFT if causal else None, bool(causal))


def _head_size(tensor: torch.Tensor) -> int:
    return int(tensor.shape[-1]) if not tensor.is_nested else sizes_of(tensor)[0][-1]


def _dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> tuple[int, int, int, int]:
    """Entries of all score matrices, those that a causal mask from the first query and key rules out, D and Dv."""
    *heads, queries, size = query.shape
    keys, count = int(key.shape[-2]), prod(heads)
    skipped = count * (queries * keys - _sum_of_clamped(1, queries, keys)) if causal else 0
    return count * queries * keys, skipped, size, int(value.shape[-1])


def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> int | Work:
    """A fused attention's forward, heads before sequence; its causal mask starts at the first query and key."""
    if query.is_nested or key.is_nested:
        return forward_work(_top_left(query, key, causal), _head_size(query), _head_size(value))
    entries, skipped, size, value_size = _dense(query, key, value, causal)
    per_entry = 2 * (size + value_size)
    if not causal:
        return per_entry * entries
    return Work(per_entry * entries, causal_skipped=per_entry * skipped, causal=True)


def fused_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> Work:
    """A fused attention's backward, heads before sequence."""
    if query.is_nested or key.is_nested:
        return backward_work(_top_left(query, key, causal), _head_size(query), _head_size(value))
    entries, skipped, size, value_size = _dense(query, key, value, causal)
    gradients, repeated = _per_entry(size, value_size)
    return Work(gradients * entries, repeated * entries, (gradients + repeated) * skipped, bool(causal))


def unfused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> Work:
    """Attention as separate products, called as one operator: nothing is skipped."""
    return forward_work(Call(heads_first(query, key), causal=bool(causal)), _head_size(query), _head_size(value))


def _has_values(offsets: torch.Tensor | None) -> TypeGuard[torch.Tensor]:
    """Whether there are *offsets*: backwards are handed empty ones where there are none."""
    return offsets is not None and offsets.numel() > 0


def _lengths(offsets: torch.Tensor) -> list[int]:
    ends = host_integers(offsets)
    return [stop - start for start, stop in pairwise(ends)]


def sequence_first(
    query: torch.Tensor, key: torch.Tensor, query_offsets: torch.Tensor | None, key_offsets: torch.Tensor | None
) -> list[Scores]:
    """Score matrices of (batch, sequence, heads, head size) operands, or of packed ones with cumulative lengths."""
    heads = int(query.shape[-2])
    if not _has_values(query_offsets):
        batch = prod(query.shape[:-3])
        return [Scores(batch * heads, int(query.shape[-3]), int(key.shape[-3]))]
    queries = _lengths(query_offsets)
    keys = queries if key_offsets is None else _lengths(key_offsets)
    return [Scores(heads, q, k) for q, k in zip(queries, keys, strict=True)]


def _used_keys(matrices: list[Scores], used: torch.Tensor | None) -> list[Scores]:
    """The same with each sample's keys cut to the *used* ones."""
    if used is None:
        return matrices
    keys = host_integers(used)
    if len(matrices) == 1:
        matrices = [matrices[0]._replace(heads=matrices[0].heads // len(keys))] * len(keys)
    return [scores._replace(keys=count) for scores, count in zip(matrices, keys, strict=True)]


def _flash_window(causal: bool, left: int | None, right: int | None) -> Window | None:
    # The flash kernels spell "no bound" as -1 or None, and line the last query up with the last key.
    left = None if left is None or left < 0 else int(left)
    right = None if right is None or right < 0 else int(right)
    if causal:
        right = 0
    return None if left is None and right is None else Window(left, right, bottom_right=True)


def flash(
    query: torch.Tensor,
    key: torch.Tensor,
    query_offsets: torch.Tensor | None,
    key_offsets: torch.Tensor | None,
    causal: bool,
    left: int | None,
    right: int | None,
    used: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
) -> Call:
    """Flash attention's kernels: sequence before heads, packed when there are offsets."""
    window = _flash_window(causal, left, right)
    if block_table is None:
        matrices = _used_keys(sequence_first(query, key, query_offsets, key_offsets), used)
        return Call(matrices, window, bool(causal), _has_values(query_offsets) or used is not None)
    # Keys live in pages (pages, page size, heads, size); only the used lengths say how many there are.
    if used is None or query_offsets is None:
        raise Unreadable("a paged key cache without used lengths")
    lengths = zip(_lengths(query_offsets), host_integers(used), strict=True)
    return Call([Scores(int(query.shape[-2]), q, k) for q, k in lengths], window, bool(causal), by_values=True)


def _efficient_window(mask_type: int, window: int | None) -> Window | None:
    if mask_type not in (_TOP_LEFT, _BOTTOM_RIGHT):
        return None
    # The kernel's window holds the query's own key and the window - 1 before it.
    left = None if window is None or window <= 0 else window - 1
    return Window(left, 0, bottom_right=mask_type == _BOTTOM_RIGHT)


def _efficient(
    query: torch.Tensor,
    key: torch.Tensor,
    query_offsets: torch.Tensor | None,
    key_offsets: torch.Tensor | None,
    mask_type: int,
    used: torch.Tensor | None,
    window: int | None,
) -> Call:
    """The memory-efficient kernels: sequence before heads; packed operands have a batch of one and offsets."""
    matrices = _used_keys(sequence_first(query, key, query_offsets, key_offsets), used)
    causal = mask_type in (_TOP_LEFT, _BOTTOM_RIGHT)
    by_values = _has_values(query_offsets) or used is not None
    return Call(matrices, _efficient_window(mask_type, window), causal, by_values)


def _cudnn(
    query: torch.Tensor,
    key: torch.Tensor,
    query_offsets: torch.Tensor | None,
    key_offsets: torch.Tensor | None,
    causal: bool,
) -> Call:
    """The raw operators of cuDNN: heads before sequence, or packed (tokens, heads, size) with offsets."""
    if not _has_values(query_offsets) or query.dim() == 4:
        return _top_left(query, key, causal)
    matrices = sequence_first(query, key, query_offsets, key_offsets)
    return Call(matrices, _CAUSAL_TOP_LEFT if causal else None, bool(causal), by_values=True)


def _flex_entries(query: torch.Tensor, key: torch.Tensor, block_mask: Sequence[Any]) -> tuple[int, bool]:
    """Score-matrix entries inside the blocks that the mask keeps, over all heads and samples; whether it has told them.

    ``BlockMask.as_tuple()`` is (queries, keys, kept blocks per row, their columns, full blocks per row, their columns,
    …, block rows, block columns, mask function); the counts are (batch or 1, heads or 1, rows of blocks).
    """
    batch, heads, queries, _ = query.shape
    keys = int(key.shape[-2])
    start = 0 if isinstance(block_mask[0], torch.Tensor) else 2  # before torch 2.6 the lengths were not in it
    partial, partial_columns, full, full_columns = block_mask[start : start + 4]
    tall, wide = int(block_mask[-3]), int(block_mask[-2])
    if partial is None or (tall >= queries and wide >= keys):
        return int(batch * heads) * queries * keys, False
    entries = 0
    for counts, columns in ((partial, partial_columns), (full, full_columns)):
        if counts is not None:
            entries += _entries_in_blocks(counts, columns, (queries, keys), (tall, wide))
    shared: int = int(batch * heads) // max(prod(partial.shape[:-1]), 1)
    return entries * shared, True


def _entries_in_blocks(
    counts: torch.Tensor, columns: torch.Tensor, lengths: tuple[int, int], block: tuple[int, int]
) -> int:
    """Entries of the blocks that each row of blocks lists, cut where the sequences end."""
    (queries, keys), (tall, wide) = lengths, block
    with out_of_sight():
        listed = torch.arange(columns.shape[-1], device=columns.device) < counts.unsqueeze(-1)
        widths = (keys - columns * wide).clamp(0, wide) * listed
        rows = torch.arange(counts.shape[-1], device=counts.device)
        heights = (queries - rows * tall).clamp(0, tall)
        # 64 bits: a long sequence's entries outgrow 32.
        entries = (widths.sum(-1, dtype=torch.int64) * heights).sum()
    return host_integers(entries)[0]


def flex(args: Arguments, kwargs: Keywords, out: Any) -> Work:
    """``flex_attention(query, key, value, score_mod, block_mask, …)``: two products over the blocks the mask keeps."""
    query, key, value, _, block_mask = args[:5]
    entries, by_values = _flex_entries(query, key, block_mask)
    return Work(2 * entries * (int(query.shape[-1]) + int(value.shape[-1])), by_values=by_values)


def flex_backward(args: Arguments, kwargs: Keywords, out: Any) -> Work:
    """``flex_attention_backward(query, key, value, …, block_mask at 9)``: four products, and the scores once more."""
    query, key, value = args[:3]
    entries, by_values = _flex_entries(query, key, args[9])
    size, value_size = int(query.shape[-1]), int(value.shape[-1])
    return Work(4 * entries * (size + value_size), recompute=2 * entries * size, by_values=by_values)


def _tokens(values: torch.Tensor) -> int:
    return sum(prod(shape[:-1]) for shape in sizes_of(values))


def native_multi_head(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, qkv_weight: torch.Tensor, out_weight: torch.Tensor
) -> int:
    """``_native_multi_head_attention``: input projections, attention, output projection.

    Nested samples are projected as they are; their scores are computed over the longest sample's length.
    """
    size = int(qkv_weight.shape[1])
    projections = 2 * (_tokens(query) + _tokens(key) + _tokens(value)) * size * (int(qkv_weight.shape[0]) // 3)
    queries, keys = sizes_of(query), sizes_of(key)
    samples = len(queries) if query.is_nested else queries[0][0]
    scores = samples * max(shape[-2] for shape in queries) * max(shape[-2] for shape in keys)
    return projections + 4 * scores * size + 2 * _tokens(query) * out_weight.numel()


def encoder_layer(
    source: torch.Tensor,
    qkv_weight: torch.Tensor,
    out_weight: torch.Tensor,
    first_weight: torch.Tensor,
    second_weight: torch.Tensor,
) -> int:
    """``_transformer_encoder_layer_fwd``: self-attention and the two linear layers behind it."""
    feed_forward = 2 * _tokens(source) * (first_weight.numel() + second_weight.numel())
    return native_multi_head(source, source, source, qkv_weight, out_weight) + feed_forward


_QKV = ("query", "key", "value")

Reader = Callable[..., Call]
"""Takes query, key and what else a kernel's operators say of a call."""


def _rule(
    work: Callable[[Call, int, int], Work], read: Reader, arguments: Sequence[str], operands: Sequence[str]
) -> Rule:
    def flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any) -> Work:
        return work(read(query, key, *rest), int(query.shape[-1]), int(value.shape[-1]))

    return Rule(flops, (*operands, *arguments), operands[0])


def kernel_rules(
    forward: Sequence[str],
    backward: Sequence[str],
    read: Reader,
    arguments: Sequence[str],
    operands: Sequence[str] = _QKV,
) -> dict[str, Rule]:
    """Rules of a fused kernel's operators, which say alike, forward and backward, what a call multiplies.

    Args:
        forward: names of the operators that run it forward.
        backward: names of those that run it backward.
        read: tells what a call multiplies from query, key and *arguments*.
        arguments: schema names, as a rule has them: a backward lacks some of those that may be lacking.
        operands: schema names of query, key and value.
    """
    return {
        **dict.fromkeys(forward, _rule(forward_work, read, arguments, operands)),
        **dict.fromkeys(backward, _rule(backward_work, read, arguments, operands)),
    }


_MULTI_HEAD = Rule(native_multi_head, (*_QKV, "qkv_weight", "proj_weight"), "query")


_FLASH_WINDOW = ("window_size_left?", "window_size_right?")
_DENSE = (
    "flash_attention_for_cpu flash_attention efficient_attention cudnn_attention fused_attention_overrideable"
).split()

ATTENTION_RULES: dict[str, Rule] = {
    **{f"aten::_scaled_dot_product_{kernel}": Rule(fused, (*_QKV, "is_causal"), "query") for kernel in _DENSE},
    **{
        f"aten::_scaled_dot_product_{kernel}_backward": Rule(fused_backward, (*_QKV, "is_causal"), "query")
        for kernel in _DENSE
    },
    "aten::_scaled_dot_product_attention_math": Rule(unfused, (*_QKV, "is_causal"), "query"),
    "aten::_scaled_dot_product_attention_math_for_mps": Rule(unfused, (*_QKV, "is_causal"), "query"),
    **kernel_rules(
        ("aten::_flash_attention_forward", "aten::_flash_attention_forward_no_dropout_inplace"),
        ("aten::_flash_attention_backward",),
        flash,
        ("cum_seq_q", "cum_seq_k", "is_causal", *_FLASH_WINDOW, "seqused_k?", "block_table?"),
    ),
    **kernel_rules(
        ("aten::_efficient_attention_forward",),
        ("aten::_efficient_attention_backward",),
        _efficient,
        ("cu_seqlens_q", "cu_seqlens_k", "custom_mask_type", "seqlen_k?", "window_size?"),
    ),
    **kernel_rules(
        ("aten::_cudnn_attention_forward",),
        ("aten::_cudnn_attention_backward",),
        _cudnn,
        ("cum_seq_q", "cum_seq_k", "is_causal"),
    ),
    "aten::_native_multi_head_attention": _MULTI_HEAD,
    "aten::_triton_multi_head_attention": _MULTI_HEAD,
    "aten::_triton_scaled_dot_attention": Rule(
        lambda query, key, value: fused(query, key, value, causal=False), ("q", "k", "v"), "q"
    ),
    "aten::_transformer_encoder_layer_fwd": Rule(
        encoder_layer,
        ("src", "qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2"),
        "src",
    ),
}

_FLEX_SOURCE = "density of the block mask: every entry of a block that the mask keeps is counted"

HIGHER_ORDER_RULES: dict[str, Rule] = {
    "flex_attention": Rule(flex, estimate=_FLEX_SOURCE),
    "flex_attention_backward": Rule(flex_backward, estimate=_FLEX_SOURCE),
}
