"""Steps of loops with several models or optimizers, which batch they use, and what a loop says itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops import Profile, profile_training
from lightning_flops.pytorch import TrainingProfiler
from lightning_flops.records import PhaseSeconds
from lightning_flops.schema.throughput import ThroughputSummary
from tests.fake_clock import FakeNow
from tests.left_on_objects import left_on_object
from tests.loops.nets import (
    BACKWARD,
    BACKWARD_SEC,
    BATCH,
    FETCH_SEC,
    FIRST,
    FORWARD,
    FORWARD_SEC,
    LOSS_SEC,
    UPDATE_SEC,
    WIDE,
    Net,
    SlowSGD,
    loader,
    loss_of,
)

SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 2, "trace": False}

STEP = PhaseSeconds(
    data_wait=FETCH_SEC, forward=FORWARD_SEC + LOSS_SEC, backward=BACKWARD_SEC, optimizer=UPDATE_SEC, other=0.0
)
"""The times of a step of one batch in which nothing else happens."""


class SharpnessAware(torch.optim.Optimizer):
    """SAM as people write it: it goes up the gradient, asks for another one there, and goes back; another updates."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([one for group in inner.param_groups for one in group["params"]], {})
        self.inner = inner
        self._ways: list[torch.Tensor] = []

    @property
    def _all(self) -> list[torch.Tensor]:
        return [one for group in self.param_groups for one in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        """Go up."""
        self._ways = [0.01 * one.grad for one in self._all if one.grad is not None]
        for one, way in zip(self._all, self._ways, strict=True):
            one.add_(way)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        """Go back, and make the update."""
        for one, way in zip(self._all, self._ways, strict=True):
            one.sub_(way)
        self.inner.step()
        self.zero_grad()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Both, with *closure* in between."""
        assert closure is not None
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


@pytest.fixture
def net(now: FakeNow) -> Net:
    return Net(now)


@pytest.fixture
def optimizer(net: Net, now: FakeNow) -> SlowSGD:
    return SlowSGD(net.parameters(), now)


def profile_of(profiler: TrainingProfiler) -> Profile:
    assert profiler.profile is not None
    return profiler.profile


def throughput_of(profiler: TrainingProfiler) -> ThroughputSummary:
    assert profiler.throughput is not None
    return profiler.throughput


def seconds(windows: list[Any]) -> list[PhaseSeconds]:
    """The times of every timed step of the only window."""
    (window,) = windows
    return [step.seconds for step in window.timed_steps]


def excluded(windows: list[Any]) -> list[dict[str, float]]:
    """What ran between the timed steps and is in none."""
    (window,) = windows
    return [step.excluded_sec for step in window.timed_steps]


def flops(profiler: TrainingProfiler) -> tuple[int, int]:
    """Forward and backward of the counted step."""
    counted = profile_of(profiler).flops
    return counted.forward, counted.backward


def batches(profiler: TrainingProfiler) -> tuple[float | None, float | None]:
    """Samples of a step, and its micro-batches."""
    return profile_of(profiler).samples, profile_of(profiler).micro_steps


def gan(now: FakeNow) -> tuple[dict[str, nn.Module], list[SlowSGD]]:
    """A critic and a generator, and their optimizers."""
    models: dict[str, nn.Module] = {"critic": Net(now), "net": Net(now)}
    return models, [SlowSGD(one.parameters(), now) for one in models.values()]


TWICE = PhaseSeconds(
    data_wait=FETCH_SEC,
    forward=2 * (FORWARD_SEC + LOSS_SEC),
    backward=2 * BACKWARD_SEC,
    optimizer=2 * UPDATE_SEC,
    other=0.0,
)


@pytest.mark.parametrize("listed", ["in order", "turned round, and the loop tells its steps"])
def test_a_step_of_two_models_ends_with_the_last_optimizer_or_where_the_loop_says(
    listed: str, now: FakeNow, windows: list[Any]
) -> None:
    models, optimizers = gan(now)
    in_order = listed == "in order"
    settings = SETTINGS if in_order else {**SETTINGS, "profile_step": 2}  # before it is told, a step is half of one
    with profile_training(models, optimizers if in_order else optimizers[::-1], **settings) as profiler:
        for rows in loader(8, now):
            for model, optimizer in zip(models.values(), optimizers, strict=True):
                loss_of(model(rows), now).backward()
                optimizer.step()
            if not in_order:
                profiler.step()
    assert (flops(profiler), profile_of(profiler).micro_steps) == ((2 * FORWARD, 2 * BACKWARD), 1)
    by_name = {one.name: one.total.forward for one in profile_of(profiler).modules}
    assert (by_name["critic"], by_name["net"], by_name["net.first"]) == (FORWARD, FORWARD, FIRST)
    assert seconds(windows) == [TWICE, TWICE]
    assert throughput_of(profiler).model_flops == 8 * 2 * (FORWARD + BACKWARD)


def test_an_optimizer_that_never_ends_a_step_is_named(
    net: Net, optimizer: SlowSGD, now: FakeNow, caplog: pytest.LogCaptureFixture
) -> None:
    class Later(SlowSGD):
        """The discriminator's, in a loop that trains without it."""

    with profile_training(net, [optimizer, Later(Net(now).parameters(), now)], **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert profiler.profile is None
    assert "Later, the last optimizer in the list, ends each" in caplog.text
    assert "this run ended after 0 step(s)" in caplog.text


@pytest.mark.parametrize("given", ["the inner one", "both", "none"])
@pytest.mark.parametrize("by_closure", [False, True])
def test_an_optimizer_around_another_one_makes_one_step(
    by_closure: bool, given: str, net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    outer = SharpnessAware(optimizer)
    optimizers = {"the inner one": optimizer, "both": [outer, optimizer], "none": None}[given]
    with profile_training(net, optimizers, **SETTINGS) as profiler:
        for rows in loader(8, now):

            def loss_there(rows: torch.Tensor = rows) -> None:
                loss_of(net(rows), now).backward()

            loss_there()
            if by_closure:
                outer.step(loss_there)
            else:
                outer.first_step()
                loss_there()
                outer.second_step()
            if given == "none":
                profiler.step()
    assert flops(profiler) == (2 * FORWARD, 2 * BACKWARD)
    assert (profile_of(profiler).counted_steps, profile_of(profiler).timed_steps) == ((1,), (4, 5))
    assert profile_of(profiler).micro_steps == 1
    assert throughput_of(profiler).model_flops == 8 * 2 * (FORWARD + BACKWARD)
    assert seconds(windows) == [replace(TWICE, optimizer=UPDATE_SEC)] * 2
    assert left_on_object(outer) == left_on_object(optimizer) == []


def test_a_recomputation_by_a_reentrant_checkpoint_is_backward(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(WIDE, WIDE, bias=False) for _ in range(3)])

        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                rows = torch.utils.checkpoint.checkpoint(block, rows, use_reentrant=True)
            return rows

    model, layer = Checkpointed(), 2 * BATCH * WIDE * WIDE
    updates = SlowSGD(model.parameters(), now)
    with profile_training(model, updates, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(model(rows.requires_grad_()), now).backward()
            updates.step()
    assert flops(profiler) == (3 * layer, 6 * layer)
    assert (profile_of(profiler).flops.recompute, profile_of(profiler).micro_steps) == (3 * layer, 1)
    assert [(step.forward, step.backward) for step in seconds(windows)] == [(LOSS_SEC, 0.0)] * 2


def test_a_traced_forward_is_one_call_of_the_model(net: Net, optimizer: SlowSGD, now: FakeNow) -> None:
    with profile_training(net, optimizer, profile_step=1, timing_steps=2) as profiler:
        for rows in loader(10, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    traced = profile_of(profiler).traced
    assert traced is not None and traced.tables is not None and traced.tables.modules is not None
    rows_of = {row.name: row for row in traced.tables.modules.rows}
    assert {name: row.calls for name, row in rows_of.items()} == {"": 1, "first": 1, "second": 1}
    inside = rows_of["first"].forward_us + rows_of["second"].forward_us
    assert rows_of[""].forward_us == pytest.approx(rows_of[""].own_forward_us + inside)


def ahead(batches: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """As accelerate's loaders do: a batch is handed out when the next one is there."""
    iterator = iter(batches)
    held = next(iterator)
    for one in iterator:
        yield held
        held = one
    yield held


def test_a_loader_that_is_one_batch_ahead(net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for place, rows in enumerate(ahead(loader(20, now))):
            loss_of(net(rows), now).backward()
            if place % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert (flops(profiler), batches(profiler)) == ((2 * FORWARD, 2 * BACKWARD), (2 * BATCH, 2))
    assert [step.data_wait for step in seconds(windows)] == [2 * FETCH_SEC] * 2


class Embedding(nn.Module):
    """Gets token ids and their mask."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 1)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(input_ids))[attention_mask.bool()]  # type: ignore[no-any-return]


def test_tokens_and_padding_are_those_of_the_batches(now: FakeNow) -> None:
    model = Embedding()
    optimizer = SlowSGD(model.parameters(), now)
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    with profile_training(model, optimizer, **SETTINGS) as profiler:
        for _ in profiler.batches(range(8)):
            model(input_ids=torch.ones(2, 5, dtype=torch.int64), attention_mask=mask).mean().backward()
            optimizer.step()
    run = throughput_of(profiler)
    assert (run.tokens, run.real_tokens, run.padding_ratio) == (8 * 10, 8 * 6, 0.4)
    assert run.tokens_per_sec == 6 / UPDATE_SEC
    assert run.ips is not None and (run.ips_unit, run.ips.average) == ("samples/s", 2 / UPDATE_SEC)


def test_a_function_of_the_users_is_asked_of_what_the_model_gets(net: Net, optimizer: SlowSGD, now: FakeNow) -> None:
    with profile_training(net, optimizer, batch_size=lambda rows: 10 * len(rows), **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert profile_of(profiler).samples == 10 * BATCH


def test_an_evaluation_after_the_fetch_leaves_the_wait_to_the_step(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS):
        for rows in loader(8, now):
            net.eval()
            with torch.no_grad():
                net(rows)
            net.train()
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert seconds(windows) == [STEP, STEP]
    assert excluded(windows) == [{"validation": FORWARD_SEC}] * 2


def test_start_and_stop_do_what_with_does_and_a_second_start_ends_the_first(
    net: Net, optimizer: SlowSGD, now: FakeNow
) -> None:
    profiler = profile_training(net, optimizer, **SETTINGS)

    def train(batches: int) -> None:
        for rows in loader(batches, now):
            loss_of(net(rows), now).backward()
            optimizer.step()

    profiler.start()
    train(8)
    profiler.start()
    first = profiler.profiles
    train(6)
    profiler.stop()
    profiler.stop()
    assert (len(first), len(profiler.profiles)) == (0, 1)
    run = throughput_of(profiler)
    assert (flops(profiler), run.model_flops) == ((FORWARD, BACKWARD), 6 * (FORWARD + BACKWARD))
    train(2)
    assert throughput_of(profiler) is run


WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": torch.relu}, TypeError, "model must be a torch.nn.Module"),
    ({"model": {}}, ValueError, "a mapping of at least one"),
    ({"model": {"a.b": nn.Linear(1, 1)}}, ValueError, "names without dots"),
    ({"optimizer": 3}, ValueError, "optimizer must be an optimizer or several"),
    ({"writer": 3}, ValueError, "writer must have add_scalar"),
    ({"log_every_n_steps": 0}, ValueError, "log_every_n_steps must be an integer >= 1"),
    ({"initial_step": -1}, ValueError, "initial_step must be an integer >= 0"),
    ({"timing_steps": 0}, ValueError, "timing_steps must be an integer >= 1"),
    ({"accelerator": object(), "fabric": object()}, ValueError, "cannot both drive the loop"),
]


@pytest.mark.parametrize(("given", "kind", "words"), WRONG, ids=[words for _, _, words in WRONG])
def test_what_is_wrong_is_named(given: dict[str, Any], kind: type[Exception], words: str) -> None:
    make: Callable[..., Any] = profile_training
    with pytest.raises(kind, match=words):
        make(**{"model": nn.Linear(1, 1), **given})
