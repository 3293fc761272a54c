"""What DeepSpeed's activation checkpoints repeat is recompute, with grad or without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from torch import Tensor, nn

from lightning_flops.pytorch import count_flops
from lightning_flops.records import PhaseFlops

ROWS, WIDTH = 5, 8
LAYER = 2 * ROWS * WIDTH * WIDTH


class Block(nn.Module):
    """Three layers; the middle one only says which numbers are kept, and has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.index, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """The index of each row picks the numbers that go on."""
        x = self.first(x)
        with torch.no_grad():
            kept = self.index(x) > 0
        return torch.sigmoid(self.last(x * kept))


@pytest.mark.skipif(deepspeed.__version__.startswith("0.16"), reason="it has no checkpoints on a CPU")
@pytest.mark.parametrize("kind", [checkpointing.checkpoint, checkpointing.non_reentrant_checkpoint])
@pytest.mark.parametrize("as_module", [True, False])
def test_a_layer_without_grad_is_repeated_like_the_others(kind: Callable[..., Any], as_module: bool) -> None:
    block = Block()
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    with count_flops(block) as counts:
        kind(block if as_module else block.forward, x).sum().backward()
    assert counts.total == PhaseFlops(forward=3 * LAYER, backward=2 * 2 * LAYER, recompute=3 * LAYER)
    if as_module:
        assert counts.by_module()["index"] == PhaseFlops(forward=LAYER, recompute=LAYER)
