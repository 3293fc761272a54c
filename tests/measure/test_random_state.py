"""What we ask of the user's code draws none of training's random numbers."""

from __future__ import annotations

import importlib
import random
from typing import Any

import numpy as np
import torch
from torch import nn

from lightning_flops import FlopsProfilerCallback
from tests.lightning.nets import loader, new_net, new_trainer


def draw(*_: Any) -> int:
    """Draws from every generator of the process."""
    torch.rand(3)
    np.random.rand(3)
    return random.randint(1, 5)


class Drawing(nn.Linear):
    """Draws whenever it is described."""

    def extra_repr(self) -> str:
        return f"drawn={draw()}"


def test_a_fit_whose_settings_and_modules_and_loggers_draw_is_the_fit_without_us(tmp_path: Any) -> None:
    root = "lightning.pytorch"
    dummy: Any = importlib.import_module(f"{root}.loggers.logger").DummyLogger

    def fit(*callbacks: Any, loggers: Any = False) -> tuple[Any, ...]:
        net = new_net(root)
        net.net.append(nn.Dropout(0.5))
        net.net.append(Drawing(3, 3))
        for seed in (torch.manual_seed, np.random.seed, random.seed):
            seed(5)
        new_trainer(root, tmp_path, *callbacks, logger=loggers).fit(net, loader(8))
        return (*net.losses, float(torch.rand(1)), float(np.random.rand()), random.random())

    drawing = type("Service", (dummy,), {"log_metrics": lambda self, metrics, step: draw() and None})()
    callback = FlopsProfilerCallback(timing_steps=2, batch_size=draw, tokens_per_sample=draw)
    plain = fit()
    assert fit(callback) == plain
    assert callback.profile is not None
    assert len(set(plain[:8])) > 1
    assert fit(FlopsProfilerCallback(timing_steps=2, monitor=False), loggers=drawing) == plain
