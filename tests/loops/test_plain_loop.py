"""Loops that people write: what a step is in each, what it computes, and which second belongs to which part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_flops import Profile, profile_training
from lightning_flops.pytorch import TrainingProfiler
from lightning_flops.records import PhaseSeconds
from lightning_flops.schema.throughput import ThroughputSummary
from tests.fake_clock import FakeNow
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
    UPDATE_SEC,
    WIDE,
    Net,
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
TWICE = PhaseSeconds(
    data_wait=FETCH_SEC,
    forward=2 * (FORWARD_SEC + LOSS_SEC),
    backward=2 * BACKWARD_SEC,
    optimizer=2 * UPDATE_SEC,
    other=0.0,
)

Step = Callable[[TrainingProfiler, int, Tensor], object]


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


def profiled(model: Any, optimizer: Any, now: FakeNow, step: Step, batches: int = 8, **given: Any) -> TrainingProfiler:
    """A loop over so many batches, each of which *step* gets, with its place."""
    with profile_training(model, optimizer, **{**SETTINGS, **given}) as profiler:
        for place, rows in enumerate(loader(batches, now)):
            step(profiler, place, rows)
    return profiler


def plain(model: nn.Module, optimizer: SlowSGD, now: FakeNow) -> Step:
    """The step that everybody writes."""

    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        loss_of(model(rows), now).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_loop_is_profiled_without_a_line_inside_it(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    profiler = profiled(net, optimizer, now, plain(net, optimizer, now))
    profile, run = profile_of(profiler), throughput_of(profiler)
    assert (profile.flops.forward, profile.flops.backward, profile.flops.optimizer) == (FORWARD, BACKWARD, 0)
    assert (profile.profile_step, profile.counted_steps, profile.timed_steps) == (1, (1,), (4, 5))
    assert (profile.samples, profile.micro_steps, profile.context.micro_batch_size) == (BATCH, 1, BATCH)
    assert profile.modules[0].name == "" and profile.modules[0].type_name == "Net"
    assert profile.context.framework == "torch" and profile.context.precision == "float32"
    assert seconds(windows) == [STEP, STEP]
    assert set(windows[0].mixed_phases) == {"transfer", "other"}
    assert (run.ips_unit, run.mfu, run.model_flops) == ("samples/s", None, 8 * (FORWARD + BACKWARD))
    assert "no dense peak" in run.unavailable["mfu"]
    asked = profiled(net, optimizer, now, plain(net, optimizer, now), batch_size=lambda rows: 10 * len(rows))
    assert profile_of(asked).samples == 10 * BATCH


@pytest.mark.parametrize("before_loss", [False, True])
def test_the_loss_is_forward_though_gradients_are_cleared_before_its_backward(
    net: Net, optimizer: SlowSGD, before_loss: bool, now: FakeNow, windows: list[Any]
) -> None:
    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        output = net(rows)
        if before_loss:
            optimizer.zero_grad()
        loss = loss_of(output @ output.T, now)
        if not before_loss:
            optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    similarities = 2 * BATCH * NARROW * BATCH
    profiler = profiled(net, optimizer, now, step)
    assert flops(profiler) == (FORWARD + similarities, BACKWARD + 2 * similarities)
    assert seconds(windows) == [STEP, STEP]


@pytest.mark.parametrize("notified", [False, True])
def test_accumulated_batches_are_one_step(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any], notified: bool
) -> None:
    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        (loss_of(net(rows), now) / 3).backward()
        if place % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
        if notified:
            profiler.step()

    profiler = profiled(net, optimizer, now, step, 24)
    profile = profile_of(profiler)
    assert flops(profiler) == (3 * FORWARD, 3 * BACKWARD)
    assert (profile.samples, profile.micro_steps, profile.context.accumulate) == (3 * BATCH, 3, 3)
    whole = PhaseSeconds(
        data_wait=3 * FETCH_SEC,
        forward=3 * (FORWARD_SEC + LOSS_SEC),
        backward=3 * BACKWARD_SEC,
        optimizer=UPDATE_SEC,
    )
    assert seconds(windows) == [whole, whole]


@pytest.mark.parametrize("notified", [False, True])
def test_without_an_optimizer_a_step_ends_where_the_loop_says_and_else_nothing_is_profiled(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any], notified: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        plain(net, optimizer, now)(profiler, place, rows)
        if notified:
            profiler.step()

    profiler = profiled(net, None, now, step)
    if notified:
        assert (flops(profiler), profile_of(profiler).samples) == ((FORWARD, BACKWARD), BATCH)
        assert seconds(windows) == [STEP] * 2  # torch calls hooks at any optimizer's step
    else:
        assert profiler.profile is None
        assert "profile_step is 1, and this run ended after 0 step(s)" in caplog.text


@pytest.mark.parametrize("kind", ["stream", "loader", "none"])
def test_batches_of_any_iterable_are_seen_and_without_one_those_of_the_forwards(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any], kind: str
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        data: Any = profiler.batches(stream(8, now) if kind == "stream" else loader(8, now))
        if kind == "none":
            data = [torch.randn(BATCH, WIDE)] * 8
        elif kind == "loader":  # is otherwise the loader
            assert len(data) == 8 and data.batch_size == BATCH
        for rows in data:
            if kind == "none":
                now.sleep(FETCH_SEC)
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert (flops(profiler), profile_of(profiler).samples) == ((FORWARD, BACKWARD), BATCH)
    if kind == "none":
        assert {"data_wait", "transfer", "other"} <= set(windows[0].mixed_phases)
        assert [step.other for step in seconds(windows)] == [FETCH_SEC] * 2
    else:
        assert seconds(windows) == [STEP, STEP] and "data_wait" not in windows[0].mixed_phases


def test_lbfgs_runs_its_closure_several_times_in_one_step(net: Net, now: FakeNow, windows: list[Any]) -> None:
    optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3, tolerance_change=0.0, tolerance_grad=0.0)
    calls = [0]

    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        def closure() -> Tensor:
            calls[0] += 1
            optimizer.zero_grad()
            loss = loss_of(net(rows), now)
            loss.backward()
            return loss

        optimizer.step(closure)

    profiler = profiled(net, optimizer, now, step)
    a_step = calls[0] // 8
    assert a_step > 1 and calls[0] == 8 * a_step
    assert flops(profiler) == (a_step * FORWARD, a_step * BACKWARD)
    assert (profile_of(profiler).samples, profile_of(profiler).micro_steps) == (BATCH, 1)
    for timed in seconds(windows):
        assert (timed.forward, timed.backward) == (a_step * (FORWARD_SEC + LOSS_SEC), a_step * BACKWARD_SEC)


def test_a_batch_whose_update_a_scaler_skips_belongs_to_the_next_step(
    net: Net, optimizer: SlowSGD, now: FakeNow
) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        scaler.scale(loss_of(net(rows), now) * (float("inf") if place in (1, 4) else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    profiler = profiled(net, optimizer, now, step)
    profile = profile_of(profiler)
    assert (profile.counted_steps, profile.samples, profile.micro_steps) == ((1,), 2 * BATCH, 2)
    assert flops(profiler) == (2 * FORWARD, 2 * BACKWARD)


def test_a_gradient_penalty_is_a_backward(net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]) -> None:
    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        rows.requires_grad_()
        output = net(rows)
        torch.autograd.grad(output.sum(), rows, retain_graph=True)
        loss_of(output, now).backward()
        optimizer.step()

    # The slope takes a product in each layer, without its weights' gradients; the backward now reaches the rows, too.
    assert flops(profiled(net, optimizer, now, step)) == (FORWARD, FORWARD + 2 * FORWARD)
    assert [timed.backward for timed in seconds(windows)] == [2 * BACKWARD_SEC] * 2


@pytest.mark.parametrize("around_all", [True, False], ids=["no_grad around all", "no_grad around each forward"])
def test_an_evaluation_between_steps_is_in_no_figure(
    net: Net, optimizer: SlowSGD, around_all: bool, now: FakeNow, windows: list[Any]
) -> None:
    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        plain(net, optimizer, now)(profiler, place, rows)
        net.eval()
        with torch.set_grad_enabled(not around_all):
            for others in loader(2, now):
                with torch.no_grad():
                    net(others)
        net.train()

    assert flops(profiled(net, optimizer, now, step)) == (FORWARD, BACKWARD)
    assert seconds(windows) == [STEP, STEP]
    assert excluded(windows) == [{"validation": 2 * (FETCH_SEC + FORWARD_SEC)}] * 2


@pytest.mark.parametrize("when", [1, 2], ids=["before the update", "after the first batch"])
def test_an_evaluation_in_the_middle_of_an_accumulated_step_is_no_part_of_it(
    net: Net, optimizer: SlowSGD, when: int, now: FakeNow, windows: list[Any]
) -> None:
    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        loss_of(net(rows), now).backward()
        if place % 4 == when:
            net.eval()
            with torch.no_grad():
                for one in loader(3, now):
                    net(one)
            net.train()
        if place % 2:
            optimizer.step()
            optimizer.zero_grad()

    profiler = profiled(net, optimizer, now, step, 16)
    assert (flops(profiler), profile_of(profiler).notes) == ((2 * FORWARD, 2 * BACKWARD), ())
    assert all(one.data_wait == 2 * FETCH_SEC and one.backward == 2 * BACKWARD_SEC for one in seconds(windows))
    assert throughput_of(profiler).model_flops == 8 * 2 * (FORWARD + BACKWARD)


@pytest.mark.parametrize("whose", ["its own", "another's"])
@pytest.mark.parametrize("where", ["between steps", "inside a step"])
def test_what_the_loop_leaves_out_is_in_no_step_and_a_checkpoint_is_other(
    whose: str, where: str, net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any], tmp_path: Path
) -> None:
    """As in an evaluation of a model that is in training mode, or of an averaged one."""
    evaluated = net if whose == "its own" else Net(now)

    class Slowly:
        def __reduce__(self) -> tuple[Any, ...]:
            now.sleep(64.0)
            return str, ()

    def evaluate(profiler: TrainingProfiler) -> None:
        with profiler.outside_of_steps("samples"):
            for others in loader(2, now):
                loss_of(evaluated(others), now)

    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        loss = loss_of(net(rows), now)
        if where == "inside a step":
            evaluate(profiler)
        loss.backward()
        optimizer.step()
        torch.save(Slowly(), tmp_path / "checkpoint.pt")
        if where == "between steps":
            evaluate(profiler)

    profiler = profiled(net, optimizer, now, step)
    assert profile_of(profiler).samples == BATCH
    assert seconds(windows) == [replace(STEP, other=64.0)] * 2
    assert excluded(windows) == [{"samples": 2 * (FETCH_SEC + FORWARD_SEC + LOSS_SEC)}] * 2
    summary = throughput_of(profiler)
    assert summary.ips is not None and summary.model_flops == 8 * (FORWARD + BACKWARD)
    assert summary.ips.average * summary.batch_cost_sec.average == pytest.approx(BATCH)


def test_a_teachers_forward_belongs_to_the_step(net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]) -> None:
    teacher = Net(now).eval()

    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        with torch.no_grad():
            wanted = teacher(rows)
        loss_of(net(rows) - wanted, now).backward()
        optimizer.step()

    profile = profile_of(profiled(net, optimizer, now, step))
    assert (profile.flops.forward, profile.outside.forward) == (2 * FORWARD, FORWARD)
    assert profile.flops.without_backward == FORWARD
    assert [timed.other for timed in seconds(windows)] == [FORWARD_SEC] * 2


def test_of_a_model_that_is_not_called_forward_is_what_ran_before_the_backward(
    now: FakeNow, windows: list[Any]
) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)

    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        now.sleep(FORWARD_SEC)
        loss_of(net.second(net.first(rows)), now).backward()
        optimizer.step()

    profiler = profiled(net, optimizer, now, step)
    assert (flops(profiler), profile_of(profiler).samples) == ((FORWARD, BACKWARD), BATCH)
    assert any("The model was not called" in note for note in profile_of(profiler).notes)
    assert [timed.forward for timed in seconds(windows)] == [LOSS_SEC + FORWARD_SEC] * 2


@pytest.mark.parametrize("at", [1, 4])
def test_an_exception_that_leaves_the_loop_is_the_users_and_there_is_a_report(
    net: Net, optimizer: SlowSGD, now: FakeNow, at: int
) -> None:
    profiler = profile_training(net, optimizer, **SETTINGS)
    with pytest.raises(ZeroDivisionError), profiler:
        for place, rows in enumerate(loader(8, now)):
            plain(net, optimizer, now)(profiler, place, rows)
            if place == at:
                raise ZeroDivisionError
    assert profile_of(profiler).flops.forward == FORWARD
    assert any("interrupted by ZeroDivisionError" in note for note in profile_of(profiler).notes)


def test_updates_inside_the_backward_end_the_step_when_it_returns(net: Net, now: FakeNow, windows: list[Any]) -> None:
    optimizers = {weight: SlowSGD([weight], now) for weight in net.parameters()}

    def update(weight: Any) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in optimizers:
        weight.register_post_accumulate_grad_hook(update)
    profiler = profiled(net, [*optimizers.values()], now, lambda _, place, rows: loss_of(net(rows), now).backward())
    assert (flops(profiler), profile_of(profiler).samples) == ((FORWARD, BACKWARD), BATCH)
    assert [(one.backward, one.optimizer) for one in seconds(windows)] == [(BACKWARD_SEC, 4 * UPDATE_SEC)] * 2


@pytest.mark.parametrize("place", ["before the loss", "before the update", "after the update"])
def test_a_batch_that_is_fetched_ahead_belongs_to_the_next_step(
    net: Net, optimizer: SlowSGD, place: str, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        batches = iter(loader(10, now))
        rows, ahead = next(batches, None), None
        while rows is not None:
            output = net(rows)
            if place == "before the loss":
                ahead = next(batches, None)
            loss_of(output, now).backward()
            if place == "before the update":
                ahead = next(batches, None)
            optimizer.step()
            if place == "after the update":
                ahead = next(batches, None)
            rows = ahead
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.samples, profile.micro_steps) == (FORWARD, BATCH, 1)
    assert seconds(windows) == [STEP, STEP]


def test_a_model_that_trains_in_evaluation_mode_is_profiled_from_its_first_step(
    net: Net, optimizer: SlowSGD, now: FakeNow, caplog: pytest.LogCaptureFixture
) -> None:
    net.eval()
    profiler = profiled(net, optimizer, now, plain(net, optimizer, now), profile_step=0)
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.samples) == (FORWARD, BATCH)
    assert throughput_of(profiler).ips_unit == "samples/s" and "could not be" not in caplog.text


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_raises_while_steps_are_timed_is_left_out_and_changes_no_time_of_the_others(
    where: str, net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("no gradient")

    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        try:
            output = net(torch.cat([rows, rows], dim=1) if (where, place) == ("forward", 5) else rows)
            if (where, place) == ("backward", 5):
                output.register_hook(fail)
            loss_of(output, now).backward()
            optimizer.step()
        except RuntimeError:
            return
        now.sleep(256.0)

    profiler = profiled(net, optimizer, now, step, 14, timing_steps=4)
    assert flops(profiler) == (FORWARD, BACKWARD)
    assert not any("Training ended" in note for note in profile_of(profiler).notes)
    # The step that the loop had left goes on to the next update, and is not like the counted one.
    assert seconds(windows) == [replace(STEP, other=256.0)] * 4


@pytest.mark.parametrize("notified", [False, True])
def test_a_step_of_two_models_ends_with_the_last_optimizer_or_where_the_loop_says(
    notified: bool, now: FakeNow, windows: list[Any]
) -> None:
    models: dict[str, nn.Module] = {"critic": Net(now), "net": Net(now)}
    optimizers = [SlowSGD(one.parameters(), now) for one in models.values()]

    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        for model, optimizer in zip(models.values(), optimizers, strict=True):
            loss_of(model(rows), now).backward()
            optimizer.step()
        if notified:
            profiler.step()

    given = optimizers[::-1] if notified else optimizers  # in the wrong order, a step is half of one at first
    profiler = profiled(models, given, now, step, profile_step=2 if notified else 1)
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

    both = [optimizer, Later(Net(now).parameters(), now)]
    assert profiled(net, both, now, plain(net, optimizer, now)).profile is None
    assert "Later, the last optimizer in the list, ends each" in caplog.text
    assert "this run ended after 0 step(s)" in caplog.text


def test_tokens_and_padding_are_those_of_the_batches(now: FakeNow) -> None:
    class Embedding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.Embedding(11, 4), nn.Linear(4, 1)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.head(self.words(input_ids))[attention_mask.bool()]  # type: ignore[no-any-return]

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


def test_start_and_stop_do_what_with_does_and_a_second_start_ends_the_first(
    net: Net, optimizer: SlowSGD, now: FakeNow
) -> None:
    profiler = profile_training(net, optimizer, **SETTINGS)

    def train(batches: int) -> None:
        for place, rows in enumerate(loader(batches, now)):
            plain(net, optimizer, now)(profiler, place, rows)

    profiler.start()
    train(8)
    profiler.start()
    assert profiler.profiles == ()
    train(6)
    profiler.stop()
    profiler.stop()
    run = throughput_of(profiler)
    assert (len(profiler.profiles), flops(profiler)) == (1, (FORWARD, BACKWARD))
    assert run.model_flops == 6 * (FORWARD + BACKWARD)
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
