"""Attention that goes by the lengths of sequences, which no shape tells: a kernel over packed ones in whole runs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import profile_training, render_text
from lightning_flops.analysis.step_laws import DEPENDS
from lightning_flops.pytorch import TrainingProfiler
from tests.every_step import Watched, model_flops, watched_sessions
from tests.packed_attention import VOCAB, Packed, executed_on, kernels_for_the_processor, spent_on

SETTINGS: dict[str, Any] = {"profile_step": 3, "timing_steps": 8, "trace": False, "peak_flops_per_sec": 1e12}
STEPS = 80

Batch = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    with kernels_for_the_processor():
        yield


def cut(tokens: int, numbers: random.Random) -> list[int]:
    """Lengths from 2 to 12 of sequences that fill a row of so many *tokens*."""
    lengths = []
    while tokens > 12:
        lengths.append(numbers.randint(2, min(12, tokens - 2)))
        tokens -= lengths[-1]
    return [*lengths, tokens]


def packed(lengths: Sequence[int]) -> Batch:
    """One row of sequences of these *lengths*."""
    places = torch.cat([torch.arange(length) for length in lengths])[None]
    return {"input_ids": torch.randint(VOCAB, places.shape), "position_ids": places}


def padded(lengths: Sequence[int], width: int) -> Batch:
    """A row of this *width* for each sequence."""
    mask = torch.zeros(len(lengths), width, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    return {"input_ids": torch.randint(VOCAB, mask.shape), "attention_mask": mask}


def run(
    batches: Sequence[Any], *, call: Callable[[Packed, Any], torch.Tensor], causal: bool = False
) -> tuple[TrainingProfiler, Watched]:
    """A loop over *batches*, of which as many are counted as the run would like."""
    torch.manual_seed(0)
    model = Packed(causal=causal)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watched_sessions(share=1e6) as sessions, profile_training(model, optimizer, **SETTINGS) as profiler:
        for batch in profiler.batches(batches):
            call(model, batch).square().mean().backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
    (watched,) = sessions
    return profiler, watched


def by_name(model: Packed, batch: Batch) -> torch.Tensor:
    out: torch.Tensor = model(**batch)
    return out


@pytest.mark.parametrize("width", [48, None], ids=["rows of one length", "rows of any length"])
def test_packed_rows_are_known_by_the_squares_of_their_lengths(width: int | None) -> None:
    """The window counts the longest sequences, and the shortest and the longest row: others beyond are not foretold."""
    numbers = random.Random(3)
    lengths = [cut(width or numbers.randint(20, 60), numbers) for _ in range(STEPS)]
    first = SETTINGS["profile_step"]
    lengths[first] = [12, 12, 12, 12] if width else [12, 12, 12, 12, 12]
    lengths[first + SETTINGS["timing_steps"] + 1] = lengths[0] if width else [12, 8]
    profiler, watched = run([packed(one) for one in lengths], call=by_name)
    truth = [spent_on(one) for one in lengths]
    known = model_flops(watched)
    assert all(one in (None, spent) for one, spent in zip(known, truth, strict=True))
    summary, profile = profiler.throughput, profiler.profile
    assert summary is not None and profile is not None
    assert summary.steps_counted + summary.steps_predicted == STEPS and summary.steps_unknown == 0
    assert summary.model_flops == sum(truth)
    assert summary.steps_predicted > STEPS / 2
    assert summary.useful_mfu == summary.mfu  # there is no padding
    # The window counted several steps, and its report is of their mean.
    counted = [truth[number] for number in profile.counted_steps]
    assert len(counted) > 2 and profile.flops_total.model == sum(counted)
    assert profile.law is not None
    of_tokens, of_squares = 3 * (2 * 16 * 48 + 2 * 16 * 16), 3 * 4 * 16
    text = render_text(profile)
    assert f"{4 * 16}·Q" in text and f"{8 * 16}·Q" in text
    assert of_tokens * sum(lengths[0]) + of_squares * sum(one**2 for one in lengths[0]) == truth[0]


def test_padded_rows_whose_attention_is_unpadded_are_known_by_their_lengths() -> None:
    numbers = random.Random(5)
    lengths = [[14, 15, 16, 1]] + [[numbers.randint(2, 16) for _ in range(4)] for _ in range(STEPS - 1)]
    profiler, watched = run([padded(one, 16) for one in lengths], call=by_name)
    truth = [spent_on(one, tokens=4 * 16) for one in lengths]
    assert all(one in (None, spent) for one, spent in zip(model_flops(watched), truth, strict=True))
    summary = profiler.throughput
    assert summary is not None
    assert (summary.model_flops, summary.steps_unknown) == (sum(truth), 0)
    assert summary.steps_predicted > STEPS / 2


def test_what_a_causal_mask_rules_out_goes_by_the_lengths_too() -> None:
    numbers = random.Random(8)
    lengths = [[14, 15, 16, 1]] + [[numbers.randint(2, 16) for _ in range(4)] for _ in range(STEPS - 1)]
    profiler, _ = run([padded(one, 16) for one in lengths], call=by_name, causal=True)
    summary = profiler.throughput
    assert summary is not None
    assert summary.model_flops == sum(spent_on(one, tokens=4 * 16) for one in lengths)
    assert summary.hardware_flops == sum(executed_on(one, tokens=4 * 16) for one in lengths)
    assert summary.steps_predicted > STEPS / 2


def test_useful_flops_of_padded_rows_are_those_of_their_own_lengths() -> None:
    numbers = random.Random(6)
    lengths = [[14, 15, 16, 1]]
    lengths += [[numbers.randint(2, 16) for _ in range(numbers.choice((3, 4)))] for _ in range(STEPS - 1)]
    widths = [max(one) for one in lengths]
    _, watched = run([padded(one, width) for one, width in zip(lengths, widths, strict=True)], call=by_name)
    session, spent = watched.session, model_flops(watched)
    truth = [spent_on(one, tokens=len(one) * width) for one, width in zip(lengths, widths, strict=True)]
    assert all(one in (None, exact) for one, exact in zip(spent, truth, strict=True))
    books = session.flops.books
    keys = Counter(step.key for step in watched.steps)
    reader = session.tokens
    tokens = [reader.of(padded(one, width)) for one, width in zip(lengths, widths, strict=True)]
    first, *others = [one for one in tokens if one is not None]
    assert len(others) == STEPS - 1
    assert books.laws.without_padding(keys, first.plus(*others)) == {"float32": sum(map(spent_on, lengths))}


def called(model: Packed, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    out: torch.Tensor = model(batch[0], cu_seqlens=batch[1])
    return out


def test_lengths_that_no_batch_tells_foretell_nothing() -> None:
    """Four sequences in each row, of other lengths each time, in tensors without names."""
    numbers = random.Random(7)
    batches, truth = [], []
    for _ in range(STEPS):
        a, b = numbers.randint(2, 20), numbers.randint(2, 20)
        lengths = [a, 24 - a, b, 24 - b]
        batches.append((torch.randint(VOCAB, (1, 48)), torch.tensor([0, a, 24, 24 + b, 48])))
        truth.append(spent_on(lengths))
    profiler, watched = run(batches, call=called)
    summary, profile = profiler.throughput, profiler.profile
    assert summary is not None and profile is not None
    counted = [step.counted is not None for step in watched.steps]
    known = model_flops(watched)
    assert [one for one, seen in zip(known, counted, strict=True) if not seen] == [None] * counted.count(False)
    assert [one for one in known if one is not None] == [one for one, seen in zip(truth, counted, strict=True) if seen]
    assert summary.model_flops is None and summary.steps_predicted == 0
    assert all(reading.model_flops is None for reading in watched.readings)
    assert profile.variable and DEPENDS in summary.notes


def test_lengths_that_no_batch_tells_and_that_never_change_foretell_after_three_steps() -> None:
    lengths = [5, 20, 7, 16]
    borders = torch.tensor([0, 5, 25, 32, 48])
    profiler, watched = run([(torch.randint(VOCAB, (1, 48)), borders) for _ in range(STEPS)], call=called)
    summary, profile = profiler.throughput, profiler.profile
    assert summary is not None and profile is not None
    assert model_flops(watched) == [spent_on(lengths)] * STEPS
    assert (summary.model_flops, summary.steps_unknown) == (STEPS * spent_on(lengths), 0)
    assert len(profile.counted_steps) == 3 and not profile.variable


class OverRows(nn.Module):
    """Two layers over the rows of a jagged tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(rows).values()
        return out


def test_jagged_batches_are_known_by_their_rows() -> None:
    """The first layer's input needs no gradient: its backward is one product, the second's are two."""
    numbers = random.Random(9)
    lengths = [[numbers.randint(2, 9) for _ in range(4)] for _ in range(STEPS)]
    lengths[3], lengths[16] = [9] * 4, [2] * 4  # both are counted
    batches = [
        torch.nested.nested_tensor([torch.randn(one, 8) for one in of_batch], layout=torch.jagged)
        for of_batch in lengths
    ]
    model = OverRows()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with watched_sessions(share=1e6) as sessions, profile_training(model, optimizer, **SETTINGS) as profiler:
        for batch in profiler.batches(batches):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    truth = [sum(one) * (2 * 2 * 8 * 16 + 3 * 2 * 16 * 4) for one in lengths]
    assert model_flops(sessions[0]) == truth
    summary = profiler.throughput
    assert summary is not None and summary.model_flops == sum(truth)
    assert (summary.tokens, summary.real_tokens) == (sum(map(sum, lengths)),) * 2
