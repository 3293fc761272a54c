"""A mode of the user's in which a step begins or ends to be counted: torch is as it should be when the mode ends."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torch.utils.flop_counter import FlopCounterMode

from lightning_flops import profile_training
from lightning_flops.measure.torch_private.needed import depth
from tests.left_on_torch import torch_state
from tests.results import profile_of, throughput_of

ROWS, IN, OUT, ROLLOUT, STEPS = 8, 16, 4, 5, 120
FORWARD = 2 * ROWS * IN * OUT
STEP = 2 * FORWARD  # the input needs no gradient


@pytest.fixture
def counts_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps outside of the window may be counted at any cost."""
    monkeypatch.setattr("lightning_flops.analysis.step_flops._SHARE", 100.0)


class Loop:
    """A layer that is trained."""

    def __init__(self, profile_step: int) -> None:
        self.net = nn.Linear(IN, OUT)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.profiler = profile_training(
            self.net, self.optimizer, profile_step=profile_step, timing_steps=2, trace=False
        )

    def update(self, loss: Tensor) -> None:
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_a_forward_that_raises_in_an_inference_mode_ends_nothing_but_itself() -> None:
    loop = Loop(profile_step=1)
    with loop.profiler:
        for step, rows in enumerate(DataLoader(torch.ones(STEPS * ROWS, IN), batch_size=ROWS)):  # type: ignore[arg-type]
            loop.update(loop.net(rows).square().mean())
            if step == 0:  # the step that is counted has begun
                with pytest.raises(RuntimeError), torch.inference_mode():
                    loop.net(torch.ones(ROWS, IN + 1))
                assert torch.zeros(2).add(1).tolist() == [1, 1]
    assert profile_of(loop.profiler).flops.model == STEP


@pytest.mark.usefixtures("counts_often")
def test_a_step_that_begins_in_an_inference_mode_is_counted_whole() -> None:
    loop = Loop(profile_step=2)
    with loop.profiler:
        for step in range(STEPS):
            if step % 4 == 0:
                with torch.inference_mode():
                    for _ in range(ROLLOUT):
                        loop.net(torch.ones(1, IN))
            loop.update(loop.net(torch.ones(ROWS, IN)).square().mean())
    run = throughput_of(loop.profiler)
    assert run.steps_counted > 3
    assert run.model_flops == STEPS * STEP + STEPS // 4 * ROLLOUT * (FORWARD // ROWS)


@pytest.mark.parametrize("data", [range(12), DataLoader(torch.ones(12, IN))])  # type: ignore[arg-type]
def test_phases_in_an_inference_mode_that_is_on_or_off_are_counted_whole(
    data: Iterable[object],
) -> None:
    """A step begins or ends in a mode that is off: at its update, where there is no loader, and else outside."""
    before = torch_state()
    loop = Loop(profile_step=2)
    with loop.profiler:
        for _ in data:
            for training in (True, False):
                with torch.inference_mode(mode=not training):
                    loss = loop.net(torch.ones(ROWS, IN)).square().mean()
                    if training:
                        loop.update(loss)
            assert torch.zeros(2).add(1).tolist() == [1, 1]
    assert profile_of(loop.profiler).flops.model == STEP + FORWARD
    assert torch_state() == before


@pytest.mark.usefixtures("counts_often")
def test_a_counting_mode_around_each_forward_counts_what_it_counts_without_us() -> None:
    chosen = random.Random(0)
    lengths = [chosen.randrange(2, 30) for _ in range(60)]
    loop, counted = Loop(profile_step=1), []
    data: DataLoader[Tensor] = DataLoader([torch.ones(length, IN) for length in lengths], batch_size=None)  # type: ignore[arg-type]
    with loop.profiler:
        for rows in data:
            with FlopCounterMode(display=False) as mode:
                loss = loop.net(rows).square().mean()
            counted.append(mode.get_total_flops())
            loop.update(loss)
    assert counted == [2 * length * IN * OUT for length in lengths]
    assert depth() == 0
    run = throughput_of(loop.profiler)
    assert run.steps_counted > 1  # some outside of the window, from their forward on
    assert run.model_flops in (None, 2 * sum(counted))
