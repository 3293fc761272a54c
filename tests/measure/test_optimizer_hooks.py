"""Hooks of torch's optimizers that are removed while torch calls them, and optimizers in their wrappers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


@pytest.fixture
def heard_by_user() -> Iterator[tuple[list[str], Callable[[], None]]]:
    """What hooks of the user's hear of each step, once they have been put up."""
    heard, handles = list[str](), list[Any]()

    def put_up() -> None:
        handles.append(register_optimizer_step_pre_hook(lambda *_: heard.append("before")))
        handles.append(register_optimizer_step_post_hook(lambda *_: heard.append("after")))

    yield heard, put_up
    while handles:
        handles.pop().remove()


def hooks_up() -> int:
    return len(torchs._global_optimizer_pre_hooks) + len(torchs._global_optimizer_post_hooks)


def nothing(*_: Any) -> None:
    pass


def unexpected(error: Exception) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("last", [True, False])
def test_hooks_that_are_removed_in_one_of_them_leave_the_step_and_other_hooks_alone(
    where: str, last: bool, optimizer: torch.optim.Optimizer, heard_by_user: Any
) -> None:
    heard = list[str]()
    users, put_up_users = heard_by_user

    def act(place: str) -> None:
        heard.append(place)
        if place == where:
            both.remove()
            other.remove()

    other = OptimizerHooks(nothing, nothing, failed=unexpected)  # as of a counter in a session
    both = OptimizerHooks(lambda *_: act("before"), lambda *_: act("after"), failed=unexpected)
    remove_retired()
    before = hooks_up()
    ways = [put_up_users, other.put_up, both.put_up]
    for put_up in ways if last else reversed(ways):
        put_up()
    weight = optimizer.param_groups[0]["params"][0]
    optimizer.step()
    assert weight.tolist() == [0.5, 0.5]
    assert users == ["before", "after"]
    if last:
        assert hooks_up() == before + 2
    optimizer.step(closure=None)
    assert weight.tolist() == [0.0, 0.0]
    assert users == ["before", "after", "before", "after"]
    assert heard == ["before", "after"][: 1 if where == "before" else 2]
    remove_retired()
    assert hooks_up() == before + 2
