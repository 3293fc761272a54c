"""Loops that people write: what a step is in each, what it computes, and which second belongs to which part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

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
    NARROW,
    SECOND,
    UPDATE_SEC,
    WIDE,
    Net,
    Rows,
    SharpnessAware,
    SlowSGD,
    loader,
    loss_of,
    stream,
)

SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 2, "trace": False}

STEP = PhaseSeconds(
    data_wait=FETCH_SEC, forward=FORWARD_SEC + LOSS_SEC, backward=BACKWARD_SEC, optimizer=UPDATE_SEC, other=0.0
)
"""The times of a step of one batch in which nothing else happens."""
STEP_SEC = FETCH_SEC + FORWARD_SEC + LOSS_SEC + BACKWARD_SEC + UPDATE_SEC


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


def test_a_loop_is_profiled_without_a_line_inside_it(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
            optimizer.zero_grad()
    profile, run = profile_of(profiler), throughput_of(profiler)
    assert (flops(profiler), profile.flops.optimizer, batches(profiler)) == ((FORWARD, BACKWARD), 0, (BATCH, 1))
    assert (profile.profile_step, profile.counted_steps, profile.timed_steps) == (1, (1,), (4, 5))
    by_module = {one.name: (one.type_name, one.total.forward, one.total.backward) for one in profile.modules}
    assert by_module == {
        "": ("Net", FORWARD, BACKWARD),
        "first": ("Linear", FIRST, FIRST),
        "second": ("Linear", SECOND, 2 * SECOND),
    }
    assert (profile.context.framework, profile.context.precision, profile.context.micro_batch_size) == (
        "torch", "float32", BATCH,
    )  # fmt: skip
    assert seconds(windows) == [STEP, STEP]
    assert set(windows[0].mixed_phases) == {"transfer", "other"}
    # The counted step is in no rate; the FLOPs are of every step.
    assert (run.batches, run.model_flops) == (7, 8 * (FORWARD + BACKWARD))
    assert run.ips is not None and run.ips_unit == "samples/s"
    assert (run.batch_cost_sec.average, run.ips.average) == (STEP_SEC, BATCH / STEP_SEC)
    assert run.reader_cost_sec is not None and run.reader_cost_sec.average == FETCH_SEC


def test_the_dtype_of_an_autocast_is_named_beside_the_parameters(net: Net, optimizer: SlowSGD, now: FakeNow) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = net(rows)
            loss_of(output, now).backward()
            optimizer.step()
    assert profile_of(profiler).context.precision == "bfloat16 mixed, float32 parameters"
    assert flops(profiler) == (FORWARD, BACKWARD)
    assert {row.dtype for row in profile_of(profiler).dtypes} == {"bfloat16"}


def test_the_loss_is_forward_though_gradients_are_cleared_before_its_backward(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            output = net(rows)
            optimizer.zero_grad()
            loss_of(output @ output.T, now).backward()
            optimizer.step()
    similarities = 2 * BATCH * NARROW * BATCH
    assert flops(profiler) == (FORWARD + similarities, BACKWARD + 2 * similarities)
    assert seconds(windows) == [STEP, STEP]


# ---- where a step ends


@pytest.mark.parametrize("told", [False, True])
def test_accumulated_batches_are_one_step(
    told: bool, net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for place, rows in enumerate(loader(24, now)):
            (loss_of(net(rows), now) / 3).backward()
            if place % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            if told:
                profiler.step()
    assert (flops(profiler), batches(profiler)) == ((3 * FORWARD, 3 * BACKWARD), (3 * BATCH, 3))
    assert profile_of(profiler).context.accumulate == 3
    whole = PhaseSeconds(
        data_wait=3 * FETCH_SEC,
        forward=3 * (FORWARD_SEC + LOSS_SEC),
        backward=3 * BACKWARD_SEC,
        optimizer=UPDATE_SEC,
    )
    assert seconds(windows) == [whole, whole]
    assert (throughput_of(profiler).batches, throughput_of(profiler).model_flops) == (21, 24 * (FORWARD + BACKWARD))


def test_without_an_optimizer_a_step_ends_where_the_loop_says(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    assert (flops(profiler), batches(profiler)) == ((FORWARD, BACKWARD), (BATCH, 1))
    assert seconds(windows) == [STEP, STEP]  # torch tells which optimizer steps


def test_without_an_optimizer_and_without_a_word_nothing_is_profiled_and_that_is_said(
    net: Net, optimizer: SlowSGD, now: FakeNow, caplog: pytest.LogCaptureFixture
) -> None:
    with profile_training(net, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert profiler.profile is None
    assert "profile_step is 1, and this run ended after 0 step(s)" in caplog.text


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


def test_a_model_that_was_not_given_is_outside_and_its_backward_is_the_steps(now: FakeNow, windows: list[Any]) -> None:
    models, optimizers = gan(now)
    with profile_training(models["net"], optimizers, **SETTINGS) as profiler:
        for rows in loader(8, now):
            for model, optimizer in zip(models.values(), optimizers, strict=True):
                loss_of(model(rows), now).backward()
                optimizer.step()
    profile = profile_of(profiler)
    assert (flops(profiler), batches(profiler)) == ((2 * FORWARD, 2 * BACKWARD), (BATCH, 1))
    assert (profile.modules[0].total.forward, profile.outside.forward) == (FORWARD, FORWARD)
    assert [(step.backward, step.optimizer) for step in seconds(windows)] == [(2 * BACKWARD_SEC, 2 * UPDATE_SEC)] * 2


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


def test_several_forwards_before_one_backward(net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows) - net(rows * 0.5), now).backward()
            optimizer.step()
    assert (flops(profiler), batches(profiler)) == ((2 * FORWARD, 2 * BACKWARD), (BATCH, 1))
    assert [step.forward for step in seconds(windows)] == [2 * FORWARD_SEC + LOSS_SEC] * 2


@pytest.mark.parametrize("clears_first", [False, True])
def test_what_a_closure_runs_is_not_the_optimizers(
    clears_first: bool, net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):

            def closure(rows: torch.Tensor = rows) -> torch.Tensor:
                if clears_first:
                    optimizer.zero_grad()
                loss = loss_of(net(rows), now)
                if not clears_first:
                    optimizer.zero_grad()
                loss.backward()
                return loss

            optimizer.step(closure)
    assert (flops(profiler), batches(profiler)) == ((FORWARD, BACKWARD), (BATCH, 1))
    assert seconds(windows) == [STEP, STEP]


def test_lbfgs_runs_its_closure_several_times_in_one_step(net: Net, now: FakeNow, windows: list[Any]) -> None:
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, tolerance_change=0.0, tolerance_grad=0.0)
    calls = [0]
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):

            def closure(rows: torch.Tensor = rows) -> torch.Tensor:
                calls[0] += 1
                optimizer.zero_grad()
                loss = loss_of(net(rows), now)
                loss.backward()
                return loss

            optimizer.step(closure)
    a_step = calls[0] // 8
    assert a_step > 1 and calls[0] == 8 * a_step
    assert (flops(profiler), profile_of(profiler).micro_steps) == ((a_step * FORWARD, a_step * BACKWARD), 1)
    assert [(step.forward, step.backward) for step in seconds(windows)] == [
        (a_step * (FORWARD_SEC + LOSS_SEC), a_step * BACKWARD_SEC)
    ] * 2


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


def test_an_update_that_a_scaler_skips_joins_the_next_step(net: Net, optimizer: SlowSGD, now: FakeNow) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for place, rows in enumerate(loader(10, now)):
            scaler.scale(loss_of(net(rows), now) * (float("inf") if place == 7 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert (flops(profiler), profile_of(profiler).timed_steps) == ((FORWARD, BACKWARD), (4, 5))
    run = throughput_of(profiler)
    assert (run.batches, run.steps_counted + run.steps_by_formula + run.steps_estimated) == (9, 9)


def test_updates_inside_the_backward_end_the_step_when_it_returns(net: Net, now: FakeNow, windows: list[Any]) -> None:
    optimizers = {weight: SlowSGD([weight], now) for weight in net.parameters()}
    for weight in optimizers:
        weight.register_post_accumulate_grad_hook(lambda one: optimizers[one].step())
    with profile_training(net, list(optimizers.values()), **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
    assert (flops(profiler), batches(profiler)) == ((FORWARD, BACKWARD), (BATCH, 1))
    assert [step.backward for step in seconds(windows)] == [BACKWARD_SEC + 4 * UPDATE_SEC] * 2


def test_a_gradient_penalty_is_a_backward(net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            rows.requires_grad_()
            output = net(rows)
            (slope,) = torch.autograd.grad(output.sum(), rows, retain_graph=True)
            assert slope.shape == rows.shape
            loss_of(output, now).backward()
            optimizer.step()
    # The slope takes a product in each layer, without its weights' gradients; the backward now reaches the rows, too.
    assert flops(profiler) == (FORWARD, FORWARD + 2 * FORWARD)
    assert [step.backward for step in seconds(windows)] == [2 * BACKWARD_SEC] * 2


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


# ---- which batch, and the wait for it


def test_batches_of_any_iterable_are_seen(net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in profiler.batches(stream(8, now)):
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert (flops(profiler), batches(profiler)) == ((FORWARD, BACKWARD), (BATCH, 1))
    assert seconds(windows) == [STEP, STEP]
    assert throughput_of(profiler).reader_ratio == pytest.approx(FETCH_SEC / STEP_SEC)


def test_a_loader_in_batches_waits_once_and_is_otherwise_the_loader(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        data: Any = profiler.batches(loader(4, now))
        assert len(data) == 4 and data.batch_size == BATCH
        for _ in range(2):
            for rows in data:
                loss_of(net(rows), now).backward()
                optimizer.step()
    assert profile_of(profiler).samples == BATCH
    assert seconds(windows) == [STEP, STEP]


def test_batches_without_a_loader_are_those_of_the_forwards_and_the_wait_is_not_seen(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    rows = torch.randn(BATCH, WIDE)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for _ in range(8):
            for _ in range(2):
                now.sleep(FETCH_SEC)
                loss_of(net(rows), now).backward()
            optimizer.step()
    assert (flops(profiler), batches(profiler)) == ((2 * FORWARD, 2 * BACKWARD), (2 * BATCH, 2))
    assert set(windows[0].mixed_phases) == {"data_wait", "transfer", "other"}
    assert [step.other for step in seconds(windows)] == [2 * FETCH_SEC] * 2
    assert throughput_of(profiler).reader_ratio is None


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
    assert throughput_of(profiler).batches == 18


@pytest.mark.parametrize("place", ["before the loss", "before the update", "after the update"])
def test_a_batch_that_is_fetched_early_belongs_to_the_next_step(
    place: str, net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        fetched = iter(loader(10, now))
        rows, following = next(fetched, None), None
        while rows is not None:
            output = net(rows)
            if place == "before the loss":
                following = next(fetched, None)
            loss_of(output, now).backward()
            if place == "before the update":
                following = next(fetched, None)
            optimizer.step()
            if place == "after the update":
                following = next(fetched, None)
            rows = following
    assert (flops(profiler), batches(profiler)) == ((FORWARD, BACKWARD), (BATCH, 1))
    assert seconds(windows) == [STEP, STEP]
    assert throughput_of(profiler).batches == 9


def test_a_loader_that_fails_once_is_seen_again_afterwards(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    class Failing(Rows):
        def __getitem__(self, place: int) -> torch.Tensor:
            if place == 1 * BATCH:
                raise OSError("no such row")
            return super().__getitem__(place)

    with profile_training(net, optimizer, **SETTINGS) as profiler:
        fetched = iter(DataLoader(Failing(10, now), batch_size=BATCH))
        while True:
            try:
                rows = next(fetched)
            except OSError:
                continue
            except StopIteration:
                break
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert (flops(profiler), batches(profiler)) == ((FORWARD, BACKWARD), (BATCH, 1))
    assert "data_wait" not in windows[0].mixed_phases
    assert seconds(windows) == [STEP, STEP]


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


# ---- what belongs to no step


@pytest.mark.parametrize("where", ["of the whole evaluation", "of each forward"])
def test_an_evaluation_without_gradients_is_in_no_figure(
    where: str, net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    around_all = where == "of the whole evaluation"
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
            net.eval()
            with torch.set_grad_enabled(not around_all):
                for others in loader(2, now):
                    with torch.no_grad():
                        net(others)
            net.train()
    assert flops(profiler) == (FORWARD, BACKWARD)
    assert seconds(windows) == [STEP, STEP]
    assert excluded(windows) == [{"validation": 2 * (FETCH_SEC + FORWARD_SEC)}] * 2
    run = throughput_of(profiler)
    assert (run.batch_cost_sec.average, run.model_flops) == (STEP_SEC, 8 * (FORWARD + BACKWARD))


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


def test_an_evaluation_in_the_middle_of_an_accumulated_step_is_no_part_of_it(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for number, rows in enumerate(loader(16, now)):
            loss_of(net(rows), now).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            else:
                net.eval()
                with torch.no_grad():
                    for one in loader(3, now):
                        net(one)
                net.train()
    assert flops(profiler) == (2 * FORWARD, 2 * BACKWARD)
    assert [(step.data_wait, step.backward) for step in seconds(windows)] == [(2 * FETCH_SEC, 2 * BACKWARD_SEC)] * 2
    assert excluded(windows) == [{"validation": 3 * (FETCH_SEC + FORWARD_SEC)}] * 2
    assert throughput_of(profiler).model_flops == 16 * (FORWARD + BACKWARD)


@pytest.mark.parametrize("whose", ["its own", "another's"])
@pytest.mark.parametrize("where", ["between steps", "inside a step"])
def test_what_the_loop_leaves_out_is_in_no_step(
    whose: str, where: str, net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    """As in an evaluation of a model that is in training mode, or of an averaged one."""
    evaluated = net if whose == "its own" else Net(now)

    def evaluate(profiler: TrainingProfiler) -> None:
        with profiler.outside_of_steps("samples"):
            for others in loader(2, now):
                loss_of(evaluated(others), now)

    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss = loss_of(net(rows), now)
            if where == "inside a step":
                evaluate(profiler)
            loss.backward()
            optimizer.step()
            if where == "between steps":
                evaluate(profiler)
    assert (flops(profiler), batches(profiler)) == ((FORWARD, BACKWARD), (BATCH, 1))
    assert seconds(windows) == [STEP, STEP]
    assert excluded(windows) == [{"samples": 2 * (FETCH_SEC + FORWARD_SEC + LOSS_SEC)}] * 2
    run = throughput_of(profiler)
    assert (run.batch_cost_sec.average, run.model_flops) == (STEP_SEC, 8 * (FORWARD + BACKWARD))


def test_a_teachers_forward_belongs_to_the_step(net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]) -> None:
    teacher = Net(now).eval()
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            with torch.no_grad():
                wanted = teacher(rows)
            loss_of(net(rows) - wanted, now).backward()
            optimizer.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.outside.forward) == (2 * FORWARD, FORWARD)
    assert profile.flops.without_backward == FORWARD
    assert [step.other for step in seconds(windows)] == [FORWARD_SEC] * 2


def test_a_model_whose_methods_are_called_is_counted_whole(now: FakeNow, windows: list[Any]) -> None:
    class Method(Net):
        def loss(self, rows: torch.Tensor) -> torch.Tensor:
            return loss_of(self.second(self.first(rows)), now)

    net = Method(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            net.loss(rows).backward()
            optimizer.step()
    assert (flops(profiler), batches(profiler)) == ((FORWARD, BACKWARD), (BATCH, 1))
    assert [step.forward for step in seconds(windows)] == [LOSS_SEC] * 2  # from the fetch to the backward


def test_a_model_that_trains_in_evaluation_mode_is_profiled_from_its_first_step(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    net.eval()
    with profile_training(net, optimizer, profile_step=0, timing_steps=2, trace=False) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert (flops(profiler), batches(profiler)) == ((FORWARD, BACKWARD), (BATCH, 1))
    assert profile_of(profiler).counted_steps == (0,)
    assert seconds(windows) == [STEP, STEP]


# ---- windows, and loops that end early


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


def test_windows_follow_each_other(net: Net, optimizer: SlowSGD, now: FakeNow) -> None:
    with profile_training(net, optimizer, profile_step=1, every=8, timing_steps=2, trace=False) as profiler:
        for rows in loader(16, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert [profile.counted_steps for profile in profiler.profiles] == [(1,), (9,)]
    assert {profile.flops.forward for profile in profiler.profiles} == {FORWARD}


def test_a_loop_that_breaks_off_reports_what_there_is(net: Net, optimizer: SlowSGD, now: FakeNow) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for place, rows in enumerate(loader(8, now)):
            loss_of(net(rows), now).backward()
            optimizer.step()
            if place == 4:
                break
    assert (flops(profiler), profile_of(profiler).timed_steps) == ((FORWARD, BACKWARD), (4,))


@pytest.mark.parametrize("step", [1, 4])
def test_an_exception_that_leaves_the_loop_is_the_users_and_there_is_a_report(
    step: int, net: Net, optimizer: SlowSGD, now: FakeNow
) -> None:
    profiler = profile_training(net, optimizer, **SETTINGS)
    with pytest.raises(ZeroDivisionError), profiler:
        for place, rows in enumerate(loader(8, now)):
            loss_of(net(rows), now).backward()
            optimizer.step()
            if place == step:
                raise ZeroDivisionError
    assert flops(profiler) == (FORWARD, BACKWARD)
    assert any("interrupted by ZeroDivisionError" in note for note in profile_of(profiler).notes)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_batch_that_the_loop_gives_up_is_in_no_timed_step(
    where: str, net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("no gradient")

    with profile_training(net, optimizer, profile_step=1, timing_steps=4, trace=False) as profiler:
        for place, rows in enumerate(loader(14, now)):
            try:
                wrong = where == "forward" and place == 5
                output = net(torch.cat([rows, rows], dim=1) if wrong else rows)  # does not fit the first layer
                if where == "backward" and place == 5:
                    output.register_hook(fail)
                loss_of(output, now).backward()
                optimizer.step()
            except RuntimeError:
                continue
    assert flops(profiler) == (FORWARD, BACKWARD)
    assert seconds(windows) == [STEP] * 4


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
    assert (flops(profiler), throughput_of(profiler).batches) == ((FORWARD, BACKWARD), 5)
    train(2)
    assert throughput_of(profiler).batches == 5


def test_batches_are_otherwise_what_they_were() -> None:
    with profile_training(nn.Linear(2, 2)) as profiler:
        numbers = profiler.batches([1, 2, 3])
        assert (bool(numbers), len(numbers), numbers[1], list(numbers)) == (True, 3, 2, [1, 2, 3])
        assert bool(profiler.batches(iter([])))


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
