"""Operators whose result has a size that numbers in tensors decide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from lightning_flops.instrument.counting.flop_counter import FlopCounter
from lightning_flops.records import ValuesSeen

ROWS = torch.arange(12.0).view(6, 2)
MASK = torch.tensor([True, False, True, True, False, False])
NUMBERS = torch.tensor([2, 0, 2, 1, 0, 2])


def packed() -> object:
    return nn.utils.rnn.pack_padded_sequence(ROWS[:, None], torch.tensor([5]))


@pytest.mark.parametrize(
    ("call", "sizes"),
    [
        pytest.param(lambda: ROWS[MASK], [3 * 2], id="a mask selects"),
        pytest.param(lambda: ROWS[:, 0][MASK], [3], id="a mask selects of a view"),
        pytest.param(lambda: ROWS.masked_select(MASK[:, None]), [3 * 2], id="masked_select"),
        pytest.param(lambda: MASK.nonzero(), [3], id="nonzero"),
        pytest.param(lambda: torch.where(NUMBERS == 2), [3], id="where"),
        pytest.param(lambda: ROWS.repeat_interleave(NUMBERS, dim=0), [7], id="repeat_interleave"),
        pytest.param(lambda: torch.bincount(NUMBERS), [3], id="bincount"),
        pytest.param(packed, [5 * 2 + 5], id="packed sequences"),
    ],
)
def test_they_are_told_with_their_sizes(call: Callable[[], object], sizes: list[int]) -> None:
    counter = FlopCounter(nn.Identity())
    with counter:
        call()
    assert counter.values == ValuesSeen(sized=len(sizes), sizes=sum(size**2 for size in sizes))


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
