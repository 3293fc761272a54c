"""A model may be as deep as without us, and one that is too deep is too deep."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_flops import FlopsProfiler, FlopsProfilerCallback, count_flops
from lightning_flops.instrument.stack_room import StackRoom
from tests.lightning.nets import loader, new_trainer

LINEAR_FLOPS = 2 * 2 * 3 * 4
"""Two rows through three inputs and four outputs, two FLOPs a multiply-add."""


class Around(nn.Module):
    """A module in a module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Endless(nn.Module):
    """Calls itself until there is no room."""

    def forward(self, x: Tensor) -> Tensor:
        return self(x)  # type: ignore[no-any-return]


def nested(depth: int) -> nn.Module:
    model: nn.Module = nn.Linear(3, 4)
    for _ in range(depth):
        model = Around(model)
    return model


def deepest(works: Callable[[int], bool]) -> int:
    """The deepest model that works."""
    low, high = 1, 400
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def forward(model: nn.Module) -> bool:
    try:
        model(torch.ones(2, 3))
    except RecursionError:
        return False
    return True


def counted(model: nn.Module) -> int | None:
    """FLOPs of the forward; None where the model is too deep."""
    with count_flops(model) as counts:
        worked = forward(model)
    return counts.forward if worked else None


@pytest.fixture(autouse=True)
def limit() -> Iterator[int]:
    """Python's usual limit, which each test here leaves as it is."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)
    yield 1000
    after = sys.getrecursionlimit()
    sys.setrecursionlimit(before)
    assert after == 1000


def test_the_deepest_model_that_runs_is_counted_and_those_much_deeper_raise_as_before() -> None:
    # Both ways of running it stand equally deep: the forward is called from here by one function of this file.
    plain = deepest(lambda depth: forward(nested(depth)))
    assert counted(nested(plain - 1)) == LINEAR_FLOPS
    assert counted(nested(plain)) == LINEAR_FLOPS
    assert counted(nested(plain + 4)) is None
    assert counted(nested(plain)) == LINEAR_FLOPS  # after a failure as before it


def test_a_model_without_end_ends_in_the_same_error() -> None:
    with count_flops(Endless()), pytest.raises(RecursionError, match="maximum recursion depth exceeded"):
        Endless()(torch.ones(1))


def test_the_profiler_by_deepspeeds_name_takes_no_room_away() -> None:
    plain = deepest(lambda depth: forward(nested(depth)))
    model = nested(plain)
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    assert forward(model)
    profiler.stop_profile()
    assert profiler.get_total_flops() == LINEAR_FLOPS


@pytest.mark.skipif(sys.version_info[:2] == (3, 12), reason="Python 3.12 has a limit for calls of C, which is not ours")
@pytest.mark.parametrize("profile_step", [0, 1])
def test_no_step_of_a_fit_has_less_room(profile_step: int, tmp_path: Path) -> None:
    """Steps that are counted, timed and traced, and those that are left alone."""
    base: Any = importlib.import_module("lightning.pytorch").LightningModule

    class Net(base):  # type: ignore[misc]
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)
            self.deep = nested(depth)
            self.failed: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = self.layer(batch[0]).sum()
            try:
                loss = loss + self.deep(self.layer(batch[0])).sum()
            except RecursionError:
                self.failed.append(batch_idx)
            return loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    def failed(depth: int, *callbacks: Any) -> list[int]:
        net = Net(depth)
        new_trainer("lightning.pytorch", tmp_path, *callbacks).fit(net, loader(10))
        return net.failed

    plain = deepest(lambda depth: not failed(depth))
    callback = FlopsProfilerCallback(profile_step=profile_step, timing_steps=2)
    assert failed(plain, callback) == []
    assert callback.profile is not None and callback.profile.notes == ()


def deeper_by_one(room: StackRoom) -> None:
    """A module begins to run: what torch's hooks do with the room then."""
    room.levels += 1
    if room.levels >= room.highest:
        room.follow()


def back_by_one(room: StackRoom) -> None:
    """A module ends, or one whose beginning nobody heard of."""
    room.levels -= 1
    if room.levels < room.lowest:
        room.follow()


def test_the_limit_follows_the_modules_that_run_in_steps_of_eight_and_is_put_back(limit: int) -> None:
    room = StackRoom()

    def deeper(modules: int) -> int:
        for _ in range(modules):
            deeper_by_one(room)
        return sys.getrecursionlimit()

    def back(modules: int) -> int:
        for _ in range(modules):
            back_by_one(room)
        return sys.getrecursionlimit()

    with room.open(6):
        assert sys.getrecursionlimit() == limit + 6
        assert deeper(1) == limit + 6 + 8
        assert deeper(7) == limit + 6 + 8
        assert deeper(1) == limit + 6 + 16  # nine modules run
        assert deeper(31) == limit + 6 + 40
        assert back(16) == limit + 6 + 40  # two steps may be too many: a model that goes to and fro sets no limits
        assert back(1) == limit + 6 + 24  # 23 run
        with room.open(10):
            assert sys.getrecursionlimit() == limit + 16 + 24
        assert sys.getrecursionlimit() == limit + 6 + 24
        back(23)
        assert back(1) == limit + 6  # a module whose beginning nobody heard of
    assert sys.getrecursionlimit() == limit
    assert deeper(20) == limit


def test_a_model_of_few_levels_leaves_the_limit_alone(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    room, limits = StackRoom(), list[int]()
    with room.open(6):
        monkeypatch.setattr(sys, "setrecursionlimit", limits.append)
        for _ in range(100):
            for move in (deeper_by_one, deeper_by_one, back_by_one, deeper_by_one, back_by_one, back_by_one):
                move(room)
            monkeypatch.setattr(sys, "getrecursionlimit", lambda: limits[-1])
        monkeypatch.undo()
    assert limits == [limit + 6 + 8]


def test_room_is_given_back_once_and_by_who_took_it(limit: int) -> None:
    room = StackRoom()
    room.take("one", 6)
    room.take("other", 10)
    for _ in range(2):
        room.give_back("one")
        assert sys.getrecursionlimit() == limit + 10
    for _ in range(2):
        room.give_back("other")
        assert sys.getrecursionlimit() == limit


def test_a_limit_that_the_user_sets_inside_is_the_users_afterwards(limit: int) -> None:
    room = StackRoom()
    with room.open(6):
        deeper_by_one(room)
        sys.setrecursionlimit(5000)
        for _ in range(8):
            deeper_by_one(room)
        assert sys.getrecursionlimit() == 5006 + 16
    assert sys.getrecursionlimit() == 5000
    with room.open(6):
        sys.setrecursionlimit(4000)
    assert sys.getrecursionlimit() == 4000
    sys.setrecursionlimit(limit)


def test_a_limit_that_the_user_raises_for_a_while_and_puts_back_leaves_no_trace(limit: int) -> None:
    room = StackRoom()
    with room.open(6):
        deeper_by_one(room)
        before = sys.getrecursionlimit()
        sys.setrecursionlimit(3000)
        for _ in range(8):
            deeper_by_one(room)
        assert sys.getrecursionlimit() == 3006 + 16
        for _ in range(8):
            back_by_one(room)
        sys.setrecursionlimit(before)
        back_by_one(room)
    assert sys.getrecursionlimit() == limit


def test_threads_share_what_all_of_them_need(limit: int) -> None:
    room = StackRoom()

    def deeper() -> None:
        for _ in range(500):
            deeper_by_one(room)

    with room.open(6):
        threads = [threading.Thread(target=deeper) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sys.getrecursionlimit() == limit + 6 + 4 * 500
    assert sys.getrecursionlimit() == limit
