"""Runs of Lightning compared: with a fake clock every second has its cause, exactly; and real ones by their logs."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest

from lightning_flops import FlopsProfilerCallback, Profile, compare_profiles
from tests.fake_clock import FakeNow
from tests.lightning.nets import loader, new_net

MakeTrainer = Callable[..., Any]
NS = 1_000_000_000


def with_hooks(net: Any, seconds: dict[str, float], sleep: Callable[[float], None]) -> Any:
    """*net*, whose hooks of these names take so long."""
    for name, length in seconds.items():
        setattr(net, name, MethodType(_after(sleep, length, getattr(net, name)), net))
    return net


def _after(sleep: Callable[[float], None], seconds: float, hook: Callable[..., Any]) -> Callable[..., Any]:
    def late(self: Any, *args: Any, **settings: Any) -> Any:
        sleep(seconds)
        return hook(*args, **settings)

    return late


def profile_of(trainer: MakeTrainer, net: Any, **settings: Any) -> Profile:
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=4, **settings)
    trainer(callback).fit(net, loader(14))
    assert callback.profile is not None
    return callback.profile


@pytest.mark.parametrize(
    ("hook", "part", "cause"),
    [
        ("training_step", "forward", "efficiency_ns"),
        ("transfer_batch_to_device", "transfer", "waiting_ns"),
        ("on_train_batch_end", "other", "waiting_ns"),
        ("configure_gradient_clipping", "optimizer", "efficiency_ns"),
    ],
)
def test_each_second_more_has_the_cause_of_its_place(
    root: str, trainer: MakeTrainer, now: FakeNow, hook: str, part: str, cause: str
) -> None:
    a = profile_of(trainer, with_hooks(new_net(root), {hook: 2.0}, now.sleep), trace=False)
    b = profile_of(trainer, with_hooks(new_net(root), {hook: 5.0}, now.sleep), trace=False)
    comparison = compare_profiles(a, b)
    causes = next(one.causes for one in comparison.parts if one.name == part)
    assert causes.difference_ns == 3 * NS == getattr(causes, cause)
    assert comparison.step.causes.difference_ns == 3 * NS == getattr(comparison.step.causes, cause)
    assert comparison.step.causes.work_ns == 0 and comparison.settings == ()
