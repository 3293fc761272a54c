"""A profiled loop trains as without: same weights, same copies, nothing left, whatever fails on our side."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.adapters.loop import LoopRun
from tests.fake_clock import FakeNow
from tests.left_on_objects import left_on_object
from tests.left_on_torch import torch_state
from tests.loops.nets import BATCH, NARROW, WIDE, Rows
from tests.seams import WORDS, broken_at, seams


class Outcome:
    """Everything of one loop that a profiler might change."""

    def __init__(self, *, profiled: bool, steps: int = 9, scaled: bool = False, **settings: Any) -> None:
        torch.manual_seed(5)
        self.net = nn.Sequential(nn.Linear(WIDE, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, NARROW))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        before = torch_state()
        self.losses: list[float] = []
        profiling = profile_training(self.net, self.optimizer, **settings) if profiled else nullcontext()
        data = DataLoader(Rows(steps, FakeNow()), batch_size=BATCH, shuffle=True)
        with profiling as profiler:
            for place, rows in enumerate(data if profiler is None else profiler.batches(data)):
                loss = self.net(rows).square().mean()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad()
                schedule.step()
                self.losses.append(float(loss.detach()))
                if place % 4 == 3:
                    self.net.eval()
                    with torch.no_grad():
                        self.losses.append(float(self.net(rows).sum()))
                    self.net.train()
        self.profiler = profiler
        self.left = (left_on_object(self.net), left_on_object(self.optimizer), torch_state() == before)

    @property
    def training(self) -> tuple[Any, ...]:
        weights = [weight.tolist() for weight in self.net.parameters()]
        state = self.optimizer.state_dict()
        moments = [
            {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in one.items()}
            for one in state["state"].values()
        ]
        return weights, self.losses, torch.get_rng_state().tolist(), moments, state["param_groups"]


@pytest.fixture(scope="module")
def plain() -> Iterator[Outcome]:
    yield Outcome(profiled=False)


@pytest.fixture(scope="module")
def plain_training(plain: Outcome) -> tuple[Any, ...]:
    plain = Outcome(profiled=False)  # nothing has drawn a number since
    return plain.training


@pytest.mark.parametrize("trace", [False, True])
def test_losses_weights_and_random_numbers_are_the_same_and_nothing_is_left(
    plain_training: tuple[Any, ...], trace: bool
) -> None:
    outcome = Outcome(profiled=True, timing_steps=2, trace=trace)
    training = outcome.training
    assert outcome.profiler is not None and outcome.profiler.profile is not None
    assert training == plain_training
    assert outcome.left == ([], [], True)


@pytest.mark.parametrize("seam", seams(LoopRun))
def test_a_failure_at_a_seam_is_one_warning_and_the_loop_goes_on_untouched(
    seam: str, plain_training: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with broken_at(seam, LoopRun) as broken:
        outcome = Outcome(profiled=True, timing_steps=2, trace=False)
    assert outcome.training == plain_training
    assert outcome.left == ([], [], True)
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and WORDS in record.getMessage()
    ]
    assert len(warnings) == int(broken.called), warnings


_LOADS_WITHOUT_US = """
import sys
sys.modules["lightning_flops"] = None
import pickle, torch
net, optimizer = pickle.load(open(sys.argv[1], "rb"))
loss = net(torch.ones(1, 16)).sum()
loss.backward()
optimizer.step()
print(len(net._forward_hooks))
"""


def test_copies_and_pickles_made_inside_the_loop_work_without_this_package(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(WIDE, NARROW))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows, calls = torch.randn(BATCH, WIDE), list[int]()
    file = tmp_path / "net.pkl"
    with profile_training(net, optimizer, profile_step=0, timing_steps=2) as profiler:
        net(rows)  # the step that is counted has begun
        file.write_bytes(pickle.dumps((net, optimizer)))
        assert b"lightning_flops" not in file.read_bytes()
        twin, _ = copy.deepcopy((net, optimizer))
        twin.register_forward_hook(lambda *_: calls.append(1))
        assert torch.equal(twin(rows), net(rows)) and calls == [1]
        assert profiler.run is not None
    loaded = subprocess.run(
        [sys.executable, "-c", _LOADS_WITHOUT_US, str(file)], capture_output=True, text=True, check=True
    )
    assert loaded.stdout == "1\n"  # a function that does nothing


def test_a_profiler_that_was_dropped_ends_itself_and_leaves_nothing() -> None:
    gc.collect()  # what another test has dropped
    before = torch_state()
    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    profiler = profile_training(net, optimizer, timing_steps=1)
    profiler.start()
    run = weakref.ref(profiler.run)
    net(torch.ones(1, WIDE)).sum().backward()
    optimizer.step()
    del profiler
    gc.collect()
    assert run() is None
    assert (left_on_object(net), left_on_object(optimizer), torch_state() == before) == ([], [], True)


@pytest.mark.parametrize("seam", ["fetch_begins", "forward_begins", "backward_ends", "update_begins"])
def test_ctrl_c_is_the_users_and_nothing_is_left(seam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = torch_state()
    monkeypatch.setattr(LoopRun, seam, interrupted)
    with pytest.raises(KeyboardInterrupt), profile_training(net, optimizer):
        for rows in DataLoader(Rows(6, FakeNow()), batch_size=BATCH):
            net(rows).sum().backward()
            optimizer.step()
    assert (left_on_object(net), left_on_object(optimizer), torch_state() == before) == ([], [], True)
