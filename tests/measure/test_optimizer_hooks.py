"""Hooks of torch's optimizers that are removed while torch calls them, and optimizers in their wrappers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torchs
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_flops.measure.optimizer_hooks import OptimizerHooks, remove_retired


@pytest.fixture
def optimizer() -> torch.optim.Optimizer:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return torch.optim.SGD([weight], lr=0.5)


class Users:
    """Hooks of the user's, which hear of each step."""

    def __init__(self) -> None:
        self.heard: list[str] = []
        self._handles: list[Any] = []

    def put_up(self) -> None:
        self._handles.append(register_optimizer_step_pre_hook(lambda *_: self.heard.append("before")))
        self._handles.append(register_optimizer_step_post_hook(lambda *_: self.heard.append("after")))

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


@pytest.fixture
def users() -> Iterator[Users]:
    hooks = Users()
    yield hooks
    hooks.remove()


def hooks_up() -> int:
    return len(torchs._global_optimizer_pre_hooks) + len(torchs._global_optimizer_post_hooks)


def nothing(*_: Any) -> None:
    pass


def unexpected(error: Exception) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("last", [True, False])
def test_hooks_that_are_removed_in_one_of_them_leave_the_step_and_other_hooks_alone(
    where: str, last: bool, optimizer: torch.optim.Optimizer, users: Users
) -> None:
    heard: list[str] = []

    def act(place: str) -> None:
        heard.append(place)
        if place == where:
            both.remove()
            other.remove()

    other = OptimizerHooks(nothing, nothing, failed=unexpected)  # as of a counter in a session
    both = OptimizerHooks(lambda *_: act("before"), lambda *_: act("after"), failed=unexpected)
    remove_retired()
    before = hooks_up()
    if last:
        users.put_up()
        other.put_up()
        both.put_up()
    else:
        both.put_up()
        other.put_up()
        users.put_up()
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]
    assert users.heard == ["before", "after"]
    if last:
        assert hooks_up() == before + 2
    optimizer.step(closure=None)
    assert weight.tolist() == [0.0, 0.0]
    assert users.heard == ["before", "after", "before", "after"]
    assert heard == ["before", "after"][: 1 if where == "before" else 2]
    remove_retired()
    assert hooks_up() == before + 2


def test_what_fails_in_a_hook_is_told_and_the_step_goes_on(optimizer: torch.optim.Optimizer) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("ours")

    told: list[str] = []
    hooks = OptimizerHooks(fail, fail, failed=lambda error: told.append(str(error)))
    hooks.put_up()
    optimizer.step()
    hooks.remove()
    assert told == ["ours", "ours"]
    assert optimizer.param_groups[0]["params"][0].tolist() == [0.5, 0.5]
