"""Hooks of torch's optimizers that are removed while torch calls them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch.optim import optimizer as torchs
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from lightning_flops.measure.module_hooks import hear_steps
from lightning_flops.signals import Undo


def hooks_up() -> int:
    return len(torchs._global_optimizer_pre_hooks) + len(torchs._global_optimizer_post_hooks)


def unexpected(error: Exception) -> None:
    raise AssertionError(error)


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("last", [True, False])
def test_hooks_that_are_removed_in_one_of_them_leave_the_step_and_other_hooks_alone(where: str, last: bool) -> None:
    heard, users, remove_users = list[str](), list[str](), ExitStack()

    def put_up_users() -> None:
        for register, place in (
            (register_optimizer_step_pre_hook, "before"),
            (register_optimizer_step_post_hook, "after"),
        ):
            remove_users.callback(register(lambda *_, place=place: users.append(place)).remove)

    def act(place: str) -> None:
        heard.append(place)
        if place == where:
            both.close()
            other.close()

    def never(*_: Any) -> None:
        heard.append("closed")

    other, both = Undo(), Undo()

    def put_up_ours() -> None:
        hear_steps(both, lambda *_: act("before"), lambda *_: act("after"), failed=unexpected)
        hear_steps(other, never if where == "before" else nothing, never, failed=unexpected)  # as of a counter in a run

    def nothing(*_: Any) -> None:
        pass

    before = hooks_up()
    ways = [put_up_users, put_up_ours]
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with remove_users:
        for put_up in ways if last else reversed(ways):
            put_up()
        optimizer.step()
        assert weight.tolist() == [0.5, 0.5]
        assert users == ["before", "after"]
        if last:
            assert hooks_up() == before + 2
        optimizer.step(closure=None)
        assert weight.tolist() == [0.0, 0.0]
        assert users == ["before", "after", "before", "after"]
        assert heard == ["before", "after"][: 1 if where == "before" else 2]
        with Undo() as later:
            hear_steps(later, nothing, nothing, failed=unexpected)
        assert hooks_up() == before + 2
