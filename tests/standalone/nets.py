"""Models whose FLOPs and seconds can be worked out by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.fake_clock import FakeNow

FIRST = 2 * 2 * 3 * 5  # FLOPs of a batch of 2 through Linear(3, 5)
SECOND = 2 * 2 * 5 * 7  # and through Linear(5, 7)
PARAMS = 3 * 5 + 5 + 5 * 7 + 7  # of both


def model_state(model: nn.Module) -> list[Any]:
    """Names of everything that the model's modules hold, and their hooks."""
    return [
        (id(module), sorted(vars(module)), len(module._forward_hooks), len(module._forward_pre_hooks), module.training)
        for module in model.modules()
    ]


def model_of_two() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 7))


class Sleeping(nn.Module):
    """Takes *seconds* of the test's clock, and a second more while a dispatch mode is on: counting takes time."""

    def __init__(self, now: FakeNow, seconds: float) -> None:
        super().__init__()
        self.now = now
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        self.now.sleep(self.seconds + torch._C._len_torch_dispatch_stack())
        return x


class Block(nn.Module):
    """Sleeps itself before and after its layers: 1 s + layers + 2 s."""

    def __init__(self, now: FakeNow, *layers: nn.Module) -> None:
        super().__init__()
        self.now = now
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        self.now.sleep(1)
        for layer in self.layers:
            x = layer(x)
        self.now.sleep(2)
        return x


class Calling(nn.Module):
    """Calls *function* with its input and its layer."""

    def __init__(self, function: Any, layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.layer = layer

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)
