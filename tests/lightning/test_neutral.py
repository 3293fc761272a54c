"""The run does not notice: same numbers bit for bit, nothing left behind, no failure of ours in the training."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerCallback
from lightning_flops.measure.recorder import Recorder
from tests.lightning.footprint import footprint
from tests.lightning.nets import ROOTS, loader, new_gan, new_net

MakeTrainer = Callable[..., Any]


@pytest.fixture(params=ROOTS)
def root(request: pytest.FixtureRequest) -> str:
    """Both import roots, one after the other: what is here is asked of both in every run of the tests."""
    return str(request.param)


@pytest.mark.parametrize("make", [new_net, new_gan], ids=["automatic", "manual"])
def test_weights_losses_and_random_state_are_the_same_bit_for_bit(
    root: str, trainer: MakeTrainer, make: Callable[..., Any]
) -> None:
    def train(*callbacks: Any) -> tuple[Any, Any, Any]:
        net = make(root)
        torch.manual_seed(11)
        trainer(*callbacks, max_epochs=2).fit(net, loader(8))
        return [p.detach().clone() for p in net.parameters()], getattr(net, "losses", None), torch.get_rng_state()

    weights, losses, random_state = train()
    callback = FlopsProfilerCallback(timing_steps=3)
    profiled_weights, profiled_losses, profiled_random_state = train(callback)
    assert callback.profile is not None
    assert all(torch.equal(a, b) for a, b in zip(weights, profiled_weights, strict=True))
    assert losses == profiled_losses
    assert torch.equal(random_state, profiled_random_state)


@pytest.mark.parametrize("make", [new_net, new_gan], ids=["automatic", "manual"])
@pytest.mark.parametrize("batches", [1, 3, 12])
def test_nothing_is_left_behind_wherever_the_run_ends(
    root: str, trainer: MakeTrainer, make: Callable[..., Any], batches: int
) -> None:
    plain, net = trainer(), make(root)
    plain.fit(net, loader(batches))
    expected = footprint(plain, net)
    run, net = trainer(FlopsProfilerCallback(timing_steps=3)), make(root)
    run.fit(net, loader(batches))
    assert footprint(run, net) == expected


@pytest.mark.parametrize("at", [0, 1, 2, 4, 6])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_nothing_is_left_behind_when_the_users_step_raises(
    root: str, trainer: MakeTrainer, at: int, error: type[BaseException]
) -> None:
    def failing(net: Any) -> Any:
        step = net.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            if batch_idx == at:
                raise error("the user's own")
            return step(batch, batch_idx)

        net.training_step = training_step
        return net

    def train(*callbacks: Any) -> tuple[Any, Any]:
        run, net = trainer(*callbacks), failing(new_net(root))
        with pytest.raises((ValueError, KeyboardInterrupt, SystemExit)):
            run.fit(net, loader(12))
        return run, net

    expected = footprint(*train())
    assert footprint(*train(FlopsProfilerCallback(profile_step=1, timing_steps=3))) == expected


def test_a_failure_while_the_profiler_takes_itself_out_leaves_nothing_of_the_rest(
    root: str, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain_run, plain = trainer(), new_net(root)
    plain_run.fit(plain, loader(12))
    expected = footprint(plain_run, plain)
    abandon = Recorder.abandon

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken on purpose")

    def abandoned_and_broken(recorder: Recorder) -> None:
        abandon(recorder)
        broken()

    monkeypatch.setattr(Recorder, "enter", broken)
    monkeypatch.setattr(Recorder, "abandon", abandoned_and_broken)
    run, net = trainer(FlopsProfilerCallback(timing_steps=3)), new_net(root)
    run.fit(net, loader(12))
    assert any("something of the FLOPs profiler could not be removed" in said for said in caplog.messages)
    monkeypatch.undo()
    assert footprint(run, net) == expected


def test_a_logging_handler_that_fails_on_our_warning_does_not_end_the_training(
    root: str, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise OSError("the log is full")

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken on purpose")

    plain_run, plain = trainer(), new_net(root)
    plain_run.fit(plain, loader(12))
    expected = footprint(plain_run, plain)
    handler, package = Failing(logging.WARNING), logging.getLogger("lightning_flops")
    package.addHandler(handler)
    try:
        monkeypatch.setattr(Recorder, "enter", broken)
        run, net = trainer(FlopsProfilerCallback(timing_steps=3)), new_net(root)
        run.fit(net, loader(12))
    finally:
        package.removeHandler(handler)
    assert len(net.losses) == 12
    assert footprint(run, net) == expected


def test_an_interrupt_while_the_profiler_taps_the_loop_arrives_and_leaves_nothing(
    root: str, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    def left_after(*callbacks: Any, **hooks: Any) -> Any:
        run, net = trainer(*callbacks), new_net(root)
        vars(net).update(hooks)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run.fit(net, loader(12))
        return footprint(run, net)

    expected = left_after(on_train_start=interrupted)
    expected["module "].remove("on_train_start")
    monkeypatch.setattr("lightning_flops.run.window.Recorder", interrupted)
    assert left_after(FlopsProfilerCallback(timing_steps=3)) == expected


def test_two_callbacks_in_one_trainer_count_the_same_and_leave_nothing(root: str, trainer: MakeTrainer) -> None:
    plain, net = trainer(), new_net(root)
    plain.fit(net, loader(14))
    expected = footprint(plain, net)
    both = [FlopsProfilerCallback(timing_steps=3), FlopsProfilerCallback(profile_step=2, timing_steps=4)]
    run, net = trainer(*both), new_net(root)
    run.fit(net, loader(14))
    assert footprint(run, net) == expected
    first, second = (callback.profile for callback in both)
    assert first is not None and second is not None
    assert first.flops == second.flops


def test_a_finished_fit_keeps_no_hold_on_trainer_or_model(root: str, trainer: MakeTrainer) -> None:
    callback = FlopsProfilerCallback(timing_steps=1)
    run, net = trainer(callback), new_net(root)
    run.fit(net, loader(6))
    assert callback.profile is not None
    for method in ("log", "log_dict"):  # the model's, which the Trainer leaves on every callback
        delattr(callback, method)
    gone = [weakref.ref(run), weakref.ref(net)]
    del run, net
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_the_callback_can_be_pickled_and_copied_at_any_time(root: str, trainer: MakeTrainer, tmp_path: Path) -> None:
    callback = FlopsProfilerCallback(profile_step=2, timing_steps=1)
    assert pickle.loads(pickle.dumps(callback)).config == callback.config
    inside: list[FlopsProfilerCallback] = []
    net = new_net(root)
    step = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        inside.append(pickle.loads(pickle.dumps(callback)))
        inside.append(copy.deepcopy(callback))
        return step(batch, batch_idx)

    net.training_step = training_step
    trainer(callback).fit(net, loader(8))
    assert callback.profile is not None
    assert {copied.config for copied in inside} == {callback.config}
    assert pickle.loads(pickle.dumps(callback)).profile == callback.profile


def test_the_callback_writes_nothing_into_checkpoints(root: str, trainer: MakeTrainer, tmp_path: Path) -> None:
    run = trainer(FlopsProfilerCallback(timing_steps=1))
    run.fit(new_net(root), loader(6))
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True).get("callbacks", {}) == {}
