"""Seconds slept in each place of a loop come back under the name of that place, exactly, in every kind of loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lightning_flops import FlopsProfilerCallback
from lightning_flops.records import PhaseSeconds
from tests.fake_clock import FakeNow
from tests.lightning.nets import BATCH, loader, new_gan, new_net

MakeTrainer = Callable[..., Any]

HOOKS: dict[str, tuple[float, str]] = {
    "on_train_batch_start": (16.0, "other"),
    "on_before_zero_grad": (32.0, "other"),
    "optimizer_zero_grad": (64.0, "optimizer"),
    "on_before_backward": (128.0, "other"),
    "on_after_backward": (256.0, "other"),
    "on_before_optimizer_step": (512.0, "other"),
    "configure_gradient_clipping": (1024.0, "optimizer"),
    "lr_scheduler_step": (2048.0, "other"),
    "transfer_batch_to_device": (4096.0, "transfer"),
    "on_train_batch_end": (8192.0, "other"),
}
"""What a user may write into a module, how long it takes here, and what that time is."""

FORWARD, BACKWARD, OPTIMIZER, FETCH = 2.0, 4.0, 8.0, 0.5


def profiler() -> FlopsProfilerCallback:
    return FlopsProfilerCallback(profile_step=1, timing_steps=2, trace=False, monitor=False)


def hooked(net: Any, now: FakeNow) -> Any:
    """*net*, each of whose hooks takes its time."""

    def slow(name: str, seconds: float) -> None:
        original = getattr(net, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            now.sleep(seconds)
            return original(*args, **kwargs)

        # Lightning looks for overridden hooks in the class.
        setattr(type(net), name, hook)

    for name, (seconds, _) in HOOKS.items():
        slow(name, seconds)
    configure = net.configure_optimizers

    def configure_optimizers() -> Any:
        optimizer = configure()
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    net.configure_optimizers = configure_optimizers
    return net


def hook_seconds(phase: str, **times: int) -> float:
    """Seconds of a step in the hooks that are *phase*, each called once or as often as *times* says."""
    return sum(seconds * times.get(name, 1) for name, (seconds, kind) in HOOKS.items() if kind == phase)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_hook_of_a_step_has_its_part_in_all_micro_steps(
    root: str, trainer: MakeTrainer, now: FakeNow, windows: list[Any], accumulate: int
) -> None:
    run = trainer(profiler(), accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
    run.fit(hooked(new_net(root, now=now), now), loader(8 * accumulate, on_fetch=lambda: now.sleep(FETCH)))
    (window,) = windows
    of_micro_steps = dict.fromkeys(
        ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"), accumulate
    )
    assert [step.index for step in window.timed_steps] == [4, 5]
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(
            data_wait=accumulate * BATCH * FETCH,
            transfer=hook_seconds("transfer", transfer_batch_to_device=accumulate),
            forward=accumulate * FORWARD,
            backward=accumulate * BACKWARD,
            optimizer=OPTIMIZER + hook_seconds("optimizer"),
            other=hook_seconds("other", **of_micro_steps),
        )
    assert window.mixed_phases == ()


def test_a_gans_two_optimizers_add_up(root: str, trainer: MakeTrainer, now: FakeNow, windows: list[Any]) -> None:
    net = new_gan(root, now=now)
    net.on_before_optimizer_step = lambda optimizer: now.sleep(16.0)
    net.on_after_backward = lambda: now.sleep(32.0)
    trainer(profiler()).fit(net, loader(8, on_fetch=lambda: now.sleep(FETCH)))
    (window,) = windows
    for step in window.timed_steps:
        # What Lightning runs around a manual backward is in the training step, which is the forward.
        assert step.seconds == PhaseSeconds(
            data_wait=BATCH * FETCH,
            forward=2 * (FORWARD + 32.0),
            backward=2 * BACKWARD,
            optimizer=2 * OPTIMIZER,
            other=2 * 16.0,
        )
