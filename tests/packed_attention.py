"""Kernels for the processor of torch's ``varlen_attn``, the attention over packed sequences."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.nn.attention.varlen as varlen


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
