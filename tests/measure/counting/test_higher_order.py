"""Functions that operators are handed are seen at work."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from lightning_flops.pytorch import count_flops
from lightning_flops.records import PhaseFlops


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_backward_of_attention_repeats_the_functions_on_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls the function for the scores, and once more, differentiated, for their gradient; no code needs one."""
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # torch lets no CPU differentiate it
    batch, heads, sequence, size, code = 2, 3, 16, 8, 4
    entries = batch * heads * sequence * sequence
    product, positions = 2 * entries * size, 2 * sequence * code * sequence
    codes = torch.randn(sequence, code)
    query, key, value = (torch.randn(batch, heads, sequence, size, requires_grad=True) for _ in range(3))

    def with_positions(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        result: Tensor = score + codes[i] @ codes[j]
        return result

    with count_flops(None) as counts:
        out = flex.flex_attention(query, key, value, score_mod=with_positions)
        assert isinstance(out, Tensor)
        torch.autograd.backward(out.sum())
    assert counts.total == PhaseFlops(
        forward=2 * product + positions, backward=4 * product, recompute=product + 2 * positions
    )
