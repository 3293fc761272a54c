"""A profiled loop trains as without: same weights, same copies, nothing left, whatever fails on our side."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.adapters.loop import LoopRun
from lightning_flops.run.monitor import Monitor
from lightning_flops.run.reports import Reports
from lightning_flops.run.run import Run
from tests.fake_clock import FakeNow
from tests.left_on_objects import left_on_object
from tests.left_on_torch import torch_state
from tests.loops.nets import BATCH, NARROW, WIDE, Rows

WORDS = "broken on purpose"


class Outcome:
    """Everything of one loop that a profiler might change."""

    def __init__(self, *, profiled: bool, steps: int = 9, **settings: Any) -> None:
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
                if profiler is not None:
                    profiler.step()
                if place % 4 == 3:
                    self.net.eval()
                    with torch.no_grad(), nullcontext() if profiler is None else profiler.outside_of_steps():
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
def plain_training() -> tuple[Any, ...]:
    return Outcome(profiled=False).training


@pytest.mark.parametrize("trace", [False, True])
def test_losses_weights_and_random_numbers_are_the_same_and_nothing_is_left(
    plain_training: tuple[Any, ...], trace: bool
) -> None:
    outcome = Outcome(profiled=True, timing_steps=2, trace=trace)
    training = outcome.training
    assert outcome.profiler is not None and outcome.profiler.profile is not None
    assert training == plain_training
    assert outcome.left == ([], [], True)


HOOKS: list[tuple[type, str]] = [
    *((LoopRun, name) for name in ("begin", "_batch_begins", "_batch_is_over")),
    *((LoopRun, name) for name in ("_evaluation_begins", "_evaluation_is_over", "_outside", "_forward_is_over")),
    *((Run, name) for name in ("begin", "batch_begins", "batch_done", "fetch_begins", "fetch_ends", "enter", "leave")),
    *((Run, name) for name in ("claim", "outside", "inside", "context", "finish", "_close_window", "_step_begins")),
    *((Monitor, name) for name in ("batch", "go_on", "fetch_begins", "outside", "read", "totals")),
    *((Reports, name) for name in ("begin", "report", "deliver", "await_window", "write_reading", "finish")),
]


@pytest.mark.parametrize(("owner", "name"), HOOKS, ids=lambda one: getattr(one, "__name__", one))
def test_a_failure_of_ours_is_one_warning_and_the_loop_goes_on_untouched(
    owner: type,
    name: str,
    plain_training: tuple[Any, ...],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    called: list[str] = []

    def broken(*_: Any, **__: Any) -> Any:
        called.append(name)
        raise RuntimeError(WORDS)

    monkeypatch.setattr(owner, name, broken)
    outcome = Outcome(profiled=True, timing_steps=2, trace=False, log_every_n_steps=2)
    assert outcome.training == plain_training
    assert outcome.left == ([], [], True)
    said = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING and WORDS in one.getMessage()]
    assert len(said) == bool(called), said


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_ctrl_c_in_a_hook_of_ours_is_the_users_and_nothing_is_left(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise error

    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = torch_state()
    monkeypatch.setattr(LoopRun, "_batch_is_over", interrupted)
    with pytest.raises(error), profile_training(net, optimizer):
        for rows in DataLoader(Rows(6, FakeNow()), batch_size=BATCH):
            net(rows).sum().backward()
            optimizer.step()
    assert (left_on_object(net), left_on_object(optimizer), torch_state() == before) == ([], [], True)


def test_an_exception_of_the_users_leaves_nothing() -> None:
    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = torch_state()
    with pytest.raises(ZeroDivisionError), profile_training(net, optimizer, profile_step=0):
        for rows in DataLoader(Rows(6, FakeNow()), batch_size=BATCH):
            net(rows).sum().backward()
            raise ZeroDivisionError
    assert (left_on_object(net), left_on_object(optimizer), torch_state() == before) == ([], [], True)


@pytest.fixture
def in_a_counted_step() -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    """A model and an optimizer in the middle of the counted step."""
    net = nn.Sequential(nn.Linear(WIDE, NARROW))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with profile_training(net, optimizer, profile_step=0, timing_steps=2, trace=False):
        net(torch.randn(BATCH, WIDE))
        yield net, optimizer


def test_pickles_made_inside_the_loop_load_without_this_package(
    in_a_counted_step: tuple[nn.Module, torch.optim.Optimizer], tmp_path: Path
) -> None:
    (tmp_path / "pickle").write_bytes(pickle.dumps(in_a_counted_step))
    torch.save(in_a_counted_step[0], tmp_path / "saved.pt")
    assert b"lightning_flops" not in (tmp_path / "pickle").read_bytes() + (tmp_path / "saved.pt").read_bytes()
    program = (
        "import pickle, sys, torch\n"
        "sys.modules['lightning_flops'] = None\n"
        "net, optimizer = pickle.load(open('pickle', 'rb'))\n"
        f"net(torch.ones({BATCH}, {WIDE})).sum().backward()\n"
        "optimizer.step()\n"
        f"torch.load('saved.pt', weights_only=False)(torch.ones({BATCH}, {WIDE}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_copies_made_inside_the_loop_carry_nothing_of_ours(
    in_a_counted_step: tuple[nn.Module, torch.optim.Optimizer],
) -> None:
    net, optimizer = in_a_counted_step
    twin, copied = copy.deepcopy(net), copy.deepcopy(optimizer)
    hooks = [one for table in vars(twin).values() if isinstance(table, dict) for one in table.values()]
    assert [one for one in hooks if type(one).__module__.startswith("lightning_flops")] == []
    assert (left_on_object(twin), left_on_object(copied)) == ([], [])
    rows = torch.randn(BATCH, WIDE)
    assert torch.equal(twin(rows), net(rows))


def test_a_profiled_loop_may_use_worker_processes_that_are_spawned(tmp_path: Path) -> None:
    """Its dataset holds the model, so both are pickled for each worker."""
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from lightning_flops import profile_training\n"
        "class Rows(torch.utils.data.Dataset):\n"
        "    def __init__(self, net): self.net = net\n"
        "    def __len__(self): return 16\n"
        "    def __getitem__(self, place): return self.net(torch.ones(4)).detach()\n"
        "if __name__ == '__main__':\n"
        "    net = torch.nn.Linear(4, 4)\n"
        "    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "    with profile_training(net, optimizer, profile_step=1, timing_steps=2, trace=False) as profiler:\n"
        "        data = torch.utils.data.DataLoader(Rows(net), 2, num_workers=1, multiprocessing_context='spawn')\n"
        "        for rows in data:\n"
        "            net(rows).sum().backward()\n"
        "            optimizer.step()\n"
        "    print(profiler.profile.flops.forward)\n"
    )
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{2 * 2 * 4 * 4}\n"


def test_a_profiler_whose_loop_is_over_hears_of_no_other_loop() -> None:
    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = torch.autograd.backward
    with profile_training(net, optimizer, profile_step=0, timing_steps=1, trace=False) as profiler:
        for rows in DataLoader(Rows(6, FakeNow()), batch_size=BATCH):
            net(rows).sum().backward()
            optimizer.step()
        kept: Callable[..., Any] = torch.autograd.backward
    assert kept is not before and torch.autograd.backward is before
    run = profiler.throughput
    kept([net(torch.ones(BATCH, WIDE)).sum()])
    assert run is profiler.throughput and run is not None and run.model_flops == 6 * 2 * 2 * BATCH * WIDE * NARROW


def test_a_profiler_that_is_dropped_keeps_neither_the_model_nor_the_optimizer() -> None:
    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    profiler = profile_training({"net": net}, optimizer, profile_step=0, timing_steps=1, trace=False)
    with profiler:
        for rows in DataLoader(Rows(6, FakeNow()), batch_size=BATCH):
            net(rows).sum().backward()
            optimizer.step()
    assert profiler.profile is not None and profiler.profile.params == (WIDE + 1) * NARROW
    gone = weakref.ref(net), weakref.ref(optimizer)
    del net, optimizer, profiler
    gc.collect()
    assert [one() for one in gone] == [None, None]
