"""A fit inside of the fit, a finder's or another Trainer's: neither its steps, nor its FLOPs, nor its time are ours."""

from __future__ import annotations

import importlib
from typing import Any

import pytest

from lightning_flops import FlopsProfilerCallback
from tests.fake_clock import FakeNow
from tests.lightning.nets import BATCH, MakeTrainer, batch_flops, loader, new_net
from tests.results import profile_of, throughput_of

STEP_SEC = 2.0 + 4.0 + 8.0


def probing(root: str, fits: Any, *, at: int | None) -> Any:
    """A callback that calls *fits* as each epoch starts, or after the batch *at*."""
    base: Any = importlib.import_module(root).Callback

    class Probing(base):  # type: ignore[misc]
        def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
            if at is None:
                fits(trainer, model)

        def on_train_batch_end(self, trainer: Any, model: Any, outputs: Any, batch: Any, place: int) -> None:
            if at == place:
                fits(trainer, model)

    return Probing()


@pytest.mark.parametrize("at", [None, 2])
@pytest.mark.parametrize("profile_step", [0, 3])
def test_another_trainers_fit_is_no_part_of_a_step(
    trainer: MakeTrainer, now: FakeNow, windows: list[Any], root: str, at: int | None, profile_step: int
) -> None:
    others = []

    def fits(*_: Any) -> None:
        others.append(1)
        trainer().fit(new_net(root, now=now), loader(3))

    callback = FlopsProfilerCallback(profile_step=profile_step, timing_steps=4)
    trainer(probing(root, fits, at=at), callback, max_epochs=4).fit(new_net(root, now=now), loader(4))
    (window,) = windows
    assert len(others) == 4
    (counted,) = window.counted_steps
    assert (counted.flops, counted.samples) == (batch_flops(), BATCH)
    for step in window.timed_steps:
        assert step.seconds.total == STEP_SEC
    timing = profile_of(callback).timing
    assert timing is not None
    # At most one of the four timed steps begins an epoch, and one ends in the callback.
    assert timing.excluded_sec == {"another fit" if at else "epoch restart": 3 * STEP_SEC}
    assert throughput_of(callback).model_flops == 16 * batch_flops().total


def test_a_finder_takes_our_callback_off_its_trainer_and_its_steps_are_not_ours(
    trainer: MakeTrainer, now: FakeNow, windows: list[Any], root: str
) -> None:
    finder: Any = importlib.import_module(f"{root}.callbacks").LearningRateFinder

    class AtEachEpoch(finder):  # type: ignore[misc]
        def on_fit_start(self, *_: Any) -> None:
            return

        def on_train_epoch_start(self, trainer: Any, model: Any) -> None:
            self.lr_find(trainer, model)

    net = new_net(root, now=now)
    net.lr = 0.1
    callback = FlopsProfilerCallback(profile_step=0, timing_steps=4)
    trainer(AtEachEpoch(num_training_steps=5), callback, max_epochs=3).fit(net, loader(4))
    (window,) = windows
    (counted,) = window.counted_steps
    assert (counted.flops, counted.samples) == (batch_flops(), BATCH)
    assert [step.seconds.total for step in window.timed_steps] == [STEP_SEC] * 4
    assert throughput_of(callback).model_flops == 12 * batch_flops().total
