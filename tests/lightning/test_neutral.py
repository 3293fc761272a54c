"""The run does not notice: nothing is left behind, no failure of ours reaches the training, copies can be made."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerCallback
from lightning_flops.measure.counting.flop_counter import PartCounter
from lightning_flops.measure.recorder import Recorder
from tests.lightning.nets import MakeTrainer, footprint, loader, new_net
from tests.results import profile_of


def left_after(trainer: MakeTrainer, root: str, *callbacks: Any) -> dict[str, Any]:
    """What a fit of twelve batches leaves on everything of it."""
    run, net = trainer(*callbacks), new_net(root)
    run.fit(net, loader(12))
    assert len(net.losses) == 12
    return footprint(run, net)


def broken(*args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("broken on purpose")


def test_a_failure_while_the_profiler_detaches_leaves_nothing_of_the_rest(
    root: str, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, abandon = left_after(trainer, root), Recorder.abandon

    def abandoned_and_broken(recorder: Recorder) -> None:
        abandon(recorder)
        broken()

    with monkeypatch.context() as patched:
        patched.setattr(PartCounter, "enter", broken)
        patched.setattr(Recorder, "abandon", abandoned_and_broken)
        assert left_after(trainer, root, FlopsProfilerCallback(timing_steps=3)) == expected
    assert any("something of the FLOPs profiler could not be removed" in said for said in caplog.messages)


def test_an_interrupt_while_the_profiler_attaches_arrives_and_leaves_nothing(
    root: str, trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    def left(*callbacks: Any, **hooks: Any) -> Any:
        run, net = trainer(*callbacks), new_net(root)
        vars(net).update(hooks)
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            run.fit(net, loader(12))
        return footprint(run, net)

    expected = left(on_train_start=interrupted)
    expected["module "].remove("on_train_start")
    monkeypatch.setattr("lightning_flops.run.window.Recorder", interrupted)
    assert left(FlopsProfilerCallback(timing_steps=3)) == expected


def test_two_callbacks_in_one_trainer_count_the_same_and_leave_nothing(root: str, trainer: MakeTrainer) -> None:
    both = [FlopsProfilerCallback(timing_steps=3), FlopsProfilerCallback(profile_step=2, timing_steps=4)]
    assert left_after(trainer, root, *both) == left_after(trainer, root)
    first, second = map(profile_of, both)
    assert first.flops == second.flops


def test_a_finished_fit_keeps_no_hold_on_trainer_or_model_and_writes_nothing_into_checkpoints(
    root: str, trainer: MakeTrainer, tmp_path: Path
) -> None:
    callback = FlopsProfilerCallback(timing_steps=1)
    run, net = trainer(callback), new_net(root)
    run.fit(net, loader(6))
    assert callback.profile is not None
    run.save_checkpoint(tmp_path / "a.ckpt")
    assert torch.load(tmp_path / "a.ckpt", weights_only=True).get("callbacks", {}) == {}
    for method in ("log", "log_dict"):  # the model's, which the Trainer leaves on every callback
        delattr(callback, method)
    gone = [weakref.ref(run), weakref.ref(net)]
    del run, net
    gc.collect()
    assert [one() for one in gone] == [None, None]


def test_the_callback_can_be_pickled_and_copied_at_any_time(root: str, trainer: MakeTrainer) -> None:
    callback = FlopsProfilerCallback(profile_step=2, timing_steps=1)
    inside = [pickle.loads(pickle.dumps(callback))]
    net = new_net(root)
    step = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        inside.extend((pickle.loads(pickle.dumps(callback)), copy.deepcopy(callback)))
        return step(batch, batch_idx)

    net.training_step = training_step
    trainer(callback).fit(net, loader(8))
    assert {copied.config for copied in inside} == {callback.config}
    assert pickle.loads(pickle.dumps(callback)).profile == profile_of(callback)
