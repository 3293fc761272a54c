"""What a plain loop's taps note between windows comes to the same as what they tell at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import profile_training
from lightning_flops.analysis.step_keys import StepKey
from lightning_flops.pytorch import TrainingProfiler
from lightning_flops.session.noted_calls import MOST_KINDS, NotedCalls
from tests.calls import OurCalls
from tests.lengths import watch_sessions

ROWS = [4, 2, 4, 3, 4, 4, 1, 4, 4, 2, 4, 4, 3, 4, 4, 4, 2, 4, 4, 1]
"""Samples in each batch."""
STEPS = 3 * len(ROWS)


class Net(nn.Module):
    """A layer with dropout, so that it is not the same in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.dropout(self.layer(rows), 0.1, self.training)
        return result


class Run:
    """What a loop is made of."""

    def __init__(self, profiler: TrainingProfiler, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.profiler, self.model, self.optimizer = profiler, model, optimizer
        self.data = [torch.ones(rows, 3) for rows in ROWS]
        self.loader: DataLoader[Any] = DataLoader(self.data, batch_size=None)  # type: ignore[arg-type]

    def batches(self) -> Iterator[torch.Tensor]:
        """Three epochs."""
        for _ in range(3):
            yield from self.loader

    def backward(self, rows: torch.Tensor) -> None:
        """A forward and a backward."""
        self.model(rows).square().mean().backward()

    def update(self) -> None:
        """An update."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def usual(run: Run) -> None:
    for rows in run.batches():
        run.backward(rows)
        run.update()


def without_a_loader(run: Run) -> None:
    for rows in 3 * run.data:
        run.backward(rows)
        run.update()


def told(run: Run) -> None:
    for rows in run.batches():
        run.backward(rows)
        run.update()
        run.profiler.step()


def groups_of_three_and_a_short_one(run: Run) -> None:
    for _ in range(3):
        for index, rows in enumerate(run.loader):
            run.backward(rows)
            if index % 3 == 2 or index == len(ROWS) - 1:
                run.update()


def groups_without_a_loader(run: Run) -> None:
    for index, rows in enumerate(3 * run.data):
        run.backward(rows)
        if index % 2:
            run.update()


def one_batch_ahead(run: Run) -> None:
    for _ in range(3):
        fetched = iter(run.loader)
        rows = next(fetched, None)
        while rows is not None:
            loss = run.model(rows).square().mean()
            rows = next(fetched, None)
            loss.backward()
            run.update()


def of_accelerate(run: Run) -> None:
    run.loader = DataLoaderShard(run.data, batch_size=None)
    usual(run)


def groups_of_four_fetched_before(run: Run) -> None:
    for _ in range(9):
        fetched = iter(run.loader)
        while group := list(islice(fetched, 4)):
            for rows in group:
                run.backward(rows)
            run.update()


def read_ahead(loader: DataLoader[Any]) -> Iterator[torch.Tensor]:
    fetched = iter(loader)
    rows = next(fetched)
    for following in fetched:
        yield rows
        rows = following
    yield rows


def behind_a_generator(run: Run) -> None:
    for _ in range(3):
        for rows in read_ahead(run.loader):
            run.backward(rows)
            run.update()


def behind_a_generator_that_is_shown(run: Run) -> None:
    for _ in range(3):
        for rows in run.profiler.batches(read_ahead(run.loader)):
            run.backward(rows)
            run.update()


def evaluation_now_and_then(run: Run) -> None:
    for index, rows in enumerate(run.batches()):
        run.backward(rows)
        run.update()
        if index % 15 == 10:
            run.model.eval()
            with torch.no_grad():
                for others in run.loader:
                    run.model(others)
            run.model.train()


def evaluation_without_a_loader(run: Run) -> None:
    for index, rows in enumerate(run.batches()):
        run.backward(rows)
        run.update()
        if index % 15 == 10:
            run.model.eval()
            run.model(run.data[0])
            run.model.train()


def a_closure(run: Run) -> None:
    for rows in run.batches():

        def closure(rows: torch.Tensor = rows) -> float:
            run.optimizer.zero_grad()
            run.backward(rows)
            return 0.0

        run.optimizer.step(closure)


def two_forwards(run: Run) -> None:
    for rows in run.batches():
        (run.model(rows).mean() + run.model(2 * rows).square().mean()).backward()
        run.update()


def a_step_that_raises(run: Run) -> None:
    for index, rows in enumerate(run.batches()):
        try:
            run.backward(rows if index % 15 != 7 else torch.ones(2, 99))
        except RuntimeError:
            continue
        run.update()


def checkpoints(run: Run) -> None:
    for index, rows in enumerate(run.batches()):
        run.backward(rows)
        run.update()
        if index % 10 == 5:
            with run.profiler.outside_of_steps("checkpoint"):
                pass


def gradients_of_inputs(run: Run) -> None:
    for rows in run.batches():
        rows = rows.clone().requires_grad_()
        (first,) = torch.autograd.grad(run.model(rows).sum(), rows, create_graph=True)
        (first.square().mean() + run.model(rows).square().mean()).backward()
        run.update()


def labelled(run: Run) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The batches, with a label for each row."""
    return [(rows, torch.ones(len(rows))) for rows in run.data]


def over_and_over(run: Run) -> None:
    data: DataLoader[Any] = DataLoader(labelled(run), batch_size=None)  # type: ignore[arg-type]
    for rows, labels in islice(cycle(data), STEPS):
        (run.model(rows).mean(1) - labels).square().mean().backward()
        run.update()


LOOPS = [
    *(usual, without_a_loader, told, groups_of_three_and_a_short_one, groups_without_a_loader, one_batch_ahead),
    *(evaluation_now_and_then, evaluation_without_a_loader, a_closure, two_forwards, a_step_that_raises, checkpoints),
    *(gradients_of_inputs, of_accelerate, groups_of_four_fetched_before, behind_a_generator),
    *(behind_a_generator_that_is_shown, over_and_over),
]


def found(
    loop: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch, *, every: int, **settings: Any
) -> dict[str, Any]:
    """What the monitor has found in *loop*, times apart, read every so many steps."""
    sessions = watch_sessions(monkeypatch)
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    readings: list[dict[str, float]] = []
    with profile_training(
        model,
        optimizer,
        log_every_n_steps=every,
        writer=lambda scalars, step: readings.append({"step": step}),
        **(settings or {"timing_steps": 2, "trace": False}),
    ) as profiler:
        loop(Run(profiler, model, optimizer))
    (session,) = sessions
    assert session.monitor is not None
    totals, books = session.monitor.totals(), session.flops.books.totals()
    return {
        "keys": dict(books.keys),
        "timed": {key: its.steps for key, its in session.flops.books.seconds_by_key().items()},
        "waits": None if totals.reader_sec is None else totals.reader_sec.number,
        "batches": totals.batches,
        "samples": totals.samples,
        "known": (books.steps_counted, books.steps_predicted, books.steps_unknown, books.model_flops),
        "steps": session.steps.steps_done,
        "x_axis": readings,
        "notes": session.notes.of_report(),
        "weights": [weight.tolist() for weight in model.parameters()],
    }


@pytest.mark.parametrize("every", [7, 1000])
@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: str(loop.__name__))
def test_what_is_noted_comes_to_what_is_told_at_once(
    loop: Callable[[Run], None], every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []
    start = NotedCalls.start

    def starts(calls: NotedCalls, *args: Any, steps: int, **more: Any) -> None:
        started.append(steps)
        start(calls, *args, steps=steps, **more)

    with monkeypatch.context() as patched:
        patched.setattr(NotedCalls, "start", starts)
        noted = found(loop, patched, every=every)
    with monkeypatch.context() as patched:
        patched.setattr(NotedCalls, "start", lambda *args, **more: None)
        at_once = found(loop, patched, every=every)
    assert sum(started) > 10  # or there was nothing to compare
    assert noted == at_once


def test_the_steps_of_a_usual_loop_are_those_of_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    run = found(usual, monkeypatch, every=1000, timer_only=True)
    assert run["steps"] == run["batches"] == run["waits"] == STEPS == 60
    assert run["samples"] == 3 * sum(ROWS)
    keys: dict[StepKey, int] = {((((rows, 3),),), 1): 3 * ROWS.count(rows) for rows in (1, 2, 3, 4)}
    assert run["keys"] == run["timed"] == keys


@pytest.mark.parametrize("loop", [of_accelerate, behind_a_generator_that_is_shown], ids=lambda loop: str(loop.__name__))
def test_the_batch_of_a_step_is_the_one_it_computes_on_though_the_next_one_is_fetched(
    loop: Callable[[Run], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = found(loop, monkeypatch, every=1000)
    assert (run["steps"], run["batches"], run["samples"]) == (60, 59, 3 * sum(ROWS) - ROWS[1])  # step 1 is counted
    keys: dict[StepKey, int] = {((((rows, 3),),), 1): 3 * ROWS.count(rows) for rows in (1, 2, 3, 4)}
    keys[((((ROWS[1], 3),),), 1)] -= 1
    assert run["keys"] == keys
    assert not [sentence for sentence in run["notes"] if "before one forward" in sentence]


def test_batches_that_are_fetched_before_they_are_used_are_micro_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    run = found(groups_of_four_fetched_before, monkeypatch, every=1000, timer_only=True)
    assert (run["steps"], run["batches"], run["samples"]) == (9 * 5, 180, 9 * sum(ROWS))
    groups = [tuple(((rows, 3),) for rows in ROWS[begin : begin + 4]) for begin in range(0, 20, 4)]
    keys: dict[StepKey, int] = {}
    for group in 9 * groups:
        keys[group, 1] = keys.get((group, 1), 0) + 1
    assert run["keys"] == keys


def test_it_is_said_where_nobody_knows_which_batch_a_step_computes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    run = found(behind_a_generator, monkeypatch, every=1000)
    assert [sentence for sentence in run["notes"] if "several batches before one forward" in sentence]


def test_groups_of_three_are_steps_of_three_batches_and_the_short_one_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    run = found(groups_of_three_and_a_short_one, monkeypatch, every=1000, timer_only=True)
    assert (run["steps"], run["batches"]) == (3 * 7, 60)
    groups = [ROWS[begin : begin + 3] for begin in range(0, 20, 3)]
    keys: dict[StepKey, int] = {}
    for group in 3 * groups:
        key: StepKey = (tuple(((rows, 3),) for rows in group), 1)
        keys[key] = keys.get(key, 0) + 1
    assert run["keys"] == keys


def test_batches_that_are_used_again_without_a_fetch_are_those_that_were_fetched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of such a batch the model gets its rows, and not the labels: it is known by those that were fetched with them."""
    run = found(over_and_over, monkeypatch, every=1000)
    assert (run["steps"], run["samples"]) == (STEPS, 3 * sum(ROWS) - ROWS[1])  # step 1 is counted
    keys: dict[StepKey, int] = {((((rows, 3), (rows,)),), 1): 3 * ROWS.count(rows) for rows in (1, 2, 3, 4)}
    keys[((((ROWS[1], 3), (ROWS[1],)),), 1)] -= 1
    assert run["keys"] == keys
    assert not [sentence for sentence in run["notes"] if "not fetched for them" in sentence]


def side_by_side(run: Run) -> None:
    """Four batches of 4 rows, again and again, beside twenty of 8."""
    few: DataLoader[Any] = DataLoader([torch.ones(4, 3)] * 4, batch_size=None)  # type: ignore[arg-type]
    many: DataLoader[Any] = DataLoader([torch.ones(8, 3)] * 20, batch_size=None)  # type: ignore[arg-type]
    for _ in range(2):
        for one, other in zip(cycle(few), many, strict=False):
            run.backward(torch.cat([one, other]))
            run.update()


def test_samples_of_loaders_side_by_side_are_those_of_both_or_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    run = found(side_by_side, monkeypatch, every=1000, timer_only=True)
    both, one_alone = ((4, 3), (-5,), (8, 3)), ((8, 3), (-5,), (-1,))
    assert run["keys"] == {((both,), 1): 2 * 4, ((one_alone,), 1): 2 * 16}
    assert run["samples"] is None
    assert [sentence for sentence in run["notes"] if "several loaders" in sentence and "n/a" in sentence]


def test_samples_of_loaders_that_end_together_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def pairs(run: Run) -> None:
        loaders: list[DataLoader[Any]] = [
            DataLoader([torch.ones(rows, 3)] * 10, batch_size=None)  # type: ignore[arg-type]
            for rows in (4, 8)
        ]
        for _ in range(3):
            for one, other in zip(*loaders, strict=False):
                run.backward(torch.cat([one, other]))
                run.update()

    run = found(pairs, monkeypatch, every=1000, timer_only=True)
    assert (run["steps"], run["samples"]) == (30, 30 * 12)
    assert not [sentence for sentence in run["notes"] if "several loaders" in sentence]


def test_pieces_of_a_batch_are_no_batches_that_were_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def pieces(run: Run) -> None:
        run.data = [torch.ones(6, 3)] * len(ROWS)
        run.loader = DataLoader(run.data, batch_size=None)  # type: ignore[arg-type]
        for rows in run.batches():
            for piece in rows.split(2):
                run.backward(piece)
                run.update()

    run = found(pieces, monkeypatch, every=1000, timer_only=True)
    assert run["keys"] == {((((6, 3),),), 1): STEPS, ((((2, 3),),), 1): 2 * STEPS}
    assert [sentence for sentence in run["notes"] if "on pieces of one that was" in sentence]


@pytest.mark.parametrize("twice", [False, True], ids=["usual", "two forwards"])
def test_the_arguments_of_64_kinds_of_batches_are_looked_at(twice: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def ever_new(run: Run) -> None:
        run.loader = DataLoader([torch.ones(rows, 3) for rows in range(1, 121)], batch_size=None)  # type: ignore[arg-type]
        for rows in run.loader:
            if twice:
                run.model(rows)
            run.backward(rows)
            run.update()
        calls: NotedCalls = run.profiler._loop._calls  # type: ignore[union-attr]
        calls.stop()
        looked_at.append(calls.replayed.known)

    looked_at: list[set[Any]] = []
    found(ever_new, monkeypatch, every=1000, timer_only=True)
    assert looked_at == [{((rows, 3),) for rows in range(1, 65)}]


def test_a_step_without_end_is_not_noted_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    def endless(run: Run) -> None:
        nonlocal longest
        without_a_loader(run)
        calls: NotedCalls = run.profiler._loop._calls  # type: ignore[union-attr]
        for _ in range(MOST_KINDS):
            run.backward(run.data[0])
            longest = max(longest, len(calls.kinds), len(calls.facts))

    found(endless, monkeypatch, every=1000)
    assert MOST_KINDS / 2 < longest < 2 * MOST_KINDS


def test_batches_that_nothing_is_done_with_are_not_noted_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    longest = 0

    def skips(run: Run) -> None:
        nonlocal longest
        calls: NotedCalls = run.profiler._loop._calls  # type: ignore[union-attr]
        loader: DataLoader[Any] = DataLoader([run.data[0]] * 3 * MOST_KINDS, batch_size=None)  # type: ignore[arg-type]
        for index, batch in enumerate(loader):
            if index < STEPS:
                run.backward(batch)
                run.update()
            longest = max(longest, len(calls.kinds), len(calls.facts))

    found(skips, monkeypatch, every=1000)
    assert MOST_KINDS / 2 < longest < 2 * MOST_KINDS


@pytest.mark.parametrize("lengths", [False, True], ids=["equal", "ever new"])
def test_a_step_between_windows_costs_few_calls_of_ours(lengths: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_flops.session.samples.MOST", 0)  # no step is counted outside of the window
    model, calls = Net(), OurCalls(first=110, last=210)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rows = [torch.ones(2 + (index if lengths else 0), 3) for index in range(220)]
    loader: DataLoader[Any] = DataLoader(rows, batch_size=None)  # type: ignore[arg-type]
    with profile_training(model, optimizer, timing_steps=5, trace=False, log_every_n_steps=1000):
        for batch in loader:
            calls.step_begins()
            model(batch).square().mean().backward()
            optimizer.step()
    assert calls.a_step <= 11, calls.calls  # one is a hook of torch's, which tells of the updates of other loops
