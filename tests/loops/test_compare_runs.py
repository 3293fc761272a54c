"""Real runs compared: what was changed in the second is named, with its cause and its size.

What is changed takes 100 ms in one part of the step, more than a machine that does other things adds to that part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_flops import Comparison, Profile, compare_profiles, profile_training
from lightning_flops.records import OUTSIDE
from lightning_flops.report.compare_text import render_comparison
from lightning_flops.schema.comparison import CausedDifference, ModuleDifference

BATCH, WIDTH = 16, 64
CHANGE_SEC = 0.1
MS = 1e6
TOLERANCE_MS = 40
"""What a busy machine adds to one of two runs, or to a single step of it, without that being seen in its spread."""


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


class Net(nn.Module):
    def __init__(self, wait: Callable[[], None], hidden: int, name: str = "second") -> None:
        super().__init__()
        self.first = Block(lambda: None, WIDTH)
        self.add_module(name, Block(wait, hidden))
        self._name = name

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.get_submodule(self._name)(self.first(rows))
        return result


class Rows(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 20 * BATCH

    def __getitem__(self, place: int) -> torch.Tensor:
        return torch.full((WIDTH,), place / len(self))


def nothing() -> None:
    """Take no time."""


def profile(
    *,
    forward: Callable[[], None] = nothing,
    hidden: int = WIDTH,
    name: str = "second",
) -> Profile:
    """The profile of a run in which each of these places takes its time."""
    net = Net(forward, hidden, name)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with profile_training(net, optimizer, profile_step=2, timing_steps=8) as profiler:
        for rows in DataLoader(Rows(), batch_size=BATCH):
            net(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert profiler.profile is not None
    return profiler.profile


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


def own(comparison: Comparison, name: str) -> ModuleDifference:
    return next(one for one in comparison.modules if one.b is not None and one.b.name == name)


def part(comparison: Comparison, name: str) -> CausedDifference:
    return next(one for one in comparison.parts if one.name == name)


def is_change(ns: int, noise_ns: int | None) -> bool:
    """Whether it is what was changed, but for the noise of the steps and what else the machine did."""
    assert noise_ns is not None
    return abs(ns - 1e9 * CHANGE_SEC) < max(noise_ns, TOLERANCE_MS * MS) and ns > 0


def test_a_slowed_module_is_named_with_its_size(plain: Profile) -> None:
    comparison = compare_profiles(plain, profile(forward=lambda: time.sleep(CHANGE_SEC)))
    assert comparison.settings == () and comparison.step.work_ns == 0
    forward = part(comparison, "forward")
    assert is_change(forward.efficiency_ns, forward.noise_ns)
    slowed = max(comparison.modules, key=lambda one: one.difference_ns)
    assert slowed is own(comparison, "second") and slowed.efficiency_ns == slowed.difference_ns
    assert is_change(slowed.efficiency_ns, slowed.noise_ns)


def test_a_wider_layer_is_more_work_of_that_layer(plain: Profile) -> None:
    wide = 16_384
    comparison = compare_profiles(plain, profile(hidden=wide))
    up = own(comparison, "second.up")
    assert up.a is not None and up.b is not None
    # Forward 2 x 16 x 64 x hidden, backward twice that.
    assert (up.a.flops, up.b.flops) == (3 * 2 * BATCH * WIDTH * WIDTH, 3 * 2 * BATCH * WIDTH * wide)
    assert up.work_ns > abs(up.efficiency_ns) and "modules" not in up.causes
    # 256 times the work is the cause, by module and by part; the optimizer has more weights to move.
    works = {one.b.name: one.work_ns for one in comparison.modules if one.b is not None}
    assert {name for name, work_ns in works.items() if work_ns} <= {"second", "second.up", "second.down", OUTSIDE}
    assert part(comparison, "optimizer").causes["bytes"] > 0
    assert [one.name for one in comparison.settings] == ["params", "trainable_params"]


def test_two_runs_of_one_program_do_the_same_work(plain: Profile) -> None:
    comparison = compare_profiles(plain, profile())
    assert comparison.settings == () and comparison.step.work_ns == 0
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
