"""Real runs compared: what was changed in the second is named, with its cause and its size."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops import Profile, compare_profiles, profile_training
from lightning_flops.records import OUTSIDE

BATCH, WIDTH, WIDE = 16, 64, 16_384


class Block(nn.Module):
    def __init__(self, wait: Callable[[], None], hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self._wait = wait

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self._wait()
        result: torch.Tensor = self.down(self.up(rows).relu())
        return result


def nothing() -> None:
    """Take no time."""


def profile(*, forward: Callable[[], None] = nothing, hidden: int = WIDTH) -> Profile:
    """The profile of a run of two blocks, the second of which does this in its forward and is so wide."""
    net = nn.Sequential(Block(nothing, WIDTH), Block(forward, hidden))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with profile_training(net, optimizer, profile_step=2, timing_steps=8) as profiler:
        for rows in DataLoader(TensorDataset(torch.rand(20 * BATCH, WIDTH)), batch_size=BATCH):
            net(rows[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert profiler.profile is not None
    return profiler.profile


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads that wait for one another take any time on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_a_slowed_module_and_a_wider_one_are_named_with_their_causes() -> None:
    plain = profile()
    slower = compare_profiles(plain, profile(forward=lambda: time.sleep(0.1)))
    assert slower.settings == () and slower.step.causes.work_ns == 0
    slowed = max(slower.modules, key=lambda one: one.own.difference_ns)
    # 100 ms, more than a machine that does other things adds to that part.
    assert slowed.b is not None and slowed.b.name == "1" and slowed.beyond_noise
    assert slowed.own.efficiency_ns == slowed.own.difference_ns
    assert abs(slowed.own.efficiency_ns - 100e6) < max(slowed.noise_ns or 0, 40e6)

    wider = compare_profiles(plain, profile(hidden=WIDE))
    up = next(one for one in wider.modules if one.b is not None and one.b.name == "1.up")
    assert up.a is not None and up.b is not None
    # Forward 2 x 16 x 64 x hidden, backward twice that.
    assert (up.a.flops, up.b.flops) == (3 * 2 * BATCH * WIDTH * WIDTH, 3 * 2 * BATCH * WIDTH * WIDE)
    assert up.own.work_ns > abs(up.own.efficiency_ns) and "modules" not in up.own.details
    # 256 times the work is the cause, by module and by part; the optimizer has more weights to move.
    works = {one.b.name: one.own.work_ns for one in wider.modules if one.b is not None}
    assert {name for name, work_ns in works.items() if work_ns} <= {"1", "1.up", "1.down", OUTSIDE}
    assert next(one for one in wider.parts if one.name == "optimizer").causes.details["bytes"] > 0
    assert [one.name for one in wider.settings] == ["params", "trainable_params"]
