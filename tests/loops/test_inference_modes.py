"""An inference mode of the user's in which we begin, or cease, to look: torch's flags are right when it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import profile_training

ROWS, IN, OUT, ROLLOUT, STEPS = 8, 16, 4, 5, 120
FORWARD = 2 * ROWS * IN * OUT
STEP = 2 * FORWARD  # the input needs no gradient


def new_net() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(IN, OUT)
    return net, torch.optim.SGD(net.parameters(), lr=0.01)


def loader() -> DataLoader[Any]:
    return DataLoader(torch.ones(STEPS * ROWS, IN), batch_size=ROWS)  # type: ignore[arg-type]


def test_a_forward_that_raises_in_an_inference_mode_ends_nothing_but_itself() -> None:
    net, optimizer = new_net()
    with profile_training(net, optimizer, profile_step=1, timing_steps=2, trace=False) as profiler:
        for step, rows in enumerate(loader()):
            net(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:  # the step that is counted has begun
                with pytest.raises(RuntimeError), torch.inference_mode():
                    net(torch.ones(ROWS, IN + 1))
                assert torch.zeros(2).add(1).tolist() == [1, 1]
    assert profiler.profile is not None
    assert profiler.profile.flops.model == STEP


def test_a_step_that_begins_in_an_inference_mode_is_counted_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_flops.analysis.step_flops._SHARE", 100.0)
    net, optimizer = new_net()
    with profile_training(net, optimizer, profile_step=2, timing_steps=2, trace=False) as profiler:
        for step in range(STEPS):
            if step % 4 == 0:
                with torch.inference_mode():
                    for _ in range(ROLLOUT):
                        net(torch.ones(1, IN))
            net(torch.ones(ROWS, IN)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = profiler.throughput
    assert run is not None
    assert run.steps_counted > 3
    assert run.model_flops == STEPS * STEP + STEPS // 4 * ROLLOUT * (FORWARD // ROWS)
