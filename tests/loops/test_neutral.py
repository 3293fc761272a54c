"""A profiled loop trains as without: same weights, same copies, nothing left, whatever fails on our side."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import utils as dynamo
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.adapters.loop import LoopAdapter
from tests.fake_clock import FakeNow
from tests.left_on_objects import left_on_object
from tests.left_on_torch import torch_state
from tests.loops.nets import BATCH, NARROW, WIDE, Rows
from tests.results import profile_of

WITHOUT_US = """
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
    loaded = subprocess.run([sys.executable, "-c", WITHOUT_US, str(file)], capture_output=True, text=True, check=True)
    assert loaded.stdout == "1\n"  # a function that does nothing


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_torchscript_of_the_model_is_made_in_every_step_and_the_loop_is_heard_on() -> None:
    """In the counted step, in timed and traced ones, and outside of the window."""
    net = nn.Sequential(nn.Linear(WIDE, NARROW))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = torch.randn(BATCH, WIDE)
    makers = {"script": lambda: torch.jit.script(net), "trace": lambda: torch.jit.trace(net, rows)}
    with profile_training(net, optimizer, profile_step=1, timing_steps=2) as profiler:
        for _ in range(10):
            loss = net(rows).sum()
            for name, made in {name: make() for name, make in makers.items()}.items():
                assert torch.equal(made(rows), net(rows)), name
                assert len(made._forward_hooks) + len(made._forward_pre_hooks) == 0, name
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    profile = profile_of(profiler)
    assert profile.flops.backward == 2 * BATCH * WIDE * NARROW
    assert len(profile.timed_steps) == 2 and profile.traced is not None


class AddsOne(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + 1


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_compiled_step_that_makes_torchscript_breaks_its_graph_where_it_does_without_us() -> None:
    def breaks(*, profiled: bool) -> set[str]:
        torch._dynamo.reset()
        dynamo.counters.clear()
        net = nn.Linear(WIDE, NARROW)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step = torch.compile(lambda rows: torch.jit.script(AddsOne())(net(rows).sum()), backend="eager")
        profiler: Any = profile_training(net, optimizer, profile_step=1, timing_steps=2, trace=False)
        with profiler if profiled else nullcontext():
            for _ in range(6):
                step(torch.ones(BATCH, WIDE)).backward()
                optimizer.step()
        return set(dynamo.counters["graph_break"])

    bare = breaks(profiled=False)
    assert breaks(profiled=True) == bare != set()


def test_a_profiler_that_was_dropped_ends_itself_and_leaves_nothing() -> None:
    gc.collect()  # what another test has dropped
    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # torch wraps the step of the first of each class
    before = torch_state()
    profiler = profile_training(net, optimizer, timing_steps=1)
    profiler.start()
    run = weakref.ref(profiler.run)
    net(torch.ones(1, WIDE)).sum().backward()
    optimizer.step()
    del profiler
    gc.collect()
    assert run() is None
    assert (left_on_object(net), left_on_object(optimizer), torch_state()) == ([], [], before)


@pytest.mark.parametrize("seam", ["fetch_begins", "forward_begins", "backward_ends", "update_begins"])
def test_ctrl_c_is_the_users_and_nothing_is_left(seam: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = torch_state()
    monkeypatch.setattr(LoopAdapter, seam, interrupted)
    with pytest.raises(KeyboardInterrupt), profile_training(net, optimizer):
        for rows in DataLoader(Rows(6, FakeNow()), batch_size=BATCH):
            net(rows).sum().backward()
            optimizer.step()
    assert (left_on_object(net), left_on_object(optimizer), torch_state()) == ([], [], before)


def test_phases_in_a_mode_of_the_users_are_counted_whole_and_torch_is_as_it_was() -> None:
    """A step begins and ends to be counted while an inference mode is on, and in one whose forward raises."""
    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = torch_state()
    with profile_training(net, optimizer, profile_step=2, timing_steps=2, trace=False) as profiler:
        for _ in DataLoader(torch.ones(12, WIDE)):  # type: ignore[arg-type]
            for training in (True, False):
                with torch.inference_mode(mode=not training):
                    loss = net(torch.ones(BATCH, WIDE)).square().mean()
                    if training:
                        loss.backward()
                        optimizer.step()
            with pytest.raises(RuntimeError), torch.inference_mode():
                net(torch.ones(BATCH, WIDE + 1))
            assert torch.zeros(2).add(1).tolist() == [1, 1]
    assert profile_of(profiler).flops.model == 3 * 2 * BATCH * WIDE * NARROW  # two forwards, and one product backward
    assert torch_state() == before
