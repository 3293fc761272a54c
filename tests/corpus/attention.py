"""Attention, in every form torch has for it.

With B samples, H query heads, Sq queries, Sk keys, head size D and value head size Dv, the scores Q K^T cost
``2 * B * H * Sq * Sk * D`` and the weighted values ``2 * B * H * Sq * Sk * Dv``, masked or not. Each has two gradients.
A fused kernel does not keep the scores: its backward computes Q K^T once more, which is recompute. Where it knows its
mask is causal it leaves out the scores above the diagonal, in all seven products: 2 forward, 4 backward, 1 recompute.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from .case import Example, Family, Parts, forward_without_grad

FAMILY = Family("attention")

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def example_of(attend: Attend, query: tuple[int, ...], key: tuple[int, ...], value: tuple[int, ...]) -> Example:
    """Attention between inputs of these shapes, each of which needs its gradient."""
    model = Parts(lambda self, query, key, value: attend(query, key, value))
    return Example(model, *tuple(torch.randn(shape, requires_grad=True) for shape in (query, key, value)))


def with_math_backend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Scaled dot-product attention as separate products."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(query, key, value, **options)


def with_flash_backend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """Scaled dot-product attention as one fused kernel."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return scaled_dot_product_attention(query, key, value, **options)


@FAMILY.network
def attention_from_matmuls() -> Example:
    """softmax(Q K^T) V, written out."""
    batch, heads, sequence, head_dim = 2, 3, 7, 5
    scores = 2 * batch * heads * sequence * sequence * head_dim

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return torch.softmax(query @ key.transpose(-2, -1) * head_dim**-0.5, dim=-1) @ value

    shape = (batch, heads, sequence, head_dim)
    return example_of(attend, shape, shape, shape).costs(
        2 * scores, 4 * scores, by_module={"": (2 * scores, 4 * scores)}
    )


@FAMILY.network
def attention_from_einsum() -> Example:
    """Heads behind the sequence, keys of another length."""
    batch, heads, queries, keys, head_dim = 2, 3, 7, 11, 5
    scores = 2 * batch * heads * queries * keys * head_dim

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", query, key), dim=-1)
        return torch.einsum("bhqk,bkhd->bqhd", weights, value)

    return example_of(
        attend, (batch, queries, heads, head_dim), (batch, keys, heads, head_dim), (batch, keys, heads, head_dim)
    ).costs(2 * scores, 4 * scores)


@FAMILY.network
def linear_attention() -> Example:
    """K^T V first: no score matrix, two products with a (head_dim, value_dim) state."""
    batch, heads, sequence, head_dim, value_dim = 2, 3, 7, 5, 4
    state = 2 * batch * heads * sequence * head_dim * value_dim

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        memory = torch.einsum("bhsd,bhse->bhde", torch.softmax(key, dim=-2), value)
        return torch.einsum("bhsd,bhde->bhse", torch.softmax(query, dim=-1), memory)

    shape = (batch, heads, sequence, head_dim)
    return example_of(attend, shape, shape, (batch, heads, sequence, value_dim)).costs(2 * state, 4 * state)


SELF = (2, 3, 7, 5)  # samples, heads, positions, head size


def kernel(
    name: str,
    attend: Attend,
    query: tuple[int, ...] = SELF,
    key: tuple[int, ...] = SELF,
    value: tuple[int, ...] | None = None,
    *,
    fused: bool = True,
    skipped: int = 0,
) -> None:
    """Adds attention; *value* is of the keys' shape unless it is given, and of *skipped* scores none is computed."""
    value = value or key
    scores, values = (2 * math.prod(query[:3]) * key[-2] * size for size in (key[-1], value[-1]))
    spent = (scores + values, 2 * (scores + values), scores if fused else 0)
    FAMILY.put(
        name,
        lambda: example_of(attend, query, key, value).costs(
            *spent, skipped=(2 + 4 + 1) * 2 * skipped * key[-1], by_module={"": spent}
        ),
    )


