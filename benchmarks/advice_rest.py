"""Causes that take more of a program than a planted statement: a compiler, a closure, a rollout, busy workers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

from .advice_parts import Planted, Program, Samples, WholeBatches, loaded, perceptron

_PROMPTS, _MADE, _VOCABULARY = 8, 12, 64


class AttentionWithDropout(nn.Module):
    """Torch's attention, which on a CPU falls back on separate products where it drops scores."""

    def __init__(self, dropout: float) -> None:
        """Four heads."""
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(64, 192), nn.Linear(64, 64), dropout

    def forward(self, rows: Tensor) -> Tensor:
        """Causal."""
        batch, length, width = rows.shape
        query, key, value = self.qkv(rows).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        found = functional.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        return self.out(found.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]


def attention_dropout(workers: int | None) -> Program:
    """Dropout of attention's scores."""
    return Program(AttentionWithDropout(0.1 if workers is None else 0.0), loaded(4, 256, 64), 4)


def closure(workers: int | None) -> Program:
    """LBFGS, whose closure runs the model several times a batch."""
    optimizer = partial(
        torch.optim.LBFGS, lr=1e-3, max_iter=8 if workers is None else 1, tolerance_grad=0.0, tolerance_change=0.0
    )
    return Program(perceptron(nn.Tanh), loaded(256, 384), 256, optimizer)


class Watched(nn.Module):
    """A layer that looks at a number in the middle of what is compiled."""

    def __init__(self, slow: bool) -> None:
        """With the look, or without."""
        super().__init__()
        self.first, self.second, self.slow = perceptron(nn.GELU), perceptron(nn.GELU), slow

    def forward(self, rows: Tensor) -> Tensor:
        """Halved where it is too large."""
        hidden = self.first(rows)
        if self.slow and hidden.abs().max().item() > 1e6:
            hidden = hidden / 2
        return self.second(hidden)  # type: ignore[no-any-return]


class Annealed(nn.Module):
    """Layers with a factor that is a number of Python and another one in each step."""

    def __init__(self, slow: bool) -> None:
        """The factor as a number, or as a tensor."""
        super().__init__()
        self.layers = perceptron(nn.GELU)
        self.factor: Any = 1.0 if slow else torch.ones(())

    def forward(self, rows: Tensor) -> Tensor:
        """Scaled."""
        self.factor = self.factor * 0.999
        return self.layers(rows) * self.factor  # type: ignore[no-any-return]


def compiled(module: Callable[[bool], nn.Module]) -> Callable[[int | None], Program]:
    """A program whose *module* is compiled, as fast as that goes: the backend is no part of what is advised."""
    return lambda workers: Program(
        torch.compile(module(workers is None), backend="aot_eager"),  # type: ignore[arg-type]
        loaded(64, 384),
        64,
    )


def decode_for_long() -> None:
    """A sample that takes a worker longer than a step is."""
    sum(number * number for number in range(40_000))


def busy_workers(workers: int | None) -> Program:
    """Every core has a worker that computes; or what they make was prepared before."""
    if workers is not None:
        whole = DataLoader(WholeBatches(bool, 384), batch_size=16, collate_fn=lambda batch: batch)
        return Program(perceptron(), whole, 16)
    cores = len(os.sched_getaffinity(0))
    samples = Samples(decode_for_long, 384)
    return Program(perceptron(), DataLoader(samples, batch_size=16, num_workers=cores, persistent_workers=True), 16)


class Language(nn.Module):
    """A model of language that makes completions without a cache."""

    def __init__(self) -> None:
        """Two layers."""
        super().__init__()
        self.embedding, self.head = nn.Embedding(_VOCABULARY, 128), nn.Linear(128, _VOCABULARY)
        layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        length = tokens.shape[1]
        mask = torch.ones(length, length).triu(1).bool()
        return self.head(self.layers(self.embedding(tokens), mask=mask))  # type: ignore[no-any-return]

    @torch.no_grad()
    def generate(self, tokens: Tensor) -> Tensor:
        """Prompts with their completions."""
        for _ in range(_MADE):
            tokens = torch.cat((tokens, self(tokens)[:, -1:].argmax(-1)), 1)
        return tokens


def rollout(workers: int | None) -> Program:
    """Completions are made for each prompt by itself; or for all of a batch."""
    model = Language()

    def complete(prompts: Tensor) -> Tensor:
        return torch.cat([model.generate(some) for some in torch.split(prompts, 1 if workers is None else _PROMPTS)])

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    def prompts() -> Iterator[Tensor]:
        while True:
            yield torch.randint(_VOCABULARY, (_PROMPTS, 8))

    return Program(model, prompts(), _PROMPTS, before=complete, loss=loss)


REST: dict[str, Planted] = {
    "attention_dropout": Planted(attention_dropout, "attention_dropout", "the root"),
    "closure": Planted(closure, "closure", "LBFGS"),
    "graph_breaks": Planted(compiled(Watched), "graph_breaks", "item"),
    "recompilations": Planted(compiled(Annealed), "recompilations", "factor"),
    "busy_workers": Planted(busy_workers, "data_wait_full"),
    "rollout": Planted(rollout, "rollout"),
}
"""Programs by name, with the rule that knows the cause, and what its fact must name."""
