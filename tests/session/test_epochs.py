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


def samples_a_batch(profiler: TrainingProfiler) -> float:
    summary = profiler.throughput
    assert summary is not None and summary.ips is not None and summary.ips_unit == "samples/s"
    return summary.ips.average * summary.batch_cost_sec.average


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


SHORT = 12
"""Batches of an epoch after which a loop leaves its loader."""


def whole(loop: Loop) -> Iterable[torch.Tensor]:
    """To the loader's last batch."""
    return loop.loader


def with_one_more(loop: Loop) -> Iterable[torch.Tensor]:
    """Leave the loader with a batch that was fetched and is not used."""
    for place, batch in enumerate(loop.loader):
        if place == SHORT:
            break
        yield batch


def after_the_last(loop: Loop) -> Iterable[torch.Tensor]:
    """Leave the loader when the last batch was used."""
    for place, batch in enumerate(loop.loader):
        yield batch
        if place == SHORT - 1:
            break


def sliced(loop: Loop) -> Iterable[torch.Tensor]:
    """As many as wanted."""
    return islice(loop.loader, SHORT)


def beside_numbers(loop: Loop) -> Iterable[torch.Tensor]:
    """``zip`` fetches a batch before it asks for a number that is not there."""
    return (batch for batch, _ in zip(loop.loader, range(SHORT), strict=False))


LEFT = (with_one_more, after_the_last, sliced, beside_numbers)


def left_by_break(loop: Loop, batches: Callable[[Loop], Iterable[torch.Tensor]], between: Callable[[], object]) -> None:
    for _ in range(EPOCHS):
        for batch in batches(loop):
            loop.backward(batch)
            loop.update()
        between()


@pytest.mark.parametrize("profile_step", [3, SHORT], ids=["in an epoch", "the first of an epoch"])
@pytest.mark.parametrize("batches", LEFT)
def test_an_epoch_ends_where_the_loop_leaves_its_loader(
    batches: Callable[[Loop], Iterable[torch.Tensor]], profile_step: int
) -> None:
    profiler = run(lambda loop: left_by_break(loop, batches, loop.draws_samples), profile_step=profile_step)
    found = figures(profiler.throughput)
    assert (found["unknown"], found["model_flops"]) == (0, EPOCHS * SHORT * STEP)
    assert profiler.profile is not None and (profiler.profile.flops.model, profiler.profile.samples) == (STEP, ROWS)


def test_an_epoch_ends_where_the_loop_leaves_what_goes_through_the_profiler() -> None:
    torch.manual_seed(1)
    loop = Loop(torchs)
    with generous(), profile_training(loop.model, loop.optimizer, **SETTINGS) as profiler:
        loop.loader = profiler.batches(loop.loader)
        left_by_break(loop, with_one_more, loop.draws_samples)
    assert figures(profiler.throughput)["model_flops"] == EPOCHS * SHORT * STEP


