from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from lightning_flops.measure.batches import BatchMeter, never_alike, samples_in, shapes_text, tensor_shapes


@dataclass
class Pair:
    image: torch.Tensor
    label: torch.Tensor


IMAGE, LABEL = torch.zeros(5, 3, 2, 2), torch.zeros(5)


@pytest.mark.parametrize(
    "batch",
    [
        (IMAGE, LABEL),
        [IMAGE, LABEL],
        {"image": IMAGE, "label": LABEL},
        {"a": {"b": [IMAGE]}, "c": (LABEL, "name", None, 3)},
        Pair(IMAGE, LABEL),
        UserDict(image=IMAGE, label=LABEL),
    ],
    ids=["tuple", "list", "dict", "nested", "dataclass", "mapping"],
)
def test_tensors_are_found_wherever_a_batch_keeps_them(batch: Any) -> None:
    assert tensor_shapes(batch) == ((5, 3, 2, 2), (5,))
    assert samples_in(tensor_shapes(batch)) == 5


@pytest.mark.parametrize(
    "batch", [None, "text", 3, object(), [], torch.tensor(1.0), {"a": torch.zeros(2, 3), "b": torch.zeros(4, 3)}]
)
def test_a_batch_without_tensors_that_agree_on_a_first_dimension_has_no_known_size(batch: Any) -> None:
    assert samples_in(tensor_shapes(batch)) is None


def meter(notes: list[str], **settings: Any) -> BatchMeter:
    return BatchMeter(**{"batch_size": None, "tokens_per_sample": None, **settings}, note=notes.append)


def test_what_the_user_says_of_a_batch_wins() -> None:
    shapes = tensor_shapes((IMAGE, LABEL))
    assert meter([]).samples(None, shapes) == 5
    assert meter([], batch_size=7).samples(None, shapes) == 7
    assert meter([], batch_size=lambda batch: len(batch) + 1).samples([0, 0], shapes) == 3


def test_tokens_are_samples_times_tokens_or_what_a_function_says() -> None:
    assert meter([]).tokens(None, 5) is None
    assert meter([], tokens_per_sample=128).tokens(None, 5) == 640
    assert meter([], tokens_per_sample=128).tokens(None, None) is None
    assert meter([], tokens_per_sample=lambda batch: sum(batch)).tokens([3, 4], 2) == 7


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda batch: batch["missing"], "batch_size raised KeyError: 'missing'; what needs it is n/a."),
        (lambda batch: 0, "batch_size must return a number > 0, got 0; what needs it is n/a."),
        # Python writes no integer of more than 4,300 digits.
        (
            lambda batch: -(10**5_000),
            "batch_size must return a number > 0, got a value of type int; what needs it is n/a.",
        ),
        (lambda batch: "many", "batch_size raised ValueError"),
    ],
)
def test_a_function_that_fails_costs_its_figure_and_a_note(function: Any, said: str) -> None:
    notes: list[str] = []
    assert meter(notes, batch_size=function).samples({}, ()) is None
    assert notes[0].startswith(said)


def test_what_packs_sequences_shows_its_sizes_and_no_samples() -> None:
    """Sequences of 4, 2 and 1 tokens, packed: 7 tokens in 4 steps. A nested tensor's sizes are hidden."""
    rows = [torch.ones(length, 5) for length in (4, 2, 1)]
    for packed in (pack_sequence(rows), pack_sequence(rows[::-1], enforce_sorted=False)):
        assert tensor_shapes({"x": packed}) == ((7, 5), (1, 4))
        assert samples_in(tensor_shapes(packed)) is None
    nested = tensor_shapes(torch.nested.nested_tensor(rows, layout=torch.jagged))
    assert shapes_text(nested) == "[?]" and never_alike(nested) != never_alike(nested)
