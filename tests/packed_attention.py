"""A model whose attention runs over packed sequences, by torch's ``varlen_attn``, with a kernel for the processor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.attention.varlen as varlen
from torch import nn

VOCAB, WIDTH, HEADS = 50, 16, 2


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seq_q: torch.Tensor, *rest: Any, **more: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    out = [_attend(query[a:b], key[a:b], value[a:b]) for a, b in pairwise(cu_seq_q.tolist())]
    return torch.cat(out), query.new_zeros(query.shape[1], query.shape[0]), torch.zeros(2, dtype=torch.uint64)


def _backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seq_q: torch.Tensor,
    *rest: Any,
    **more: Any,
) -> tuple[torch.Tensor, ...]:
    found = [_gradients(*(one[a:b] for one in (query, key, value, grad_out))) for a, b in pairwise(cu_seq_q.tolist())]
    return tuple(torch.cat(of_each) for of_each in zip(*found, strict=True))


def _shares(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Of one sequence, whose tensors are (length, heads, size)."""
    scores: torch.Tensor = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    return scores.softmax(-1)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.einsum("hqk,khd->qhd", _shares(query, key), value)
    return out


def _gradients(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad_out: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shares = _shares(query, key)
    of_shares = torch.einsum("qhd,khd->hqk", grad_out, value)
    of_scores = shares * (of_shares - (of_shares * shares).sum(-1, keepdim=True)) / query.shape[-1] ** 0.5
    return (
        torch.einsum("hqk,khd->qhd", of_scores, key),
        torch.einsum("hqk,qhd->khd", of_scores, query),
        torch.einsum("hqk,qhd->khd", shares, grad_out),
    )


@contextmanager
def kernels_for_the_processor() -> Iterator[None]:
    """Inside, ``varlen_attn`` runs here: torch has kernels for CUDA alone."""
    operators: Any = varlen
    pairs = ((operators._varlen_attn, _forward), (operators._varlen_attn_backward, _backward))
    for operator, kernel in pairs:
        operator.register_kernel("cpu")(kernel)
    try:
        yield
    finally:
        for operator, _ in pairs:
            operator._backend_fns.pop("cpu")


class Packed(nn.Module):
    """Attention between two linear layers, over the tokens of each sequence alone.

    ``position_ids`` that begin anew tell packed sequences apart. With an ``attention_mask`` the rows are padded, and
    only their attention is without padding, as flash attention is called in transformers.
    """

    def __init__(self, *, causal: bool = False) -> None:
        super().__init__()
        self.window = (-1, 0) if causal else (-1, -1)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.inside = nn.Linear(WIDTH, 3 * WIDTH)
        self.outside = nn.Linear(WIDTH, WIDTH)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        cu_seqlens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        rows, length = input_ids.shape
        query, key, value = self.inside(self.embed(input_ids)).view(rows * length, 3, HEADS, -1).unbind(1)
        where = None
        if attention_mask is not None:
            where = attention_mask.flatten().nonzero().flatten()
            query, key, value = query[where], key[where], value[where]
            lengths = attention_mask.sum(1)
            cu_seqlens = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        elif position_ids is not None:
            begins = (position_ids.flatten() == 0).nonzero().flatten()
            cu_seqlens = torch.cat([begins, begins.new_tensor([rows * length])])
        assert cu_seqlens is not None
        longest = int(cu_seqlens.diff().max())
        attended: Any = varlen.varlen_attn(
            query, key, value, cu_seqlens, cu_seqlens, longest, longest, window_size=self.window
        )
        if where is not None:
            attended = torch.zeros(rows * length, *attended.shape[1:]).index_put((where,), attended)
        out: torch.Tensor = self.outside(attended.reshape(rows, length, WIDTH))
        return out


def spent_on(lengths: list[int], *, tokens: int | None = None) -> int:
    """Forward and backward of a step on sequences of these *lengths*, packed or padded into so many *tokens*.

    The two linear layers for each token, and two products of attention over each pair; twice that in the backward.
    """
    linear = 2 * WIDTH * 3 * WIDTH + 2 * WIDTH * WIDTH
    return 3 * (linear * (sum(lengths) if tokens is None else tokens) + 4 * WIDTH * sum(one**2 for one in lengths))
