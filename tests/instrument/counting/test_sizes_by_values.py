"""Operators whose result has a size that values in tensors decide: what they make is data-dependent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_flops.instrument.counting.flop_counter import FlopCounter

ROWS = torch.arange(12.0).view(6, 2)
MASK = torch.tensor([True, False, True, True, False, False])
NUMBERS = torch.tensor([2, 0, 2, 1, 0, 2])
SPARSE = torch.eye(3).to_sparse()


def packed() -> object:
    return nn.utils.rnn.pack_padded_sequence(ROWS[:, None], torch.tensor([5]))


def masked() -> object:
    return torch._nested_tensor_from_mask(torch.ones(2, 3, 4), torch.tensor([[True] * 3, [True, False, False]]))


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: ROWS[MASK], id="a mask selects"),
        pytest.param(lambda: ROWS[:, 0][MASK], id="a mask selects of a view"),
        pytest.param(lambda: ROWS.masked_select(MASK[:, None]), id="masked_select"),
        pytest.param(lambda: MASK.nonzero(), id="nonzero"),
        pytest.param(lambda: torch.where(NUMBERS == 2), id="where"),
        pytest.param(lambda: ROWS.repeat_interleave(NUMBERS, dim=0), id="repeat_interleave"),
        pytest.param(lambda: torch.bincount(NUMBERS), id="bincount"),
        pytest.param(packed, id="packed sequences"),
        pytest.param(
            masked,
            id="a nested tensor by a mask",
            marks=pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
        ),
        pytest.param(lambda: ROWS.to_sparse(), id="a sparse tensor"),
    ],
)
def test_sizes_that_values_decide(call: Callable[[], object]) -> None:
    counter = FlopCounter(nn.Identity())
    with counter:
        call()
    assert counter.take_data_dependent()
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


def test_a_number_that_the_loop_reads_is_a_metric() -> None:
    counter = FlopCounter(nn.Identity())
    with counter:
        NUMBERS.sum().item()
    assert not counter.take_data_dependent()


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(lambda: ROWS[NUMBERS], id="numbers select"),
        pytest.param(lambda: ROWS[1:4], id="a slice"),
        pytest.param(lambda: ROWS.index_select(0, NUMBERS), id="index_select"),
        pytest.param(lambda: torch.where(MASK[:, None], ROWS, 0.0), id="where of two values"),
        pytest.param(lambda: ROWS.masked_fill(MASK[:, None], 0.0), id="masked_fill"),
        pytest.param(lambda: nn.functional.one_hot(NUMBERS, 5), id="one_hot of five classes"),
        pytest.param(lambda: ROWS.repeat_interleave(2, dim=0), id="each twice"),
    ],
)
def test_sizes_that_shapes_decide_are_none_of_them(call: Callable[[], object]) -> None:
    counter = FlopCounter(nn.Identity())
    with counter:
        call()
    assert not counter.take_data_dependent()


def test_products_with_a_sparse_matrix_go_by_its_numbers() -> None:
    counter = FlopCounter(nn.Identity())
    with counter:
        torch.sparse.mm(SPARSE, ROWS[:3])
        assert counter.take_data_dependent()
        ROWS[:3] @ ROWS[:2]
        SPARSE * 2.0  # no product of matrices
        assert not counter.take_data_dependent()
        with counter.in_optimizer():
            SPARSE @ ROWS[:3]
    assert counter.take_data_dependent()
