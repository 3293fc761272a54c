"""Sentences of random lengths, and the FLOPs of each step on them, counted by themselves."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import count_flops
from lightning_flops.analysis.step_keys import StepKey
from lightning_flops.session.session import Session

VOCAB, WIDTH = 50, 16


class Encoder(nn.Module):
    """One layer of a transformer between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layer(self.embed(ids)))
        return logits


class Strided(nn.Module):
    """Every second position is left, twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.convolutions = nn.Sequential(nn.Conv1d(WIDTH, 8, 3, stride=2), nn.Conv1d(8, 8, 3, stride=2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.convolutions(self.embed(ids).transpose(1, 2))
        return features


def sentences(number: int, *, seed: int = 0, batch: int = 4, least: int = 9, greatest: int = 40) -> list[torch.Tensor]:
    """Batches of *batch* sentences, all of one length within a batch; every fortieth is a smaller batch."""
    numbers = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(
            VOCAB,
            (batch - 1 if index % 40 == 39 else batch, numbers.randint(least, greatest)),
            generator=generator,
        )
        for index in range(number)
    ]


def watch_sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Every session that begins from here on."""
    kept: list[Session] = []
    begin = Session.begin

    def keep(session: Session) -> None:
        kept.append(session)
        begin(session)

    monkeypatch.setattr(Session, "begin", keep)
    return kept


def truths(
    model: nn.Module, keys: Iterable[StepKey], step: Callable[[tuple[Any, ...]], object]
) -> dict[StepKey, dict[tuple[str, str], int]]:
    """What a step of each key spends, counted anew."""
    found = {}
    for key in keys:
        with count_flops(model) as counts:
            step(key[0])
        total = counts.total
        buckets = {
            ("forward", "float32"): total.forward,
            ("backward", "float32"): total.backward,
            ("recompute", "float32"): total.recompute,
            ("causal_skipped", "float32"): counts.causal_skipped,
        }
        found[key] = {bucket: flops for bucket, flops in buckets.items() if flops}
    return found


def hold_to(session: Session, truth: dict[StepKey, dict[tuple[str, str], int]]) -> int:
    """How many of the keys the session foretells; what it says of them must be the *truth*."""
    foretold = {key: session.flops.laws.known(key) for key in truth}
    known = {key: found.flops for key, found in foretold.items() if found is not None and found.whole}
    assert known == {key: truth[key] for key in known}
    return len(known)
