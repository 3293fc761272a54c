"""Batches that a loop fetches and does not train on: ``next(iter(loader))`` for a picture or a shape, for one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lightning_flops import profile_training
from lightning_flops.pytorch import TrainingProfiler

IN, MIDDLE, OUT = 16, 32, 4
EPOCHS, STEPS, ROWS = 3, 8, 8
SETTINGS: dict[str, Any] = {"timing_steps": 3, "trace": False}


def forward_of(rows: int) -> int:
    return 2 * rows * IN * MIDDLE + 2 * rows * MIDDLE * OUT


def step_of(rows: int) -> int:
    """Forward and backward; nothing before the first layer needs a gradient."""
    return forward_of(rows) + 2 * rows * IN * MIDDLE + 2 * 2 * rows * MIDDLE * OUT


class Sized(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Batches of so many rows each."""

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._sizes)

    def __getitem__(self, place: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._sizes[place]
        return torch.full((rows, IN), 0.1 * place), torch.zeros(rows, dtype=torch.long)


Loader = DataLoader[tuple[torch.Tensor, torch.Tensor]]


def loader_of(*sizes: int, workers: int = 0, persistent: bool = False) -> Loader:
    return DataLoader(Sized(*sizes), batch_size=None, num_workers=workers, persistent_workers=persistent)


def same(steps: int = STEPS, rows: int = ROWS, **how: Any) -> Loader:
    return loader_of(*[rows] * steps, **how)


def forever(loader: Loader) -> Iterator[Any]:
    """As loops are written that count steps and not epochs."""
    iterator = iter(loader)
    while True:
        try:
            yield next(iterator)
        except StopIteration:
            iterator = iter(loader)


class Loop:
    """A model, its optimizer, and what each step has spent and trained on."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(IN, MIDDLE), nn.ReLU(), nn.Linear(MIDDLE, OUT))
        self.teacher = nn.Sequential(nn.Linear(IN, MIDDLE), nn.ReLU(), nn.Linear(MIDDLE, OUT))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.spent: list[int] = []
        self.samples: list[int] = []

    def trains_on(self, *rows: torch.Tensor, beside: int = 0, samples: int | None = None) -> None:
        """One step, of a forward on each of *rows*."""
        sum(self.net(one).square().mean() for one in rows).backward()
        self.updates(sum(map(len, rows)), beside=beside, samples=samples)

    def updates(self, rows: int, *, beside: int = 0, samples: int | None = None) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.spent.append(step_of(rows) + beside)
        self.samples.append(rows if samples is None else samples)


Train = Callable[[Loop], object]


def before_the_first_epoch(loop: Loop) -> None:
    loader = same()
    next(iter(loader))
    for _ in range(EPOCHS):
        for rows, _ in loader:
            loop.trains_on(rows)


def of_an_iterator_that_is_kept(loop: Loop) -> None:
    loader = same()
    looked = iter(loader)
    rows, _ = next(looked)
    for _ in range(EPOCHS):
        for rows, _ in loader:
            loop.trains_on(rows)


def twice(loop: Loop) -> None:
    loader = same()
    next(iter(loader))
    rows, _ = next(iter(loader))
    for _ in range(EPOCHS):
        for rows, _ in loader:
            loop.trains_on(rows)


def before_each_epoch(loop: Loop) -> None:
    loader = same()
    for _ in range(EPOCHS):
        rows, _ = next(iter(loader))
        for rows, _ in loader:
            loop.trains_on(rows)


def of_another_size(loop: Loop) -> None:
    loader, other = same(), same(rows=5)
    for _ in range(EPOCHS):
        next(iter(other))
        for rows, _ in loader:
            loop.trains_on(rows)


def with_workers(loop: Loop) -> None:
    loader = same(workers=1)
    for _ in range(2):
        next(iter(loader))
        for rows, _ in loader:
            loop.trains_on(rows)


def with_workers_that_stay(loop: Loop) -> None:
    loader = same(workers=1, persistent=True)
    for _ in range(2):
        next(iter(loader))
        for rows, _ in loader:
            loop.trains_on(rows)


def of_a_loader_that_reads_ahead(loop: Loop) -> None:
    """As accelerate's do: a batch is handed over when the one after it was fetched."""
    shard = pytest.importorskip("accelerate.data_loader").DataLoaderShard
    loader, other = (shard(Sized(*[rows] * STEPS), batch_size=None) for rows in (ROWS, 5))
    for _ in range(EPOCHS):
        next(iter(loader))
        for place, (rows, _) in enumerate(loader):
            if place % 4 == 2:
                next(iter(other))
            loop.trains_on(rows)


class Moved:
    """A loader that is gone through by a generator, as Fabric does; a frame may have the place of one that is gone."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from iter(self._loader)


def of_a_loader_in_a_generator(loop: Loop) -> None:
    loader = Moved(same())
    for _ in range(EPOCHS):
        next(iter(loader))
        for rows, _ in loader:
            loop.trains_on(rows)


def inside_an_epoch_before_the_step(loop: Loop) -> None:
    loader, other = same(), same(rows=5)
    for _ in range(EPOCHS):
        for place, (rows, _) in enumerate(loader):
            if place % 3 == 0:
                next(iter(other))
            loop.trains_on(rows)


def inside_an_epoch_after_the_step(loop: Loop) -> None:
    loader = same()
    for _ in range(EPOCHS):
        for place, (rows, _) in enumerate(loader):
            loop.trains_on(rows)
            if place % 4 == 2:
                next(iter(loader))


def between_forward_and_update(loop: Loop) -> None:
    loader, other = same(), same(rows=5)
    for _ in range(EPOCHS):
        for place, (rows, _) in enumerate(loader):
            loop.net(rows).square().mean().backward()
            if place % 4 == 0:
                next(iter(other))
            loop.updates(len(rows))


def of_an_iterator_that_goes_on(loop: Loop) -> None:
    loader, others = same(), forever(same(rows=5))
    for _ in range(EPOCHS):
        for place, (rows, _) in enumerate(loader):
            if place % 4 == 0:
                next(others)
            loop.trains_on(rows)


def for_an_evaluation(loop: Loop) -> None:
    loader = same()
    for _ in range(EPOCHS):
        rows, _ = next(iter(loader))
        loop.net.eval()
        with torch.no_grad():
            loop.net(rows)
        loop.net.train()
        for rows, _ in loader:
            loop.trains_on(rows)


def before_a_cycle(loop: Loop) -> None:
    loader = same()
    next(iter(loader))
    for rows, _ in itertools.islice(itertools.cycle(loader), EPOCHS * STEPS):
        loop.trains_on(rows)


def before_an_iterator_that_is_renewed(loop: Loop) -> None:
    loader = same()
    next(iter(loader))
    for rows, _ in itertools.islice(forever(loader), EPOCHS * STEPS):
        loop.trains_on(rows)


def before_two_loaders_side_by_side(loop: Loop) -> None:
    first, second = same(), same(rows=4)
    for _ in range(EPOCHS):
        next(iter(first))
        for (rows, _), (more, _) in zip(first, second, strict=True):
            loop.trains_on(torch.cat([rows, more]))


def of_pictures_that_are_made_flat(loop: Loop) -> None:
    loader: DataLoader[torch.Tensor] = DataLoader(torch.zeros(STEPS * ROWS, 1, 4, 4), batch_size=ROWS)  # type: ignore[arg-type]
    for _ in range(EPOCHS):
        next(iter(loader))
        for rows in loader:
            loop.trains_on(rows.reshape(-1, IN))


def before_a_step_of_the_same_forward_twice(loop: Loop) -> None:
    loader = same()
    next(iter(loader))
    for _ in range(EPOCHS):
        for rows, _ in loader:
            loop.trains_on(rows, rows, samples=ROWS)


def between_accumulated_batches(loop: Loop) -> None:
    loader, other = same(), same(rows=5)
    for _ in range(EPOCHS):
        for place, (rows, _) in enumerate(loader):
            loop.net(rows).square().mean().backward()
            if place % 4 == 0:
                next(iter(other))
            if place % 2:
                loop.updates(2 * ROWS)


LOOKS: tuple[Train, ...] = (
    before_the_first_epoch,
    of_an_iterator_that_is_kept,
    twice,
    before_each_epoch,
    of_another_size,
    with_workers,
    with_workers_that_stay,
    of_a_loader_that_reads_ahead,
    of_a_loader_in_a_generator,
    inside_an_epoch_before_the_step,
    inside_an_epoch_after_the_step,
    between_forward_and_update,
    of_an_iterator_that_goes_on,
    for_an_evaluation,
    before_a_cycle,
    before_an_iterator_that_is_renewed,
    before_two_loaders_side_by_side,
    of_pictures_that_are_made_flat,
    before_a_step_of_the_same_forward_twice,
    between_accumulated_batches,
)


def profiled(train: Train, *, profile_step: int) -> tuple[Loop, TrainingProfiler, int | None]:
    """The loop, its profiler, and the samples that the monitor has added up."""
    loop = Loop()
    with profile_training(loop.net, loop.optimizer, profile_step=profile_step, **SETTINGS) as profiler:
        session = profiler._loop.session  # type: ignore[union-attr]
        train(loop)
    assert session.monitor is not None
    return loop, profiler, session.monitor.totals().samples


@pytest.mark.parametrize("profile_step", [0, 4])
@pytest.mark.parametrize("train", LOOKS)
def test_a_batch_that_is_only_looked_at_is_no_part_of_a_step(train: Train, profile_step: int) -> None:
    loop, profiler, samples = profiled(train, profile_step=profile_step)
    run, profile = profiler.throughput, profiler.profile
    assert run is not None and profile is not None
    assert (run.model_flops, run.steps_counted, run.steps_predicted, run.steps_unknown) == (
        sum(loop.spent),
        1,
        len(loop.spent) - 1,
        0,
    )
    assert profile.flops.forward + profile.flops.backward == loop.spent[profile_step]
    assert profile.samples == loop.samples[profile_step]
    assert samples == sum(loop.samples) - loop.samples[profile_step]  # the counted step is in no rate


# ---- batches that are in use, though they were fetched like these


def beside_each_other(loop: Loop) -> None:
    others = forever(loader_of(4, 5, 6))
    for _ in range(EPOCHS):
        for rows, _ in same():
            more, _ = next(others)
            loop.trains_on(torch.cat([rows, more]))


def each_in_a_forward(loop: Loop) -> None:
    others = forever(loader_of(4, 5, 6))
    for _ in range(EPOCHS):
        for rows, _ in same():
            more, _ = next(others)
            loop.trains_on(rows, more)


def alike_and_each_in_a_forward(loop: Loop) -> None:
    others = forever(same())
    for _ in range(EPOCHS):
        for rows, _ in same():
            more, _ = next(others)
            loop.trains_on(rows, more)


def of_iterators_made_anew(loop: Loop) -> None:
    for place in range(EPOCHS * STEPS):
        rows, _ = next(iter(same()))
        more, _ = next(iter(same(rows=4 + place % 3)))
        loop.trains_on(torch.cat([rows, more]))


def for_a_teacher(loop: Loop) -> None:
    others = forever(loader_of(4, 5, 6))
    for _ in range(EPOCHS):
        for rows, _ in same():
            more, _ = next(others)
            with torch.no_grad():
                loop.teacher(more)
            loop.trains_on(rows, beside=forward_of(len(more)))


def for_a_teacher_always_alike(loop: Loop) -> None:
    others = forever(same(rows=6))
    for _ in range(EPOCHS):
        for rows, _ in same():
            more, _ = next(others)
            with torch.no_grad():
                loop.teacher(more)
            loop.trains_on(rows, beside=forward_of(6))


def side_by_side_and_one_for_the_loss(loop: Loop) -> None:
    for _ in range(EPOCHS):
        for (rows, _), (more, _) in zip(same(), same(), strict=True):
            (loop.net(rows).mean() - more.mean()).backward()
            loop.updates(ROWS, samples=2 * ROWS)


USED: tuple[Train, ...] = (
    beside_each_other,
    each_in_a_forward,
    alike_and_each_in_a_forward,
    of_iterators_made_anew,
    for_a_teacher,
    for_a_teacher_always_alike,
    side_by_side_and_one_for_the_loss,
)


@pytest.mark.parametrize("profile_step", [0, 4])
@pytest.mark.parametrize("train", USED)
def test_batches_of_two_loaders_that_are_in_use_are_never_taken_for_looks(train: Train, profile_step: int) -> None:
    loop, profiler, samples = profiled(train, profile_step=profile_step)
    run, profile = profiler.throughput, profiler.profile
    assert run is not None and profile is not None
    assert run.steps_counted + run.steps_predicted + run.steps_unknown == len(loop.spent)
    assert run.model_flops in (None, sum(loop.spent))
    if len(set(loop.spent)) == 1 and train is not for_a_teacher_always_alike:
        assert run.model_flops == sum(loop.spent)
    counted = range(profile_step, profile_step + run.steps_counted)
    means = (sum(each[place] for place in counted) / len(counted) for each in (loop.spent, loop.samples))
    assert (profile.flops.forward + profile.flops.backward, profile.samples) == tuple(means)
    assert samples is not None
    assert samples == sum(loop.samples) - sum(loop.samples[place] for place in counted)
