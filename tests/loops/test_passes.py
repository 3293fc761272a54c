"""Steps of the same shapes that go through the model in different ways: none is taken for another."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.pytorch import TrainingProfiler

IN, MIDDLE, OUT, ROWS, STEPS, EPOCHS = 16, 32, 4, 8, 8, 3


def forward_of(rows: int) -> int:
    return 2 * rows * IN * MIDDLE + 2 * rows * MIDDLE * OUT


def step_of(rows: int) -> int:
    """Forward and backward; nothing before the first layer needs a gradient."""
    return forward_of(rows) + 2 * rows * IN * MIDDLE + 2 * 2 * rows * MIDDLE * OUT


def batches() -> DataLoader[torch.Tensor]:
    return DataLoader(torch.arange(STEPS * ROWS * IN).reshape(-1, IN) / 1000, batch_size=ROWS)  # type: ignore[arg-type]


class Loop:
    """A model, its optimizer, and what each step has spent and trained on."""

    def __init__(self, optimizer: Callable[[Any], torch.optim.Optimizer]) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(IN, MIDDLE), nn.Tanh(), nn.Linear(MIDDLE, OUT))
        self.optimizer = optimizer(self.net.parameters())
        self.spent: list[int] = []
        self.samples: list[int] = []

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(rows).square().mean()
        return result

    def updates(self, spent: int, samples: int = ROWS) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.spent.append(spent)
        self.samples.append(samples)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def searching(parameters: Any) -> torch.optim.Optimizer:
    """Evaluates its closure as often as its line search needs."""
    return torch.optim.LBFGS(parameters, lr=1, max_iter=5, line_search_fn="strong_wolfe", tolerance_grad=1e-3)


Train = Callable[[Loop], object]


def tries_again_in_pieces(loop: Loop) -> None:
    for place, rows in enumerate(batches()):
        try:
            loss = loop.loss(rows)
            if place == 5:
                raise MemoryError
            loss.backward()
            loop.updates(step_of(ROWS))
        except MemoryError:
            for piece in rows.split(4):
                loop.loss(piece).backward()
            loop.updates(step_of(ROWS) + forward_of(ROWS))


def twice_now_and_then(loop: Loop) -> None:
    for place, rows in enumerate(batches()):
        loss, times = loop.loss(rows), 1
        if place % 4 == 3:
            loss, times = loss + loop.loss(rows), 2
        loss.backward()
        loop.updates(times * step_of(ROWS))


def logs_a_forward_now_and_then(loop: Loop) -> None:
    """After its update: that is in the next step."""
    more = 0
    for place, rows in enumerate(batches()):
        loop.loss(rows).backward()
        loop.updates(step_of(ROWS) + more)
        more = 0
        if place % 4 == 2:
            with torch.no_grad():
                loop.net(rows)
            more = forward_of(ROWS)


def searches_a_line(loop: Loop) -> None:
    for place, rows in enumerate(batches()):
        times = 0

        def closure(rows: torch.Tensor = rows, target: float = 1.0 + place % 3) -> torch.Tensor:
            nonlocal times
            loop.optimizer.zero_grad()
            loss: torch.Tensor = (loop.net(rows) - target).square().mean()
            loss.backward()
            times += 1
            return loss

        loop.optimizer.step(closure)  # type: ignore[arg-type]
        loop.spent.append(times * step_of(ROWS))
        loop.samples.append(ROWS)


def checkpoints_the_whole_model(loop: Loop) -> None:
    for rows in batches():
        checkpoint(loop.net, rows, use_reentrant=False).square().mean().backward()
        loop.updates(step_of(ROWS))


UNLIKE: tuple[tuple[Train, Any], ...] = (
    (tries_again_in_pieces, sgd),
    (twice_now_and_then, sgd),
    (logs_a_forward_now_and_then, sgd),
    (searches_a_line, searching),
)


def profiled(train: Train, optimizer: Any) -> tuple[Loop, TrainingProfiler, int | None]:
    loop = Loop(optimizer)
    with profile_training(loop.net, loop.optimizer, profile_step=1, timing_steps=2, trace=False) as profiler:
        session = profiler._loop.session  # type: ignore[union-attr]
        for _ in range(EPOCHS):
            train(loop)
    assert session.monitor is not None
    return loop, profiler, session.monitor.totals().samples


@pytest.mark.parametrize(("train", "optimizer"), UNLIKE)
def test_a_step_that_calls_the_model_more_often_is_none_of_the_others(train: Train, optimizer: Any) -> None:
    loop, profiler, samples = profiled(train, optimizer)
    run, profile = profiler.throughput, profiler.profile
    assert run is not None and profile is not None
    assert len(set(loop.spent)) > 1
    assert profile.flops.forward + profile.flops.backward == loop.spent[1]
    assert run.model_flops is None and "nothing that was counted tells" in run.unavailable["model_flops"]
    alike = sum(one == loop.spent[1] for one in loop.spent)
    assert (run.steps_counted, run.steps_predicted, run.steps_unknown) == (1, alike - 1, len(loop.spent) - alike)
    assert samples == sum(loop.samples) - loop.samples[1]


def test_the_forward_that_a_checkpoint_repeats_in_the_backward_is_none_of_the_loops() -> None:
    loop, profiler, samples = profiled(checkpoints_the_whole_model, sgd)
    run, profile = profiler.throughput, profiler.profile
    assert run is not None and profile is not None
    assert (run.model_flops, run.steps_counted, run.steps_unknown) == (sum(loop.spent), 1, 0)
    flops = profile.flops
    # What was the forward's result is not needed again, so the last product is not repeated.
    assert (flops.forward, flops.backward) == (forward_of(ROWS), step_of(ROWS) - forward_of(ROWS))
    assert flops.recompute == 2 * ROWS * IN * MIDDLE
    assert (profile.samples, samples) == (ROWS, sum(loop.samples) - ROWS)


def test_a_step_on_two_batches_with_a_forward_each_has_the_samples_of_both() -> None:
    def train(loop: Loop) -> None:
        iterator = iter(batches())
        for one in iterator:
            first = loop.net(one)
            second = loop.net(next(iterator))
            (first - second).square().mean().backward()
            loop.updates(2 * step_of(ROWS), 2 * ROWS)

    loop, profiler, samples = profiled(train, sgd)
    run, profile = profiler.throughput, profiler.profile
    assert run is not None and profile is not None and run.model_flops is None
    # The first of these steps is taken for one that has skipped a batch, and its samples for those of the other.
    assert (run.steps_counted, run.steps_predicted, run.steps_unknown) == (1, len(loop.spent) - 2, 1)
    assert profile.flops.forward + profile.flops.backward == loop.spent[1]
    assert (profile.samples, samples) == (2 * ROWS, sum(loop.samples) - 2 * ROWS - ROWS)
    assert any("again and again" in sentence for sentence in profile.notes)


ITERABLES: tuple[Callable[[], Any], ...] = (
    batches,
    lambda: list(batches()),
    lambda: map(torch.Tensor.float, list(batches())),
    lambda: itertools.chain(batches()),
    lambda: (rows for rows in batches()),
)
"""To the iterators of the second to the fourth nothing can refer without holding them."""


@pytest.mark.parametrize("iterable", ITERABLES)
def test_a_first_step_that_begins_without_gradients_is_whole_whatever_hands_out_its_batches(
    iterable: Callable[[], Any],
) -> None:
    loop = Loop(sgd)
    with profile_training(loop.net, loop.optimizer, profile_step=0, timing_steps=2, trace=False) as profiler:
        for rows in profiler.batches(iterable()):
            with torch.no_grad():
                before = loop.net(rows)
            (loop.net(rows) - before).square().mean().backward()
            loop.updates(forward_of(ROWS) + step_of(ROWS))
    profile, run = profiler.profile, profiler.throughput
    assert profile is not None and run is not None
    assert profile.flops.forward == 2 * forward_of(ROWS)
    assert run.model_flops == sum(loop.spent)


@pytest.mark.parametrize("iterable", ITERABLES)
def test_batches_that_are_fetched_together_are_told_apart_whatever_hands_them_out(iterable: Callable[[], Any]) -> None:
    loop = Loop(sgd)
    with profile_training(loop.net, loop.optimizer, profile_step=1, timing_steps=2, trace=False) as profiler:
        iterator = iter(profiler.batches(iterable()))
        for _ in range(STEPS // 2):
            for rows in [next(iterator), next(iterator)]:
                loop.loss(rows).backward()
            loop.updates(2 * step_of(ROWS), 2 * ROWS)
    profile, run = profiler.profile, profiler.throughput
    assert profile is not None and run is not None
    assert (profile.flops.forward, profile.micro_steps, profile.samples) == (2 * forward_of(ROWS), 2, 2 * ROWS)
    assert not [note for note in profile.notes if "several loaders" in note]
    assert run.model_flops == sum(loop.spent)
