"""Sizes that numbers in tensors decide, as those of a mask do, in whole runs: what is computed on them, or not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import profile_training, render_text
from lightning_flops.analysis.step_laws import DEPENDS
from lightning_flops.pytorch import TrainingProfiler
from tests.every_step import Watched, model_flops, watched_sessions

SETTINGS: dict[str, Any] = {"profile_step": 3, "timing_steps": 8, "trace": False, "peak_flops_per_sec": 1e12}
VOCAB, WIDTH = 50, 16


def run(
    model: nn.Module, batches: Sequence[Any], call: Callable[[nn.Module, Any], torch.Tensor]
) -> tuple[TrainingProfiler, Watched]:
    """A loop over *batches*, of which as many are counted as the run would like."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watched_sessions(share=1e6) as sessions, profile_training(model, optimizer, **SETTINGS) as profiler:
        for batch in profiler.batches(batches):
            call(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    (watched,) = sessions
    return profiler, watched


def by_name(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = model(**batch)
    return out


def by_place(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = model(*batch)
    return out


class MaskedHead(nn.Module):
    """A masked language model whose head is computed for the masked tokens alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        hidden, masked = self.body(self.embed(input_ids)), labels != -100
        return nn.functional.cross_entropy(self.head(hidden[masked]), labels[masked])


def masked(rows: int, length: int, tokens: int) -> dict[str, torch.Tensor]:
    """So many *tokens* of the batch are masked."""
    labels = torch.full((rows * length,), -100)
    labels[torch.randperm(rows * length)[:tokens]] = 3
    return {"input_ids": torch.randint(VOCAB, (rows, length)), "labels": labels.view(rows, length)}


@pytest.mark.parametrize("vary", [False, True], ids=["one size", "any size"])
def test_a_head_on_masked_tokens_goes_by_their_number(vary: bool) -> None:
    """Two linear layers, each with one product in the forward and two in the backward."""
    numbers = random.Random(1)
    sizes = [(numbers.randint(2, 5), numbers.randint(6, 20)) if vary else (4, 12) for _ in range(80)]
    if vary:  # steps that the window counts: the least and the greatest of both sizes
        sizes[3], sizes[13] = (2, 20), (5, 6)
    tokens = [numbers.randint(1, 6) for _ in sizes]  # the greatest number is soon counted
    batches = [masked(*size, number) for size, number in zip(sizes, tokens, strict=True)]
    profiler, watched = run(MaskedHead(), batches, by_name)
    body, head = 3 * 2 * WIDTH * WIDTH, 3 * 2 * WIDTH * VOCAB
    truth = [body * rows * length + head * number for (rows, length), number in zip(sizes, tokens, strict=True)]
    assert model_flops(watched) == truth
    summary, profile = profiler.throughput, profiler.profile
    assert summary is not None and profile is not None
    assert (summary.model_flops, summary.steps_unknown) == (sum(truth), 0)
    assert summary.steps_predicted > 60
    text = render_text(profile)
    assert f"{head // 3:,}·N" in text and "N is the number of tokens with a label that the loss counts." in text


class Metric(nn.Module):
    """A layer, and a metric on those samples that a mask selects."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 8)
        self.shown = torch.zeros(())

    def forward(self, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(rows)
        self.shown = out.detach()[scores > 0].mean()
        return out.square().mean()


def test_a_mask_that_decides_no_flops_takes_three_counted_steps_to_show_that() -> None:
    """Of the short last batch of an epoch one counted step is enough after that."""
    sizes = ([8] * 12 + [6]) * 5
    batches = []
    for place, rows in enumerate(sizes):
        scores = torch.full((rows,), -1.0)
        scores[: 1 + place % 5] = 1.0  # other numbers in the steps that the window counts: 3, 15 and 16
        batches.append((torch.randn(rows, WIDTH), scores))
    profiler, watched = run(Metric(), batches, by_place)
    truth = [2 * 2 * rows * WIDTH * 8 for rows in sizes]  # the layer's input needs no gradient
    assert model_flops(watched) == truth
    summary, profile = profiler.throughput, profiler.profile
    assert summary is not None and profile is not None
    assert (summary.model_flops, summary.steps_unknown, summary.notes) == (sum(truth), 0, ())
    assert len(profile.counted_steps) == 3 and not profile.variable


class Experts(nn.Module):
    """Each token goes to one of two experts; a router decides by its values."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero().flatten()
            out = out.index_add(0, where, expert(tokens[where]) * weights[where, None])
        return out.square().mean()


def test_experts_share_the_same_tokens_in_another_way_each_time() -> None:
    torch.manual_seed(3)
    batches = [(torch.randn(rows, WIDTH),) for rows in ([24] * 9 + [20]) * 6]
    profiler, watched = run(Experts(), batches, by_place)
    truth = [2 * 2 * rows * (WIDTH * 2 + WIDTH * WIDTH) for (tokens,) in batches for rows in (len(tokens),)]
    assert model_flops(watched) == truth
    assert profiler.throughput is not None and profiler.throughput.steps_unknown == 0


class Recurrent(nn.Module):
    """A recurrent layer over packed sequences, whose lengths no name tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, WIDTH, batch_first=True)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(rows, lengths, batch_first=True, enforce_sorted=False)
        out: torch.Tensor = self.layer(packed)[0].data
        return out.square().mean()


def test_rows_that_the_model_packs_itself_foretell_nothing() -> None:
    batches = [(torch.randn(4, 10, 8), torch.randint(1, 11, (4,))) for _ in range(40)]
    profiler, watched = run(Recurrent(), batches, by_place)
    known = model_flops(watched)
    counted = [step.counted is not None for step in watched.steps]
    assert [one for one, seen in zip(known, counted, strict=True) if not seen] == [None] * counted.count(False)
    assert all(reading.model_flops is None for reading in watched.readings)
    assert profiler.throughput is not None and profiler.throughput.model_flops is None
    assert DEPENDS in profiler.throughput.notes


class Trimmed(nn.Module):
    """Leaves out the columns that are padding in all rows; no name tells the lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, WIDTH)

    def forward(self, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        return self.layer(rows[:, : lengths.max()]).square().mean()  # type: ignore[no-any-return]


def test_rows_that_a_model_trims_by_a_number_that_it_reads_foretell_nothing() -> None:
    numbers = random.Random(2)
    longest = [numbers.randint(2, 10) for _ in range(40)]
    batches = [(torch.randn(4, 10, 8), torch.tensor([1, number, 1, 2])) for number in longest]
    profiler, watched = run(Trimmed(), batches, by_place)
    truth = [2 * 2 * 4 * number * 8 * WIDTH for number in longest]
    known = model_flops(watched)
    counted = [step.counted is not None for step in watched.steps]
    assert known == [spent if seen else None for spent, seen in zip(truth, counted, strict=True)]
    assert all(reading.model_flops is None for reading in watched.readings)
    assert profiler.throughput is not None and DEPENDS in profiler.throughput.notes


class TwoTasks(nn.Module):
    """Of 8 rows, a metric on what a mask selects; of 12 rows, a head on it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 4)
        self.shown = torch.zeros(())

    def forward(self, rows: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(rows)
        if len(rows) == 8:
            self.shown = out.detach()[scores > 0].mean()
            return out.square().mean()
        return self.head(out[scores > 0]).square().mean()  # type: ignore[no-any-return]


def test_a_mask_that_decides_nothing_says_nothing_of_another_one() -> None:
    numbers = random.Random(4)
    batches, truth = [], []
    for place in range(80):
        rows = 12 if place % 10 == 9 else 8
        selected = numbers.randint(1, rows)
        batches.append((torch.randn(rows, WIDTH), torch.tensor([1.0] * selected + [-1.0] * (rows - selected))))
        truth.append(2 * 2 * rows * WIDTH * 8 + (3 * 2 * selected * 8 * 4 if rows == 12 else 0))
    _, watched = run(TwoTasks(), batches, by_place)
    assert all(one in (None, spent) for one, spent in zip(model_flops(watched), truth, strict=True))
    spent_in = [(one.model_flops, sum(truth[number] for number in one.steps)) for one in watched.readings]
    assert all(said in (None, spent) for said, spent in spent_in)


class ExpertsAndHead(Experts):
    """Experts that share all tokens, and a head on those that are trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        hidden = self.embed(input_ids.flatten())
        out, where = super().forward(hidden), (labels.flatten() != -100).nonzero().flatten()
        head: torch.Tensor = self.head(hidden[where])
        return out + head.square().mean()


def test_a_number_of_trained_tokens_that_was_the_same_at_first_is_no_idle_one() -> None:
    """The experts' sizes are others in each counted step, the head's are not. Inputs of experts need gradients."""
    torch.manual_seed(5)
    numbers = random.Random(6)
    tokens = [4 if place < 20 else numbers.randint(1, 12) for place in range(80)]
    profiler, watched = run(ExpertsAndHead(), [masked(3, 8, number) for number in tokens], by_name)
    shared = 3 * 2 * 24 * (WIDTH * 2 + WIDTH * WIDTH)
    truth = [shared + 3 * 2 * WIDTH * VOCAB * number for number in tokens]
    assert all(one in (None, spent) for one, spent in zip(model_flops(watched), truth, strict=True))
    assert all(one.model_flops in (None, sum(truth[number] for number in one.steps)) for one in watched.readings)
    assert profiler.throughput is not None and profiler.throughput.steps_predicted > 40
