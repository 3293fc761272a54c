"""Where epochs end and begin: what runs between them, their first step, and a last one of fewer batches.

A plain loop knows no epochs. That a loader has no more batches tells of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.instrument.timing.monitor import Monitor
from lightning_flops.pytorch import TrainingProfiler
from lightning_flops.schema.throughput import Spread
from tests.checks import LAYERS, PRODUCT, ROWS, WIDTH, Dropping, figures, generous
from tests.every_step import DOORS, Data
from tests.fake_clock import FakeNow

EPOCH, EPOCHS = 18, 6
"""Batches in an epoch, and epochs."""

STEP = LAYERS * 3 * PRODUCT
"""FLOPs of a batch: each layer's product, and two in its backward."""

SETTINGS: dict[str, Any] = {"timing_steps": 2, "trace": False, "log_every_n_steps": 10, "peak_flops_per_sec": 1e12}


class Loop:
    """What a loop is made of: a model with its optimizer, a loader, and a model that nobody shows to the profiler."""

    def __init__(self, loader: Callable[[list[torch.Tensor]], Iterable[torch.Tensor]]) -> None:
        self.loader = loader([torch.randn(ROWS, WIDTH) for _ in range(EPOCH)])
        self.model, self.other = Dropping(1.0), Dropping(1.0)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def backward(self, batch: torch.Tensor) -> None:
        """A forward and a backward."""
        self.model(batch)["loss"].backward()

    def update(self) -> None:
        """An update."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def draws_samples(self) -> None:
        """Work of the other model, in training mode, of the shapes of a batch."""
        with torch.no_grad():
            for _ in range(5):
                self.other(torch.randn(ROWS, WIDTH))


def torchs(data: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """A loader of torch."""
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def accelerates(data: list[torch.Tensor]) -> Iterable[torch.Tensor]:
    """One that has no more batches before it has handed over its last."""
    loader: Iterable[torch.Tensor] = DataLoaderShard(data, batch_size=None)
    return loader


def run(
    trains: Callable[[Loop], object],
    loader: Callable[[list[torch.Tensor]], Iterable[torch.Tensor]] = torchs,
    **settings: Any,
) -> TrainingProfiler:
    torch.manual_seed(1)
    loop = Loop(loader)
    with generous(), profile_training(loop.model, loop.optimizer, **{**SETTINGS, **settings}) as profiler:
        trains(loop)
    return profiler


def samples_after_each_epoch(loop: Loop) -> None:
    for _ in range(EPOCHS):
        for batch in loop.loader:
            loop.backward(batch)
            loop.update()
        loop.draws_samples()


def samples_of_the_model_itself(loop: Loop) -> None:
    loop.other = loop.model
    samples_after_each_epoch(loop)


def one_batch_ahead(loop: Loop) -> None:
    for _ in range(EPOCHS):
        fetched = iter(loop.loader)
        batch = next(fetched, None)
        while batch is not None:
            loss = loop.model(batch)["loss"]
            batch = next(fetched, None)
            loss.backward()
            loop.update()
        loop.draws_samples()


def groups_over_the_border(loop: Loop) -> None:
    """Of 18 batches, four times four are a step, and two belong to a step that the next epoch ends."""
    done = 0
    for _ in range(EPOCHS):
        for batch in loop.loader:
            loop.backward(batch)
            done += 1
            if done % 4 == 0:
                loop.update()
        loop.draws_samples()


@pytest.mark.parametrize("profile_step", [3, EPOCH], ids=["in an epoch", "the first of an epoch"])
@pytest.mark.parametrize(
    ("trains", "loader"),
    [
        (samples_after_each_epoch, torchs),
        (samples_after_each_epoch, accelerates),
        (samples_of_the_model_itself, torchs),
        (one_batch_ahead, torchs),
        (groups_over_the_border, torchs),
    ],
)
def test_what_runs_between_epochs_is_in_no_step(
    trains: Callable[[Loop], None], loader: Callable[..., Any], profile_step: int
) -> None:
    found = figures(run(trains, loader, profile_step=profile_step).throughput)
    assert (found["unknown"], found["model_flops"]) == (0, EPOCHS * EPOCH * STEP)


def test_what_runs_between_the_epochs_of_any_iterable_is_in_no_step() -> None:
    torch.manual_seed(1)
    loop = Loop(list)
    with generous(), profile_training(loop.model, loop.optimizer, **SETTINGS) as profiler:
        for _ in range(EPOCHS):
            for batch in profiler.batches(loop.loader):
                loop.backward(batch)
                loop.update()
            loop.draws_samples()
    assert figures(profiler.throughput)["model_flops"] == EPOCHS * EPOCH * STEP


def test_the_time_between_epochs_is_no_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    now = FakeNow()
    monkeypatch.setattr("lightning_flops.session.session.Monitor", functools.partial(Monitor, now))

    def seconds(loop: Loop) -> None:
        for _ in range(EPOCHS):
            for batch in loop.loader:
                now.sleep(1.0)
                loop.backward(batch)
                loop.update()
            now.sleep(100.0)

    summary = run(seconds).throughput
    assert summary is not None and summary.batches > 3 * EPOCH
    assert summary.batch_cost_sec == Spread(average=1.0, maximum=1.0, minimum=1.0)


def test_a_first_step_that_spends_more_is_seen_in_the_second_epoch(caplog: pytest.LogCaptureFixture) -> None:
    def draws_at_first(loop: Loop) -> None:
        for _ in range(EPOCHS):
            for index, batch in enumerate(loop.loader):
                loop.backward(batch)
                if index == 0:
                    loop.draws_samples()
                loop.update()

    found = figures(run(draws_at_first).throughput)
    assert (found["counted"], found["unknown"], found["model_flops"]) == (2, EPOCHS * EPOCH - 2, None)
    assert "spent different FLOPs" in caplog.text


class DrawsAtFirst(Dropping):
    """At the first of so many batches it runs once more than at others; never if that is 0."""

    def __init__(self, every: int) -> None:
        super().__init__(1.0)
        self.every, self.calls = every, 0

    def forward(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.every and self.calls % self.every == 1:
            with torch.no_grad():
                super().forward(rows)
        return super().forward(rows)


@pytest.mark.parametrize("door", ["plain loop", "Lightning", "transformers"])
@pytest.mark.parametrize("every", [EPOCH, 0], ids=["of an epoch", "never"])
def test_the_first_step_of_an_epoch_is_counted_under_every_door(every: int, door: str, tmp_path: Path) -> None:
    batches = tuple({"rows": torch.randn(ROWS, WIDTH)} for _ in range(EPOCH))
    model = DrawsAtFirst(every).train()
    with generous():
        trained = DOORS[door](model, Data((), batches, epochs=EPOCHS), tmp_path, True)
    found = figures(trained.summary)
    assert model.calls == EPOCHS * EPOCH
    if every:
        assert (found["counted"], found["unknown"], found["model_flops"]) == (2, EPOCHS * EPOCH - 2, None)
    else:  # step 3 is counted, the first of an epoch, and step 103, a check
        assert (found["counted"], found["unknown"], found["model_flops"]) == (3, 0, EPOCHS * EPOCH * STEP)


def test_a_short_last_group_is_counted_in_a_later_epoch() -> None:
    def groups(loop: Loop) -> None:
        for _ in range(EPOCHS):
            for index, batch in enumerate(loop.loader):
                loop.backward(batch)
                if index % 4 == 3 or index == EPOCH - 1:
                    loop.update()

    found = figures(run(groups).throughput)
    assert (found["unknown"], found["model_flops"]) == (0, EPOCHS * EPOCH * STEP)


def test_a_teacher_of_batches_that_are_used_again_is_in_every_step() -> None:
    def taught(loop: Loop) -> None:
        for batch in islice(cycle(loop.loader), EPOCHS * EPOCH):
            with torch.no_grad():
                loop.other(batch)
            loop.backward(batch)
            loop.update()

    found = figures(run(taught).throughput)
    assert (found["unknown"], found["model_flops"]) == (0, EPOCHS * EPOCH * (STEP + LAYERS * PRODUCT))
