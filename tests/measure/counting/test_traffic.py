"""What is known of an operator besides its formula: whether values decide sizes, and whether it would run in TF32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops.measure.counting.attribution import tf32_operators
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
    "each twice": (lambda: ROWS.repeat_interleave(2, dim=0), False),
    "a whole number, which may be a size": (lambda: NUMBERS.sum().item(), True),
    "a slice up to a number": (lambda: ROWS[: NUMBERS.max()], True),
    "a broken number": (lambda: ROWS.sum().item(), False),
    "a condition": (lambda: bool(MASK.any()), False),
}


class Calls(nn.Module):
    """A model that makes one call."""

    def forward(self, call: Callable[[], object]) -> None:
        call()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", CALLS)
def test_whether_values_decide_the_size_of_a_result(name: str) -> None:
    call, decide = CALLS[name]
    model = Calls()
    counter = FlopCounter(model)
    with counter:
        model(call)
    assert counter.take_data_dependent() is decide
    assert not counter.take_data_dependent(), "it was taken"


def test_a_number_that_the_loop_reads_is_no_size() -> None:
    counter = FlopCounter(Calls())
    with counter:
        NUMBERS.sum().item()
        nn.functional.one_hot(NUMBERS, 5)  # reads the largest
    assert not counter.take_data_dependent()


BACKENDS: Any = torch.backends


@pytest.fixture
def switches(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if there was a GPU; afterwards all switches stand as they stood."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    owners = (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn)
    before = [owner.fp32_precision for owner in owners]
    yield
    torch.set_float32_matmul_precision("highest")
    for owner, precision in zip(owners, before, strict=True):
        owner.fp32_precision = precision


def in_tf32() -> set[str]:
    runs: Callable[[str], bool] = tf32_operators() or (lambda name: False)
    return set(filter(runs, (PRODUCT, CONVOLUTION, RECURRENT)))


PRODUCT, CONVOLUTION, RECURRENT = "aten.mm", "aten.convolution", "aten._cudnn_rnn"


@pytest.mark.usefixtures("switches")
def test_torchs_default_is_tf32_for_all_but_products_which_the_older_switch_adds() -> None:
    assert in_tf32() == {CONVOLUTION, RECURRENT}
    torch.set_float32_matmul_precision("high")
    assert in_tf32() == {PRODUCT, CONVOLUTION, RECURRENT}


@pytest.mark.usefixtures("switches")
def test_each_newer_switch_is_for_operators_of_its_own() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    assert in_tf32() == {PRODUCT, CONVOLUTION, RECURRENT}
    BACKENDS.cudnn.conv.fp32_precision = "ieee"
    assert in_tf32() == {PRODUCT, RECURRENT}
    BACKENDS.cudnn.rnn.fp32_precision = "ieee"
    assert in_tf32() == {PRODUCT}
    BACKENDS.cuda.matmul.fp32_precision = "ieee"
    assert in_tf32() == set()


@pytest.mark.parametrize(("matmul", "cudnn"), [(False, True), (True, False)])
def test_a_torch_that_has_the_older_switches_alone_is_asked_for_these(
    monkeypatch: pytest.MonkeyPatch, matmul: bool, cudnn: bool
) -> None:
    """Torch 2.7 and 2.8, whose ``torch.backends.cudnn.rnn`` is another module."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    switches = SimpleNamespace(
        cuda=SimpleNamespace(matmul=SimpleNamespace(allow_tf32=matmul)),
        cudnn=SimpleNamespace(allow_tf32=cudnn, rnn=ModuleType("torch.backends.cudnn.rnn")),
    )
    monkeypatch.setattr(torch, "backends", switches)
    found = in_tf32()
    monkeypatch.undo()
    assert found == ({PRODUCT} if matmul else set()) | ({CONVOLUTION, RECURRENT} if cudnn else set())
