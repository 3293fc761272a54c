"""Real runs compared: what was changed in the second is named, with its cause and its size.

What is changed takes 100 ms in one part of the step, more than a machine that does other things adds to that part.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import Profile, compare_profiles, profile_training
from lightning_flops.report.compare_text import render_comparison
from tests.results import profile_of

BATCH, WIDTH = 16, 64
CHANGE_SEC = 0.1
MS = 1e6
TOLERANCE_MS = 40
"""What a busy machine adds to one of two runs, or to a single step of it, without that being seen in its spread."""


class Block(nn.Module):
    def __init__(self, sleep_sec: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self._sleep_sec = sleep_sec

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        time.sleep(self._sleep_sec)
        result: torch.Tensor = self.down(self.up(rows).relu())
        return result


def profile(*, sleep_sec: float = 0.0) -> Profile:
    """The profile of a run whose second block takes so much longer."""
    net = nn.Sequential(OrderedDict(first=Block(0.0), second=Block(sleep_sec)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with profile_training(net, optimizer, profile_step=2, timing_steps=8) as profiler:
        for rows in DataLoader(torch.ones(20 * BATCH, WIDTH), batch_size=BATCH):  # type: ignore[arg-type]
            net(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return profile_of(profiler)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Several threads that wait for one another take any time on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def plain(one_thread: None) -> Profile:
    """The run that the others are held against."""
    return profile()


def is_change(ns: int, noise_ns: int | None) -> bool:
    """Whether it is what was changed, but for the noise of the steps and what else the machine did."""
    assert noise_ns is not None
    return abs(ns - 1e9 * CHANGE_SEC) < max(noise_ns, TOLERANCE_MS * MS) and ns > 0


def test_a_slowed_module_is_named_with_its_size(plain: Profile) -> None:
    comparison = compare_profiles(plain, profile(sleep_sec=CHANGE_SEC))
    assert comparison.settings == {} and comparison.step.work_ns == 0
    (forward,) = (part for part in comparison.parts if part.name == "forward")
    assert is_change(forward.efficiency_ns, forward.noise_ns)
    slowed = max(comparison.modules, key=lambda one: one.difference_ns)
    assert slowed.b is not None and slowed.b.name == "second"
    assert slowed.efficiency_ns == slowed.difference_ns and is_change(slowed.efficiency_ns, slowed.noise_ns)


def test_two_runs_of_one_program_do_the_same_work(plain: Profile) -> None:
    comparison = compare_profiles(plain, profile())
    assert comparison.settings == {} and comparison.step.work_ns == 0
    assert all(one.a and one.b and one.a.name == one.b.name for one in comparison.modules)
    assert not any(one.work_ns or one.other_counts for one in comparison.modules)
    counts = ("forward_flops", "backward_flops", "hardware_flops", "params")
    # What is claimed beyond the steps' own noise is no more than another start on a busy machine does.
    beyond = [one for one in (comparison.step, *comparison.parts) if one.beyond_noise is not False]
    assert all(abs(one.difference_ns) < TOLERANCE_MS * MS for one in beyond)
    text = render_comparison(comparison)
    assert "Set up alike: " in text and ("within noise" in text or comparison.step in beyond)
    ratios = {one.name: (one.ratio, one.ends) for one in comparison.figures}
    assert {name: ratios[name] for name in counts} == dict.fromkeys(counts, (1.0, (1.0, 1.0)))
