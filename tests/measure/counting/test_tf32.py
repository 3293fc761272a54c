"""Which operators would run in TF32 follows torch's switches, the older and the newer ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_flops.measure.counting.traffic import tf32_operators

BACKENDS: Any = torch.backends


@pytest.fixture(autouse=True)
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


def test_torchs_default_is_tf32_for_all_but_products_which_the_older_switch_adds() -> None:
    assert in_tf32() == {CONVOLUTION, RECURRENT}
    torch.set_float32_matmul_precision("high")
    assert in_tf32() == {PRODUCT, CONVOLUTION, RECURRENT}


def test_each_newer_switch_is_for_operators_of_its_own() -> None:
    BACKENDS.cuda.matmul.fp32_precision = "tf32"
    assert in_tf32() == {PRODUCT, CONVOLUTION, RECURRENT}
    BACKENDS.cudnn.conv.fp32_precision = "ieee"
    assert in_tf32() == {PRODUCT, RECURRENT}
    BACKENDS.cudnn.rnn.fp32_precision = "ieee"
    assert in_tf32() == {PRODUCT}
    BACKENDS.cuda.matmul.fp32_precision = "ieee"
    assert in_tf32() == set()
