"""Operators whose result has a size that numbers in tensors decide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.records import SizesSeen, ValuesSeen

ROWS = torch.arange(12.0).view(6, 2)
MASK = torch.tensor([True, False, True, True, False, False])
NUMBERS = torch.tensor([2, 0, 2, 1, 0, 2])
SPARSE = torch.eye(3).to_sparse()


def packed() -> object:
    return nn.utils.rnn.pack_padded_sequence(ROWS[:, None], torch.tensor([5]))


def masked() -> object:
    return torch._nested_tensor_from_mask(torch.ones(2, 3, 4), torch.tensor([[True] * 3, [True, False, False]]))


FLOAT, WHOLE = 4, 8
"""Bytes of a number."""


@pytest.mark.parametrize(
    ("call", "size"),
    [
        pytest.param(lambda: ROWS[MASK], 3 * 2 * FLOAT, id="a mask selects"),
        pytest.param(lambda: ROWS[:, 0][MASK], 3 * FLOAT, id="a mask selects of a view"),
        pytest.param(lambda: ROWS.masked_select(MASK[:, None]), 3 * 2 * FLOAT, id="masked_select"),
        pytest.param(lambda: MASK.nonzero(), 3 * WHOLE, id="nonzero"),
        pytest.param(lambda: torch.where(NUMBERS == 2), 3 * WHOLE, id="where"),
        pytest.param(lambda: ROWS.repeat_interleave(NUMBERS, dim=0), 7 * WHOLE, id="repeat_interleave"),
        pytest.param(lambda: torch.bincount(NUMBERS), 3 * WHOLE, id="bincount"),
        pytest.param(packed, 5 * 2 * FLOAT + 5 * WHOLE, id="packed sequences"),
        pytest.param(
            masked,
            4 * 4 * FLOAT,
            id="a nested tensor by a mask",
            marks=pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
        ),
        pytest.param(lambda: ROWS.to_sparse(), 11 * FLOAT, id="a sparse tensor: one number is zero"),
    ],
)
def test_they_are_told_with_their_sizes(call: Callable[[], object], size: int) -> None:
    counter = FlopCounter(nn.Identity())
    with counter:
        call()
    ((line, seen),) = counter.values.sized.items()
    assert seen == SizesSeen(1, size**2) and counter.values.spent == 0
    assert line[0] == __file__


def test_each_line_has_its_own_sizes() -> None:
    counter = FlopCounter(nn.Identity())
    with counter:
        for _ in range(2):
            NUMBERS[MASK]
        NUMBERS[NUMBERS == 0]
    assert list(counter.values.sized.values()) == [SizesSeen(2, 2 * (3 * WHOLE) ** 2), SizesSeen(1, (2 * WHOLE) ** 2)]


class Reads(nn.Module):
    """Reads numbers from tensors: what for, nobody knows."""

    def __init__(self, *read: Callable[[], object]) -> None:
        super().__init__()
        self.read = read

    def forward(self) -> None:
        for one in self.read:
            one()


def test_a_whole_number_that_a_model_reads_may_be_a_size() -> None:
    reads = Reads(
        lambda: NUMBERS.sum().item(),
        lambda: ROWS[: NUMBERS.max()],
        lambda: ROWS.sum().item(),  # no size
        lambda: bool(MASK.any()),
    )
    counter = FlopCounter(reads)
    with counter:
        reads()
        NUMBERS.sum().item()  # a metric of the loop's, for one
    assert list(counter.values.sized.values()) == [SizesSeen(1, 7**2), SizesSeen(1, 2**2)]


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
    assert counter.values == ValuesSeen()


def test_products_with_a_sparse_matrix_spend_what_its_numbers_decide() -> None:
    counter = FlopCounter(nn.Identity())
    with counter:
        torch.sparse.mm(SPARSE, ROWS[:3])
        assert counter.values.spent
        before = counter.values.spent
        ROWS[:3] @ ROWS[:2]
        SPARSE * 2.0  # no product of matrices
        assert counter.values.spent == before
        with counter.in_optimizer():
            SPARSE @ ROWS[:3]
    assert counter.values.spent > before
