"""Under a torch that lacks one of its private needed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_flops import count_flops
from lightning_flops.errors import LightningFlopsError
from lightning_flops.measure.torch_private import needed


def test_this_torch_has_all_that_counting_needs() -> None:
    assert needed.MISSING == []


def test_counting_is_refused_in_one_sentence_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    missing: list[str] = []
    monkeypatch.setattr(needed, "MISSING", missing)
    assert needed.take("torch._C:_no_such_name") is None
    assert missing == ["torch._C:_no_such_name"]
    ran: list[str] = []
    with pytest.raises(LightningFlopsError) as refused, count_flops(nn.Linear(2, 2)):
        ran.append("the block")
    assert str(refused.value) == (
        f"FLOPs cannot be counted: this torch ({torch.__version__}) has no torch._C:_no_such_name."
    )
    assert ran == []


def test_a_name_that_counting_can_do_without_has_a_stand_in() -> None:
    assert needed.take("torch._C:_no_such_name", 3) == 3
    assert needed.take("torch.no_such_module:name", None) is None
    assert needed.MISSING == []