@pytest.mark.parametrize("ends", ["by break", "with the second"])
def test_batches_that_were_fetched_side_by_side_and_not_used_are_in_no_step(ends: str) -> None:
    """Of the first loader one more batch is fetched in each epoch, and of the second where the loop is left."""

    def side_by_side(loop: Loop) -> None:
        others = torchs(list(torch.randn(SHORT, 3, WIDTH)))
        for _ in range(EPOCHS):
            for place, (batch, other) in enumerate(zip(loop.loader, others, strict=False)):
                if place == SHORT - 1 and ends == "by break":
                    break
                loop.backward(torch.cat((batch, other)))
                loop.update()
            loop.draws_samples()

    profiler = run(side_by_side)
    found = figures(profiler.throughput)
    steps = EPOCHS * (SHORT - (ends == "by break"))
    assert (found["unknown"], found["model_flops"]) == (0, steps * STEP // ROWS * (ROWS + 3))
    assert samples_a_batch(profiler) == pytest.approx(ROWS + 3)


@pytest.mark.parametrize("flushes", [True, False], ids=["the rest is an update", "the rest waits for the next epoch"])
@pytest.mark.parametrize("batches", [with_one_more, beside_numbers])
def test_a_batch_that_was_fetched_inside_a_step_and_not_used_is_in_no_step(
    batches: Callable[[Loop], Iterable[torch.Tensor]], flushes: bool
) -> None:
    """Of 12 batches five are a step, and two belong to one of their own, or to one that the next epoch ends."""

    def groups(loop: Loop) -> None:
        done = 0
        for _ in range(EPOCHS):
            for batch in batches(loop):
                loop.backward(batch)
                done += 1
                if done % 5 == 0:
                    loop.update()
            if flushes:
                loop.update()
                done = 0
            loop.draws_samples()

    profiler = run(groups)
    found = figures(profiler.throughput)
    # Those that are not flushed end with two batches, whose step has not ended.
    assert found["unknown"] == 0
    assert found["model_flops"] == (EPOCHS * SHORT - (0 if flushes else EPOCHS * SHORT % 5)) * STEP
    assert samples_a_batch(profiler) == pytest.approx(ROWS)


def test_a_loop_may_use_the_batch_that_it_has_left_with_and_drop_the_next_one() -> None:
    def in_turn(loop: Loop) -> None:
        for epoch in range(EPOCHS):
            for place, batch in enumerate(loop.loader):
                if place == SHORT:
                    break
                loop.backward(batch)
                loop.update()
            if epoch % 3 == 0:
                loop.backward(batch)
                loop.update()

    profiler = run(in_turn)
    found = figures(profiler.throughput)
    assert (found["unknown"], found["model_flops"]) == (0, (EPOCHS * SHORT + 2) * STEP)
    assert samples_a_batch(profiler) == pytest.approx(ROWS)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> FakeNow:
    """The monitor's clock."""
    now = FakeNow()
    monkeypatch.setattr("lightning_flops.session.session.Monitor", functools.partial(Monitor, now))
    return now


@pytest.mark.parametrize("batches", [whole, *LEFT])
def test_the_time_between_epochs_is_no_steps(batches: Callable[[Loop], Iterable[torch.Tensor]], now: FakeNow) -> None:
    def seconds(loop: Loop) -> None:
        def backward(batch: torch.Tensor) -> None:
            now.sleep(1.0)
            Loop.backward(loop, batch)

        loop.backward = backward  # type: ignore[method-assign]
        left_by_break(loop, batches, lambda: now.sleep(100.0))

    summary = run(seconds).throughput
    assert summary is not None and summary.batches > 3 * SHORT
    assert summary.batch_cost_sec == Spread(average=1.0, maximum=1.0, minimum=1.0)


@pytest.mark.parametrize("number", [1, 4])
def test_a_new_iterator_for_each_step_ends_no_epoch(number: int, now: FakeNow) -> None:
    """Steps that take their batches out of a new iterator each: what runs between two of them is in the next one."""

    def fetches_anew(loop: Loop) -> None:
        for _ in range(100):
            chunk = list(islice(loop.loader, number))
            now.sleep(1.0)
            for batch in chunk:
                loop.backward(batch)
            loop.update()
            now.sleep(2.0)

    summary = run(fetches_anew).throughput
    assert summary is not None and summary.batches == 99 * number  # one step is counted
    # Each of them takes three seconds, but the first: nothing ran before it.
    assert summary.batch_cost_sec.average * summary.batches == pytest.approx(99 * 3.0 - 2.0)


def test_a_batch_of_an_iterator_that_was_dropped_may_be_used_yet(now: FakeNow) -> None:
    """Only the first time is it taken for one that is dropped, too, and then it is used all the same."""

    def keeps_the_last(loop: Loop) -> None:
        for _ in range(40):
            fetched = iter(loop.loader)
            loop.backward(next(fetched))
            loop.update()
            batch = next(fetched)
            del fetched
            now.sleep(1.0)
            loop.backward(batch)
            loop.update()

    profiler = run(keeps_the_last)
    found, summary = figures(profiler.throughput), profiler.throughput
    assert (found["unknown"], found["model_flops"]) == (0, 80 * STEP)
    # Two steps are counted: the second, with the first second, and later the first one of an epoch.
    assert summary is not None and (found["counted"], summary.batches) == (2, 78)
    assert summary.batch_cost_sec.average * summary.batches == pytest.approx(39.0)


def test_a_first_step_that_spends_more_is_seen_in_the_second_epoch(caplog: pytest.LogCaptureFixture) -> None:
    def draws_at_first(loop: Loop) -> None:
        for _ in range(EPOCHS):
            for index, batch in enumerate(loop.loader):
                loop.backward(batch)
                if index == 0:
                    loop.draws_samples()
                loop.update()

    throughput = run(draws_at_first).throughput
    found = figures(throughput)
    # The step that begins the second epoch is counted with its samples: five forwards of the other model. One more is
    # a check.
    assert (found["counted"], found["unknown"]) == (3, 0)
    assert found["model_flops"] == EPOCHS * EPOCH * STEP + 5 * LAYERS * PRODUCT
    assert throughput is not None and throughput.lower_bound
    assert f"Step {EPOCH} spent 51,200 model FLOPs more than is foretold for its shapes." in caplog.text


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
    assert trained.summary is not None and trained.summary.lower_bound == bool(every)
    if every:  # in the check that begins the second epoch, a forward more
        assert (found["counted"], found["unknown"]) == (3, 0)
        assert found["model_flops"] == EPOCHS * EPOCH * STEP + LAYERS * PRODUCT
    else:  # step 3 is counted, the first of an epoch, and a check
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
