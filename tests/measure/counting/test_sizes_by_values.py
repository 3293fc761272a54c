"""Operators whose result has a size that values in tensors decide: what they make is data-dependent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_flops.measure.counting.flop_counter import FlopCounter

ROWS = torch.arange(12.0).view(6, 2)
MASK = torch.tensor([True, False, True, True, False, False])
NUMBERS = torch.tensor([2, 0, 2, 1, 0, 2])
SPARSE = torch.eye(3).to_sparse()


def packed() -> object:
    return nn.utils.rnn.pack_padded_sequence(ROWS[:, None], torch.tensor([5]))


def masked() -> object:
    return torch._nested_tensor_from_mask(torch.ones(2, 3, 4), torch.tensor([[True] * 3, [True, False, False]]))


CALLS: dict[str, tuple[Callable[[], object], bool]] = {
    "a mask selects": (lambda: ROWS[MASK], True),
    "a mask selects of a view": (lambda: ROWS[:, 0][MASK], True),
    "masked_select": (lambda: ROWS.masked_select(MASK[:, None]), True),
    "nonzero": (lambda: MASK.nonzero(), True),
    "where": (lambda: torch.where(NUMBERS == 2), True),
    "repeat_interleave": (lambda: ROWS.repeat_interleave(NUMBERS, dim=0), True),
    "bincount": (lambda: torch.bincount(NUMBERS), True),
    "packed sequences": (packed, True),
    "a nested tensor by a mask": (masked, True),
    "a sparse tensor": (lambda: ROWS.to_sparse(), True),
    "a product with a sparse matrix": (lambda: torch.sparse.mm(SPARSE, ROWS[:3]), True),
    "numbers select": (lambda: ROWS[NUMBERS], False),
    "a slice": (lambda: ROWS[1:4], False),
    "index_select": (lambda: ROWS.index_select(0, NUMBERS), False),
    "where of two values": (lambda: torch.where(MASK[:, None], ROWS, 0.0), False),
    "masked_fill": (lambda: ROWS.masked_fill(MASK[:, None], 0.0), False),
    "one_hot of five classes": (lambda: nn.functional.one_hot(NUMBERS, 5), False),
    "each twice": (lambda: ROWS.repeat_interleave(2, dim=0), False),
    "a number that the loop reads": (lambda: NUMBERS.sum().item(), False),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CALLS)
def test_whether_values_decide_the_size_of_a_result(name: str) -> None:
    call, decide = CALLS[name]
    counter = FlopCounter(nn.Identity())
    with counter:
        call()
    assert counter.take_data_dependent() is decide
    assert not counter.take_data_dependent(), "it was taken"


class Reads(nn.Module):
    """Reads numbers from tensors: what for, nobody knows."""

    def __init__(self, *read: Callable[[], object]) -> None:
        super().__init__()
        self.read = read

    def forward(self) -> None:
        for one in self.read:
            one()


@pytest.mark.parametrize(
    ("read", "is_size"),
    [
        (lambda: NUMBERS.sum().item(), True),
        (lambda: ROWS[: NUMBERS.max()], True),
        (lambda: ROWS.sum().item(), False),
        (lambda: bool(MASK.any()), False),
    ],
)
def test_a_whole_number_that_a_model_reads_may_be_a_size(read: Callable[[], object], is_size: bool) -> None:
    reads = Reads(read)
    counter = FlopCounter(reads)
    with counter:
        reads()
    assert counter.take_data_dependent() is is_size
