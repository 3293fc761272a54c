"""Clipping and dropped gradients, heard in a window: whose they are, and what a user's own use of them is left as."""

from __future__ import annotations

import copy
import pickle
import threading
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import utils as dynamo
from torch.nn.utils import clip_grad_norm_ as imported_by_name
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from tests.fake_clock import FakeNow
from tests.left_on_objects import is_ours
from tests.left_on_torch import torch_state
from tests.loops.nets import BATCH, NARROW, UPDATE_SEC, WIDE, Net, SlowSGD, loader, loss_of
from tests.results import profile_of

HEARD = "clip_grad_norm_ clip_grad_value_".split()
"""Functions of ``torch.nn.utils`` that are ours in a counted step, and timed ones."""


@pytest.fixture(autouse=True)
def compiled_nothing() -> None:
    """What another test has compiled is no more."""
    torch._dynamo.reset()


class Steps:
    """A small training that is profiled; what a test does in each step may look at what is on torch then."""

    def __init__(self, kind: Any = torch.optim.SGD) -> None:
        torch.manual_seed(0)
        self.net = nn.Linear(WIDE, NARROW)
        self.optimizer = kind(self.net.parameters(), lr=0.1)
        self.heard = 0  # steps in which clipping was ours

    def run(self, in_step: Any) -> None:
        before = torch_state()
        with profile_training(self.net, self.optimizer, profile_step=1, timing_steps=2, trace=False) as profiler:
            for rows in DataLoader(torch.ones(12 * BATCH, WIDE), batch_size=BATCH):  # type: ignore[arg-type]
                self.net(rows).square().mean().backward()
                self.heard += all(is_ours(getattr(nn.utils, name)) for name in HEARD)
                in_step()
                self.optimizer.step()
                self.optimizer.zero_grad()
        assert self.heard >= 3  # the counted step, and those that are timed
        assert torch_state() == before
        assert profile_of(profiler).flops.backward == 2 * BATCH * WIDE * NARROW


def test_what_a_program_pickles_and_copies_inside_the_window_is_its_own() -> None:
    """As a DataLoader does for the workers that it spawns, and a checkpoint of settings."""
    steps, seen = Steps(), list[Any]()

    def in_step() -> None:
        clip = partial(nn.utils.clip_grad_norm_, max_norm=1.0)
        data = pickle.dumps((clip, nn.utils.clip_grad_value_, steps.optimizer, type(steps.optimizer).zero_grad))
        assert b"lightning_flops" not in data
        seen.append((data, copy.deepcopy(steps.optimizer)))

    steps.run(in_step)
    for data, copied in seen:
        clip, by_value, optimizer, _ = pickle.loads(data)
        assert (clip.func, by_value) == (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_)
        for one in (copied, optimizer):
            one.zero_grad()
            assert not any(map(is_ours, vars(one).values()))


class Compiled:
    """An update that clips, and what of it is compiled."""

    def __init__(self, parts: str) -> None:
        torch._dynamo.reset()
        dynamo.clear_compilation_metrics()
        dynamo.counters.clear()
        self.steps = Steps()
        for name in parts.split():
            setattr(self, name, torch.compile(getattr(self, name), backend="eager", fullgraph=True))

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.steps.net.parameters(), 1.0)

    def by_value(self) -> None:
        nn.utils.clip_grad_value_(self.steps.net.parameters(), 0.5)

    def by_name(self) -> None:
        imported_by_name(self.steps.net.parameters(), 1.0)

    def clear(self) -> None:
        self.steps.net.zero_grad()

    def train(self, first: int) -> tuple[Any, ...]:
        """Weights, and what was compiled, how often, in which pieces. The *first* so many steps compile nothing."""
        data: Any = torch.ones(12 * BATCH, WIDE)
        for place, rows in enumerate(DataLoader(data, batch_size=BATCH)):
            self.steps.net(rows).square().mean().backward()
            if place >= first:
                self.clip()
                self.by_value()
                self.by_name()
                self.steps.optimizer.step()
                self.clear()
        weights = [one.tolist() for one in self.steps.net.parameters()]
        made = [(one.co_name, one.recompile_reason) for one in dynamo.get_compilation_metrics()]
        return weights, made, dict(dynamo.counters["graph_break"])


@pytest.mark.parametrize("first", [0, 3])  # before the window, and in it
@pytest.mark.parametrize("parts", ["clip", "by_value", "by_name", "clear"])
def test_a_compiled_update_is_neither_compiled_anew_nor_broken_in_pieces(parts: str, first: int) -> None:
    bare = Compiled(parts).train(first)
    loop, before = Compiled(parts), torch_state()
    with profile_training(loop.steps.net, loop.steps.optimizer, profile_step=2, timing_steps=4, trace=False):
        assert loop.train(first) == bare
    assert torch_state() == before
    assert bare[1]
    torch._dynamo.reset()


CLEAR_SEC, CLIP_SEC, LOGGED_SEC = 0.75, 0.25, 3.0


class ClearsSlowly(SlowSGD):
    """Takes its time to drop gradients, and raises if it is told to."""

    raises = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._now.sleep(CLEAR_SEC)
        super().zero_grad(set_to_none)
        if self.raises:
            raise ValueError("the user's")


class ClearsInItsWay(ClearsSlowly):
    """A subclass whose method is the parent's."""


@pytest.fixture
def slow_norm(now: FakeNow, monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.linalg.vector_norm

    def slowly(*args: Any, **given: Any) -> Any:
        now.sleep(CLIP_SEC)
        return norm(*args, **given)

    monkeypatch.setattr(torch.linalg, "vector_norm", slowly)


@pytest.mark.parametrize("kind", [ClearsSlowly, ClearsInItsWay])
def test_another_optimizers_gradients_and_a_thread_that_clips_are_not_of_the_update(
    kind: Any, now: FakeNow, slow_norm: None, windows: list[Any]
) -> None:
    net, clips = Net(now), partial(nn.utils.clip_grad_norm_, max_norm=1.0, foreach=True)
    optimizer, other = kind(net.parameters(), now), ClearsSlowly(nn.Linear(2, 2).parameters(), now)
    with profile_training(net, optimizer, profile_step=1, timing_steps=2, trace=False):
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            other.zero_grad()
            thread = threading.Thread(target=clips, args=(list(net.parameters()),))
            thread.start()
            thread.join()
            optimizer.step()
            optimizer.zero_grad()
    (window,) = windows
    parts = [(step.seconds.optimizer, step.seconds.other) for step in window.timed_steps]
    assert parts == 2 * [(UPDATE_SEC + CLEAR_SEC, CLEAR_SEC + CLIP_SEC)]


def test_what_dropping_gradients_raises_is_the_users_and_what_follows_is_not_of_the_update(
    now: FakeNow, windows: list[Any]
) -> None:
    net = Net(now)
    optimizer, before = ClearsSlowly(net.parameters(), now), torch_state()
    optimizer.raises = True
    with profile_training(net, optimizer, profile_step=1, timing_steps=2, trace=False):
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
            with pytest.raises(ValueError, match="the user's"):
                optimizer.zero_grad()
            now.sleep(LOGGED_SEC)
    (window,) = windows
    parts = [(step.seconds.optimizer, step.seconds.other) for step in window.timed_steps]
    assert parts == 2 * [(UPDATE_SEC + CLEAR_SEC, LOGGED_SEC)]
    assert torch_state() == before
