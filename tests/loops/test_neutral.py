"""A profiled loop trains as without: same weights, same copies, nothing left, whatever fails on our side."""

from __future__ import annotations

import copy
import gc
import io
import logging
import pickle
import signal
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.instrument.torch_private.compiler import is_compiled_in_place
from tests.fake_clock import FakeNow
from tests.left_on_objects import left_on_object
from tests.left_on_torch import torch_state
from tests.loops.nets import BATCH, NARROW, WIDE, Rows
from tests.session.seams import broken_at, each_seam

WORDS = "broken on purpose"
DOORS = (
    "lightning_flops.adapters.plain_loop",
    "lightning_flops.adapters.loop_batches",
    "lightning_flops.adapters.loop_steps",
    "lightning_flops.adapters.loader_taps",
    "lightning_flops.adapters.plain_context",
)


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


@pytest.mark.parametrize("seam", each_seam("loop", *DOORS))
def test_a_failure_at_a_seam_is_one_warning_and_the_loop_goes_on_untouched(
    seam: str, plain_training: tuple[Any, ...], caplog: pytest.LogCaptureFixture
) -> None:
    with broken_at(seam, RuntimeError(WORDS)) as broken:
        outcome = Outcome(profiled=True, timing_steps=2, trace=False)
    assert outcome.training == plain_training
    assert outcome.left == ([], [], True)
    warnings = [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= logging.WARNING and WORDS in record.getMessage()
    ]
    assert len(warnings) == int(broken.called), warnings


def test_copies_and_pickles_made_inside_the_loop_are_as_without() -> None:
    net = nn.Sequential(nn.Linear(WIDE, NARROW))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rows = torch.randn(BATCH, WIDE)
    without = pickle.dumps(net), pickle.dumps(optimizer)
    calls: list[int] = []
    with profile_training(net, optimizer, profile_step=0, timing_steps=2):
        net(rows)  # the step that is counted has begun
        assert (pickle.dumps(net), pickle.dumps(optimizer)) == without
        saved = io.BytesIO()
        torch.save(net, saved)
        assert b"lightning_flops" not in saved.getvalue()
        twin = copy.deepcopy(net)
        twin.register_forward_hook(lambda *_: calls.append(1))
        assert vars(twin).keys() == vars(net).keys() - {"_compiled_call_impl"}
        assert torch.equal(twin(rows), net(rows)) and calls == [1]
        assert not is_compiled_in_place(net)
    assert vars(copy.deepcopy(net)).keys() == vars(net).keys()


def test_replicas_of_data_parallel_run_themselves() -> None:
    net = nn.Sequential(nn.Linear(WIDE, NARROW))
    with profile_training(net, torch.optim.SGD(net.parameters(), lr=0.1)):
        replica = net._replicate_for_data_parallel()
        assert "_compiled_call_impl" not in vars(replica) and "_compiled_call_impl" in vars(net)


def test_a_compiled_step_stays_one_graph_and_is_compiled_once() -> None:
    from torch._dynamo.testing import CompileCounter

    frames = []
    for profiled in (False, True):
        torch._dynamo.reset()
        net = nn.Sequential(nn.Linear(WIDE, NARROW))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        counter = CompileCounter()
        loss_of = torch.compile(lambda rows, net=net: net(rows).square().mean(), backend=counter)
        profiling = profile_training(net, optimizer, timing_steps=2, trace=False) if profiled else nullcontext()
        with profiling:
            for rows in DataLoader(Rows(8, FakeNow()), batch_size=BATCH):
                loss_of(rows).backward()
                optimizer.step()
        frames.append((counter.frame_count, counter.op_count))
    assert frames[0] == frames[1] == (1, 3)


def test_whoever_keeps_how_loaders_fetched_in_the_loop_fetches_as_without_when_it_is_over() -> None:
    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    iterators = type(iter(DataLoader(Rows(1, FakeNow()), batch_size=BATCH)))
    before = vars(iterators.__mro__[1])["__next__"]
    with profile_training(net, optimizer, profile_step=0, timing_steps=1, trace=False) as profiler:
        for rows in DataLoader(Rows(6, FakeNow()), batch_size=BATCH):
            net(rows).sum().backward()
            optimizer.step()
        kept = iterators.__next__
        session = profiler._loop.session  # type: ignore[union-attr]
    assert kept is not before is iterators.__next__
    told = session.log.fetches
    later = iter(DataLoader(Rows(3, FakeNow()), batch_size=BATCH))
    assert [kept(later).shape for _ in range(3)] == [(BATCH, WIDE)] * 3
    with pytest.raises(StopIteration):
        kept(later)
    assert session.log.fetches == told


@pytest.mark.parametrize("several", [False, True], ids=["a model", "several models"])
def test_a_profiler_whose_loop_is_over_keeps_neither_the_model_nor_the_optimizer(
    several: bool, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = {"net": net} if several else net
    profiler = profile_training(model, optimizer, profile_step=0, timing_steps=1, trace=False)
    for _ in range(2):  # it can be put around another loop of theirs
        with profiler:
            for rows in DataLoader(Rows(6, FakeNow()), batch_size=BATCH):
                net(rows).sum().backward()
                optimizer.step()
        assert profiler.profile is not None and profiler.profile.params == (WIDE + 1) * NARROW
    gone = weakref.ref(net), weakref.ref(optimizer)
    del net, optimizer, model
    gc.collect()
    assert [one() for one in gone] == [None, None]
    caplog.clear()
    profiler.start()
    assert "this loop is not profiled" in caplog.text and "its model or an optimizer is gone" in caplog.text


def test_a_ctrl_c_while_an_iterator_is_deleted_is_not_lost_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(loop: object, sign: str, in_words: str) -> None:
        told.append(in_words)
        raise KeyboardInterrupt

    told: list[str] = []
    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = torch_state()
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests may ignore Ctrl-C
    try:
        with pytest.raises(KeyboardInterrupt), profile_training(net, optimizer, profile_step=0):
            for rows in DataLoader(Rows(6, FakeNow()), batch_size=BATCH):
                net(rows)
                monkeypatch.setattr("lightning_flops.adapters.plain_loop.PlainLoop.looks_left", interrupted)
                break
            for _ in range(2):  # Python looks for signals where code jumps back
                pass
            told.append("the loop has gone on")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert told == ["the DataLoader's iterator was dropped"]
    assert (left_on_object(net), left_on_object(optimizer), torch_state() == before) == ([], [], True)


def test_ctrl_c_is_the_users_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(WIDE, NARROW)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    before = torch_state()
    monkeypatch.setattr(
        "lightning_flops.adapters.loop_batches.LoopBatches.takes",
        lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt),
    )
    with pytest.raises(KeyboardInterrupt), profile_training(net, optimizer):
        for rows in DataLoader(Rows(6, FakeNow()), batch_size=BATCH):
            net(rows).sum().backward()
            optimizer.step()
    assert (left_on_object(net), left_on_object(optimizer), torch_state() == before) == ([], [], True)
