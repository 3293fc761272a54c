"""A dispatch mode of the user's, in which we begin to count a step: whoever leaves it takes off no mode but his own."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_flops import profile_training
from lightning_flops.measure.torch_private.needed import depth

IN, OUT, STEPS = 16, 4, 60


def loader(lengths: Sequence[int]) -> DataLoader[torch.Tensor]:
    rows = [torch.ones(length, IN) for length in lengths]
    return DataLoader(rows, batch_size=None)  # type: ignore[arg-type]


def test_a_mode_around_each_forward_counts_what_it_counts_without_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_flops.analysis.step_flops._SHARE", 100.0)
    chosen = random.Random(0)
    lengths = [chosen.randrange(2, 30) for _ in range(STEPS)]
    net = nn.Linear(IN, OUT)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    counted = []
    with profile_training(net, optimizer, profile_step=1, timing_steps=4, trace=False) as profiler:
        for rows in loader(lengths):
            with FlopCounterMode(display=False) as mode:
                loss = net(rows).square().mean()
            counted.append(mode.get_total_flops())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert counted == [2 * length * IN * OUT for length in lengths]
    assert depth() == 0
    run = profiler.throughput
    assert run is not None
    assert run.steps_counted > 1  # some outside of the window, from their forward on
    assert run.model_flops in (None, 2 * sum(counted))
