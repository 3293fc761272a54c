"""An inference mode of the user's in which we begin, or cease, to look: torch's flags are right when it ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.instrument.torch_private import dispatch

ROWS, IN, OUT, ROLLOUT, STEPS = 8, 16, 4, 5, 120
FORWARD = 2 * ROWS * IN * OUT
STEP = 2 * FORWARD  # the input needs no gradient


class Counting(dispatch.DispatchMode):
    """Counts operators."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return function(*args, **(kwargs or {}))


def test_a_mode_that_was_pushed_in_inference_modes_sees_what_comes_after_each() -> None:
    mode, rows, end = Counting(), torch.ones(2), vars(torch._C._InferenceMode)["__exit__"]
    with torch.inference_mode():
        with torch.inference_mode():
            dispatch.push(mode)
        rows.neg()
    rows.neg()
    dispatch.remove(mode)
    rows.neg()
    assert mode.operators == 2
    assert vars(torch._C._InferenceMode)["__exit__"] is end


def test_a_mode_that_was_removed_in_inference_modes_leaves_operators_as_they_are() -> None:
    mode, rows = Counting(), torch.ones(2)
    dispatch.push(mode)
    with torch.inference_mode():
        with torch.inference_mode():
            dispatch.remove(mode)
        rows.neg()
    assert torch.zeros(2).add(1).tolist() == [1, 1]  # torch failed here for want of a mode
    assert mode.operators == 0


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
    monkeypatch.setattr("lightning_flops.analysis.count_schedule._SHARE", 100.0)
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


def test_what_runs_before_the_model_is_in_every_counted_step() -> None:
    net, optimizer = new_net()
    teacher = nn.Linear(IN, OUT)
    with profile_training(net, optimizer, profile_step=30, timing_steps=2, trace=False) as profiler:
        for rows in loader():
            with torch.no_grad():
                wanted = teacher(rows)
            (net(rows) - wanted).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = profiler.throughput
    assert run is not None and run.steps_counted > 1
    assert (run.model_flops, run.flops_error) == (STEPS * (STEP + FORWARD), 0.0)