def masked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Fused attention under a mask that is a tensor."""
    mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    return with_flash_backend(query, key, value, attn_mask=mask)


causal_math, causal_flash = partial(with_math_backend, is_causal=True), partial(with_flash_backend, is_causal=True)
grouped_math, grouped_flash = partial(with_math_backend, enable_gqa=True), partial(with_flash_backend, enable_gqa=True)

# Separate products keep the scores, so nothing is computed twice; and compute the masked half too: nothing is skipped.
kernel("math_attention", with_math_backend, fused=False)
kernel("causal_math_attention", causal_math, fused=False)
# The fused kernel repeats Q K^T in its backward.
kernel("flash_attention", with_flash_backend)
# Of 7 x 7 scores, 6 + 5 + 4 + 3 + 2 + 1 = 21 lie above the diagonal and are skipped in all seven products.
kernel("causal_flash_attention", causal_flash, skipped=2 * 3 * (6 + 5 + 4 + 3 + 2 + 1))
# Query i sees keys 0 to i, counted from the first key: 5 queries see 1 + 2 + 3 + 4 + 5 of their 8 keys each.
kernel(
    "causal_flash_cross_attention",
    causal_flash,
    (2, 3, 5, 7),
    (2, 3, 8, 7),
    skipped=2 * 3 * (5 * 8 - (1 + 2 + 3 + 4 + 5)),
)
# A mask that is a tensor is added to scores that are all computed, also when it happens to be causal.
kernel("flash_attention_with_a_mask_tensor", masked)
# Queries and keys of different lengths.
kernel("flash_cross_attention", with_flash_backend, SELF, (2, 3, 11, 5))
# Six query heads share two key heads; every query head has its own scores, under either backend.
kernel("grouped_query_flash_attention", grouped_flash, (3, 6, 7, 5), (3, 2, 7, 5))
kernel("grouped_query_math_attention", grouped_math, (3, 6, 7, 5), (3, 2, 7, 5), fused=False)
# Values of another size than the keys run as separate products.
kernel("attention_with_a_narrower_value", with_math_backend, value=(2, 3, 7, 4), fused=False)


@FAMILY.network
def causal_flash_attention_without_grad() -> Example:
    """Only the forward's two products run, and skip."""
    batch, heads, sequence, head_dim = 3, 2, 5, 7
    scores = 2 * batch * heads * (sequence * sequence) * head_dim
    skipped = 2 * batch * heads * (4 + 3 + 2 + 1) * head_dim
    shape = (batch, heads, sequence, head_dim)
    example = example_of(partial(with_flash_backend, is_causal=True), shape, shape, shape)
    example.step = forward_without_grad
    return example.costs(2 * scores, skipped=2 * skipped)


@FAMILY.network
def attention_with_a_learned_mask() -> Example:
    """No fused kernel on a CPU gives a mask its gradient, so torch falls back to separate products."""
    batch, heads, sequence, head_dim = 2, 3, 7, 5
    scores = 2 * batch * heads * sequence * sequence * head_dim

    def forward(self: Any, query: Tensor) -> Tensor:
        return scaled_dot_product_attention(query, query, query, attn_mask=self.bias)

    model = Parts(forward, bias=nn.Parameter(torch.zeros(sequence, sequence)))
    return Example(model, torch.randn(batch, heads, sequence, head_dim, requires_grad=True)).costs(
        2 * scores, 4 * scores
    )


@FAMILY.network
def flex_attention_over_blocks() -> Example:
    """A causal block mask keeps 1 + 2 + 3 + 4 = 10 of 4 x 4 blocks; a CPU runs the forward only."""
    batch, heads, sequence, head_dim, block = 2, 3, 128, 8, 32

    def causal(batch_index: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= key

    def forward(self: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        result = flex_attention(query, key, value, block_mask=self.mask)
        assert isinstance(result, Tensor)
        return result

    kept = (1 + 2 + 3 + 4) * block * block
    shape = (batch, heads, sequence, head_dim)
    model = Parts(
        forward, mask=create_block_mask(causal, None, None, sequence, sequence, device="cpu", BLOCK_SIZE=block)
    )
    return Example(model, torch.randn(shape), torch.randn(shape), torch.randn(shape), step=forward_without_grad).costs(
        2 * (2 * batch * heads * sequence * sequence * head_dim),
        skipped=2 * (2 * batch * heads * (sequence * sequence - kept) * head_dim),
    )
