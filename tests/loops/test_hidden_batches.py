"""Batches that hold texts, or a class of the user's: what is computed on them has sizes that they do not show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.instrument.batches import HIDDEN, tensor_shapes
from lightning_flops.pytorch import TrainingProfiler

ROWS, IN, OUT, LENGTHS, STEPS = 4, 16, 8, 12, 60


def step_of(length: int) -> int:
    """Forward and backward of one layer, whose input needs no gradient."""
    return 2 * (2 * ROWS * length * IN * OUT)


def length_of(step: int) -> int:
    return 3 + step % LENGTHS


class Sentences:
    """What a library made of texts; no tensor of it can be seen."""

    def __init__(self, texts: list[str]) -> None:
        self.texts = texts


@dataclass
class Kind:
    """How a loader hands out texts, and how the loop gets them back."""

    collate: Callable[[list[str]], Any]
    texts: Callable[[Any], list[str]]


KINDS = {
    "texts": Kind(list, lambda batch: batch),
    "labels beside": Kind(lambda texts: {"text": texts, "label": torch.zeros(ROWS)}, lambda batch: batch["text"]),
    "a class": Kind(Sentences, lambda batch: batch.texts),
    "a class with labels": Kind(lambda texts: (Sentences(texts), torch.zeros(ROWS)), lambda batch: batch[0].texts),
}


def profiled(net: nn.Module, batches: Iterable[Any], rows: Callable[[Any], torch.Tensor]) -> TrainingProfiler:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with profile_training(net, optimizer, profile_step=1, timing_steps=LENGTHS, trace=False) as profiler:
        for batch in batches:
            net(rows(batch)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return profiler


def tokenized(texts: list[str]) -> torch.Tensor:
    return torch.ones(len(texts), len(texts[0]), IN)


@pytest.mark.parametrize("kind", KINDS.values(), ids=list(KINDS))
def test_the_arguments_of_the_model_stand_for_what_is_not_seen(kind: Kind) -> None:
    texts = ["x" * length_of(place // ROWS) for place in range(STEPS * ROWS)]
    loader: Any = DataLoader(texts, batch_size=ROWS, collate_fn=kind.collate)  # type: ignore[arg-type]
    run = profiled(nn.Linear(IN, OUT), loader, lambda batch: tokenized(kind.texts(batch))).throughput
    assert run is not None
    assert run.model_flops == sum(step_of(length_of(step)) for step in range(STEPS))
    assert run.steps_counted + run.steps_predicted == STEPS
    assert run.ips_unit == "samples/s"


def test_names_of_files_beside_tensors_change_nothing() -> None:
    def collate(texts: list[str]) -> Any:
        return {"rows": torch.ones(ROWS, 3, IN), "name": texts}

    loader: Any = DataLoader(["x"] * (STEPS * ROWS), batch_size=ROWS, collate_fn=collate)  # type: ignore[arg-type]
    run = profiled(nn.Linear(IN, OUT), loader, lambda batch: batch["rows"]).throughput
    assert run is not None
    assert run.model_flops == STEPS * step_of(3)
    assert run.steps_counted + run.steps_predicted == STEPS


class Texts(nn.Module):
    """Makes its own tensors of the texts that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(IN, OUT)

    def forward(self, texts: list[str]) -> torch.Tensor:
        result: torch.Tensor = self.layer(tokenized(texts))
        return result


def test_where_the_model_gets_texts_nothing_is_foretold() -> None:
    texts = ["x" * length_of(place // ROWS) for place in range(STEPS * ROWS)]
    loader: Any = DataLoader(texts, batch_size=ROWS, collate_fn=list)  # type: ignore[arg-type]
    profiler = profiled(Texts(), loader, lambda batch: batch)
    run, profile = profiler.throughput, profiler.profile
    assert run is not None
    assert profile is not None
    assert (run.model_flops, run.steps_predicted) == (None, 0)
    assert run.steps_counted + run.steps_unknown == STEPS
    assert any("no tensors that could be seen" in note for note in run.notes)
    # Nobody can tell which steps are like the counted one, so the window takes averages.
    assert any("keep changing" in note for note in profile.notes)


def test_what_holds_no_tensor_is_hidden_and_nothing_is_not() -> None:
    assert tensor_shapes([{"prompt": "a"}]) == tensor_shapes(3) == tensor_shapes(object()) == HIDDEN
    assert tensor_shapes(()) == tensor_shapes(None) == tensor_shapes([{}, None]) == ()
    assert tensor_shapes({"text": ["a"], "label": torch.zeros(2)}) == ((2,),)
