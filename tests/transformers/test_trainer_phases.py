"""Seconds slept in each place of a Trainer's loop come back under the name of that place, exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import data_loader as accelerate_loaders
from transformers import Trainer, TrainerCallback

from lightning_flops.records import PhaseSeconds, WindowRecord
from tests.fake_clock import FakeNow
from tests.transformers.tiny import ROWS, Rows, new_net_trainer, profiler

FETCH, FORWARD, BACKWARD, OPTIMIZER, ZERO_GRAD = 0.5, 2.0, 4.0, 8.0, 16.0

PLACES: dict[str, tuple[float, str]] = {
    "on_step_begin": (32.0, "other"),
    "on_substep_end": (64.0, "other"),
    "on_pre_optimizer_step": (128.0, "other"),
    "on_optimizer_step": (256.0, "other"),
    "on_step_end": (512.0, "other"),
    "compute_loss": (1024.0, "forward"),
    "_prepare_input": (2048.0, "other"),
    "_get_num_items_in_batch": (4096.0, "other"),
    "log": (8192.0, "other"),
    "_save_checkpoint": (16384.0, "checkpoint"),
    "clip_grad_norm_": (32768.0, "optimizer"),
    "lr_scheduler": (65536.0, "other"),
    "send_to_device": (131072.0, "transfer"),
}
"""What a user, a callback or a library does, how long it takes here, and what that time is."""


class SlowEvents(TrainerCallback):
    def __init__(self, now: FakeNow) -> None:
        for name in (name for name in PLACES if name.startswith("on_")):
            setattr(self, name, lambda *_, slept=PLACES[name][0], **__: now.sleep(slept))


class SlowSchedule(torch.optim.lr_scheduler.ConstantLR):
    now: FakeNow

    def step(self, *args: Any) -> None:
        self.now.sleep(PLACES["lr_scheduler"][0])
        super().step(*args)

    def state_dict(self) -> dict[str, Any]:
        return {}


def slow_trainer(now: FakeNow) -> type[Trainer]:
    def slow(name: str) -> Any:
        original = getattr(Trainer, name)

        def method(self: Any, first: Any, *args: Any, **kwargs: Any) -> Any:
            if name != "_prepare_input" or isinstance(first, dict):  # once a batch, and not for each tensor in it
                now.sleep(PLACES[name][0])
            return original(self, first, *args, **kwargs)

        return method

    return type("SlowTrainer", (Trainer,), {name: slow(name) for name in PLACES if hasattr(Trainer, name)})


def seconds_in(part: str, **times: int) -> float:
    return sum(seconds * times.get(name, 1) for name, (seconds, kind) in PLACES.items() if kind == part)


@pytest.fixture
def slow_libraries(now: FakeNow, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((accelerate_loaders, "send_to_device"), (torch.nn.utils, "clip_grad_norm_")):
        monkeypatch.setattr(owner, name, now.slowed(getattr(owner, name), PLACES[name][0]))


@pytest.mark.usefixtures("slow_libraries")
@pytest.mark.parametrize("accumulated", [1, 3])
def test_every_place_has_its_time(accumulated: int, tmp_path: Path, now: FakeNow, windows: list[WindowRecord]) -> None:
    trainer = new_net_trainer(
        tmp_path, SlowEvents(now), profiler(timing_steps=16, monitor=False, lines=False), now=now,
        kind=slow_trainer(now), gradient_accumulation_steps=accumulated,
        rows=Rows(24 * accumulated * ROWS, on_fetch=lambda: now.sleep(FETCH)),
        eval_strategy="steps", eval_steps=1, eval_dataset=Rows(ROWS), save_strategy="steps", save_steps=1,
    )  # fmt: skip
    schedule: Any = trainer.lr_scheduler
    schedule.now, schedule.__class__ = now, SlowSchedule
    trainer.train()
    (window,) = windows
    assert [step.index for step in (*window.timed_steps, *window.plain_steps)] == list(range(4, 20))
    times = accumulated
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(
            data_wait=times * ROWS * FETCH,
            transfer=times * seconds_in("transfer"),
            forward=times * (FORWARD + seconds_in("forward")),
            backward=times * BACKWARD,
            optimizer=OPTIMIZER + ZERO_GRAD + seconds_in("optimizer"),
            other=seconds_in("other", on_substep_end=times - 1, _prepare_input=times),
        )
        assert step.reader_sec == times * ROWS * FETCH
        # An evaluation logs too, and moves its one batch to the device in its loader and in the Trainer.
        evaluation = 1000.0 + PLACES["log"][0] + PLACES["send_to_device"][0] + PLACES["_prepare_input"][0]
        assert step.excluded_sec == {"validation": evaluation, "checkpoint": seconds_in("checkpoint")}
    timed = window.timed_steps[0]
    assert timed.seconds is not None
    for step in window.plain_steps:
        assert step.seconds is not None
        assert (step.seconds.total, step.excluded_sec) == (timed.seconds.total, timed.excluded_sec)
    assert window.mixed_phases == ()


@pytest.mark.usefixtures("slow_libraries")
def test_a_checkpoint_of_the_best_model_so_far_is_in_no_step(
    tmp_path: Path, now: FakeNow, windows: list[WindowRecord]
) -> None:
    """The Trainer decides after the evaluation whether to save, when it has asked its callbacks for the last time."""
    kind = type("Improving", (slow_trainer(now),), {"_determine_best_metric": lambda self, metrics, trial: True})
    trainer = new_net_trainer(
        tmp_path, SlowEvents(now), profiler(monitor=False), now=now, kind=kind, rows=Rows(8 * ROWS), eval_steps=1,
        eval_strategy="steps", eval_dataset=Rows(ROWS), save_strategy="best", metric_for_best_model="loss",
    )  # fmt: skip
    schedule: Any = trainer.lr_scheduler
    schedule.now, schedule.__class__ = now, SlowSchedule
    trainer.train()
    (window,) = windows
    for step in window.timed_steps:
        assert step.excluded_sec["checkpoint"] == seconds_in("checkpoint")
        assert step.seconds is not None and step.seconds.other == seconds_in("other", on_substep_end=0)
