"""Loops that people write: what a step is in each, what it computes, and which second belongs to which part."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import Profile, profile_training
from lightning_flops.pytorch import TrainingProfiler
from lightning_flops.records import PhaseSeconds
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
    Net,
    Rows,
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


def profile_of(profiler: TrainingProfiler) -> Profile:
    assert profiler.profile is not None
    return profiler.profile


def seconds(windows: list[Any]) -> list[PhaseSeconds]:
    """The times of every timed step of the only window."""
    (window,) = windows
    return [step.seconds for step in window.timed_steps]


def test_a_loop_is_profiled_without_a_line_inside_it(now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
            optimizer.zero_grad()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward, profile.flops.optimizer) == (FORWARD, BACKWARD, 0)
    assert (profile.profile_step, profile.counted_steps, profile.timed_steps) == (1, (1,), (4, 5))
    assert (profile.samples, profile.micro_steps, profile.context.micro_batch_size) == (BATCH, 1, BATCH)
    assert profile.modules[0].name == "" and profile.modules[0].type_name == "Net"
    assert profile.context.framework == "torch" and profile.context.precision == "float32"
    assert seconds(windows) == [STEP, STEP]
    assert set(windows[0].mixed_phases) == {"transfer", "other"}
    assert profiler.throughput is not None and profiler.throughput.ips_unit == "samples/s"
    assert profiler.throughput.mfu is None and "no dense peak" in profiler.throughput.unavailable["mfu"]
    assert profiler.throughput.model_flops == 8 * (FORWARD + BACKWARD)


def test_the_dtype_of_an_autocast_is_named_beside_the_parameters(now: FakeNow) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                output = net(rows)
            loss_of(output, now).backward()
            optimizer.step()
    profile = profile_of(profiler)
    assert profile.context.precision == "bfloat16 mixed, float32 parameters"
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert {row.dtype for row in profile.dtypes} == {"bfloat16"}


@pytest.mark.parametrize("before_loss", [False, True])
def test_the_loss_is_forward_though_gradients_are_cleared_before_its_backward(
    before_loss: bool, now: FakeNow, windows: list[Any]
) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            output = net(rows)
            if before_loss:
                optimizer.zero_grad()
            loss = loss_of(output @ output.T, now)
            if not before_loss:
                optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    profile = profile_of(profiler)
    similarities = 2 * BATCH * NARROW * BATCH
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD + similarities, BACKWARD + 2 * similarities)
    assert profile.rates.forward_flops_per_sec is not None
    assert seconds(windows) == [STEP, STEP]


@pytest.mark.parametrize("told", [False, True])
def test_accumulated_batches_are_one_step(now: FakeNow, windows: list[Any], told: bool) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for place, rows in enumerate(loader(24, now)):
            (loss_of(net(rows), now) / 3).backward()
            if place % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()
            if told:
                profiler.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward) == (3 * FORWARD, 3 * BACKWARD)
    assert (profile.samples, profile.micro_steps, profile.context.accumulate) == (3 * BATCH, 3, 3)
    whole = PhaseSeconds(
        data_wait=3 * FETCH_SEC,
        forward=3 * (FORWARD_SEC + LOSS_SEC),
        backward=3 * BACKWARD_SEC,
        optimizer=UPDATE_SEC,
    )
    assert seconds(windows) == [whole, whole]


def test_without_an_optimizer_a_step_ends_where_the_loop_says(now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward, profile.samples) == (FORWARD, BACKWARD, BATCH)
    assert seconds(windows) == [STEP] * 2  # torch tells of any optimizer's step


def test_without_an_optimizer_and_without_a_word_nothing_is_profiled_and_that_is_said(
    now: FakeNow, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert profiler.profile is None
    assert "profile_step is 1, and this run ended after 0 step(s)" in caplog.text


def test_batches_of_any_iterable_are_seen(now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in profiler.batches(stream(8, now)):
            loss_of(net(rows), now).backward()
            optimizer.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.samples) == (FORWARD, BATCH)
    assert seconds(windows) == [STEP, STEP]
    assert "data_wait" not in windows[0].mixed_phases


def test_a_loader_in_batches_is_told_once_and_is_otherwise_the_loader(now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        data = profiler.batches(loader(4, now))
        assert len(data) == 4 and data.batch_size == BATCH
        for _ in range(2):
            for rows in data:
                loss_of(net(rows), now).backward()
                optimizer.step()
    assert profile_of(profiler).samples == BATCH
    assert seconds(windows) == [STEP, STEP]


def test_batches_without_a_loader_are_those_of_the_forwards(now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    rows = torch.randn(BATCH, 16)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for _ in range(8):
            for _ in range(2):
                now.sleep(FETCH_SEC)
                loss_of(net(rows), now).backward()
            optimizer.step()
    profile = profile_of(profiler)
    assert (profile.samples, profile.micro_steps, profile.flops.forward) == (2 * BATCH, 2, 2 * FORWARD)
    assert {"data_wait", "transfer", "other"} <= set(windows[0].mixed_phases)
    assert [step.other for step in seconds(windows)] == [2 * FETCH_SEC] * 2


@pytest.mark.parametrize("told", [False, True])
def test_a_step_of_two_optimizers_ends_with_the_last(now: FakeNow, windows: list[Any], told: bool) -> None:
    net, critic = Net(now), Net(now)
    optimizers = [SlowSGD(critic.parameters(), now), SlowSGD(net.parameters(), now)]
    with profile_training(net, optimizers, **SETTINGS) as profiler:
        for rows in loader(8, now):
            for model, optimizer in zip((critic, net), optimizers, strict=True):
                optimizer.zero_grad()
                loss_of(model(rows), now).backward()
                optimizer.step()
            if told:
                profiler.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward) == (2 * FORWARD, 2 * BACKWARD)
    assert profile.modules[0].total.forward == FORWARD and profile.outside.forward == FORWARD
    assert (profile.samples, profile.micro_steps) == (BATCH, 1)
    assert [(step.backward, step.optimizer) for step in seconds(windows)] == [(2 * BACKWARD_SEC, 2 * UPDATE_SEC)] * 2


def test_a_step_of_several_models_ends_with_the_last_optimizer(now: FakeNow, windows: list[Any]) -> None:
    critic, net = Net(now), Net(now)
    optimizers = [SlowSGD(critic.parameters(), now), SlowSGD(net.parameters(), now)]
    with profile_training({"critic": critic, "net": net}, optimizers, **SETTINGS) as profiler:
        for rows in loader(8, now):
            for model, optimizer in zip((critic, net), optimizers, strict=True):
                loss_of(model(rows), now).backward()
                optimizer.step()
    profile = profile_of(profiler)
    assert (profile.samples, profile.micro_steps, profile.flops.forward) == (BATCH, 1, 2 * FORWARD)
    twice = PhaseSeconds(
        data_wait=FETCH_SEC,
        forward=2 * (FORWARD_SEC + LOSS_SEC),
        backward=2 * BACKWARD_SEC,
        optimizer=2 * UPDATE_SEC,
        other=0.0,
    )
    assert seconds(windows) == [twice, twice]
    assert [(one.name, one.total.forward) for one in profile.modules if one.depth == 1] == [
        ("critic", FORWARD),
        ("net", FORWARD),
    ]


def test_an_optimizer_that_makes_no_update_holds_up_no_step_of_the_last_one(now: FakeNow) -> None:
    later, net = Net(now), Net(now)
    optimizers = [SlowSGD(later.parameters(), now), SlowSGD(net.parameters(), now)]
    with profile_training({"later": later, "net": net}, optimizers, **SETTINGS) as profiler:
        for rows in loader(16, now):
            loss_of(net(rows), now).backward()
            optimizers[1].step()
    profile = profile_of(profiler)
    assert (profile.samples, profile.flops.forward, profile.counted_steps) == (BATCH, FORWARD, (1,))


def test_several_forwards_before_one_backward(now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows) - net(rows * 0.5), now).backward()
            optimizer.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward, profile.samples) == (2 * FORWARD, 2 * BACKWARD, BATCH)
    assert [step.forward for step in seconds(windows)] == [2 * FORWARD_SEC + LOSS_SEC] * 2


def test_of_a_closure_forward_and_backward_are_not_the_optimizers(now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):

            def closure(rows: torch.Tensor = rows) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(net(rows), now)
                loss.backward()
                return loss

            optimizer.step(closure)
    assert profile_of(profiler).flops.backward == BACKWARD
    assert seconds(windows) == [STEP] * 2


def test_lbfgs_runs_its_closure_several_times_in_one_step(now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
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
    profile = profile_of(profiler)
    assert a_step > 1 and calls[0] == 8 * a_step
    assert (profile.flops.forward, profile.flops.backward) == (a_step * FORWARD, a_step * BACKWARD)
    assert (profile.samples, profile.micro_steps) == (BATCH, 1)
    for step in seconds(windows):
        assert (step.forward, step.backward) == (a_step * (FORWARD_SEC + LOSS_SEC), a_step * BACKWARD_SEC)


def test_a_batch_whose_update_a_scaler_skips_belongs_to_the_next_step(now: FakeNow) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for place, rows in enumerate(loader(8, now)):
            scaler.scale(loss_of(net(rows), now) * (float("inf") if place in (1, 4) else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    profile = profile_of(profiler)
    assert (profile.counted_steps, profile.samples, profile.micro_steps) == ((1,), 2 * BATCH, 2)
    assert (profile.flops.forward, profile.flops.backward) == (2 * FORWARD, 2 * BACKWARD)


def test_a_gradient_penalty_is_a_backward(now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            rows.requires_grad_()
            output = net(rows)
            (slope,) = torch.autograd.grad(output.sum(), rows, retain_graph=True)
            assert slope.shape == rows.shape
            loss_of(output, now).backward()
            optimizer.step()
    profile = profile_of(profiler)
    # The slope takes a product in each layer, without its weights' gradients; the backward now reaches the rows, too.
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, FORWARD + 2 * FORWARD)
    assert [step.backward for step in seconds(windows)] == [2 * BACKWARD_SEC] * 2


@pytest.mark.parametrize("around_all", [True, False], ids=["no_grad around all", "no_grad around each forward"])
def test_an_evaluation_between_steps_is_in_no_figure(around_all: bool, now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
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
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert seconds(windows) == [STEP, STEP]
    for step in windows[0].timed_steps:
        assert step.excluded_sec == {"validation": 2 * (FETCH_SEC + FORWARD_SEC)}


def test_what_the_loop_leaves_out_is_in_no_step_and_a_checkpoint_is_other(
    now: FakeNow, windows: list[Any], tmp_path: Path
) -> None:
    class Slowly:
        def __reduce__(self) -> tuple[Any, ...]:
            now.sleep(64.0)
            return str, ()

    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
            torch.save(Slowly(), tmp_path / "checkpoint.pt")
            with profiler.outside_of_steps("samples"):
                now.sleep(128.0)
    assert seconds(windows) == [replace(STEP, other=64.0)] * 2
    assert [step.excluded_sec for step in windows[0].timed_steps] == [{"samples": 128.0}] * 2


@pytest.mark.parametrize("whose", ["its own", "another's"])
@pytest.mark.parametrize("where", ["between steps", "inside a step"])
def test_a_loader_and_a_model_that_run_in_what_is_left_out_are_in_no_step(
    whose: str, where: str, now: FakeNow, windows: list[Any]
) -> None:
    """As in an evaluation of a model that is in training mode, or of an averaged one."""
    net = Net(now)
    evaluated = net if whose == "its own" else Net(now)
    optimizer = SlowSGD(net.parameters(), now)

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
    profile, summary = profile_of(profiler), profiler.throughput
    assert profile.samples == BATCH
    assert seconds(windows) == [STEP, STEP]
    for step in windows[0].timed_steps:
        assert step.excluded_sec == {"samples": 2 * (FETCH_SEC + FORWARD_SEC + LOSS_SEC)}
    assert summary is not None and summary.ips is not None and summary.ips_unit == "samples/s"
    assert summary.model_flops == 8 * (FORWARD + BACKWARD)
    assert summary.ips.average * summary.batch_cost_sec.average == pytest.approx(BATCH)


def test_a_teachers_forward_belongs_to_the_step(now: FakeNow, windows: list[Any]) -> None:
    net, teacher = Net(now), Net(now).eval()
    optimizer = SlowSGD(net.parameters(), now)
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


def test_of_a_model_that_is_not_called_forward_is_what_ran_before_the_backward(
    now: FakeNow, windows: list[Any]
) -> None:
    class Method(Net):
        def loss(self, rows: torch.Tensor) -> torch.Tensor:
            now.sleep(FORWARD_SEC)
            return loss_of(self.second(self.first(rows)), now)

    net = Method(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            net.loss(rows).backward()
            optimizer.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward, profile.samples) == (FORWARD, BACKWARD, BATCH)
    assert any("The model was not called" in note for note in profile.notes)
    assert [step.forward for step in seconds(windows)] == [LOSS_SEC + FORWARD_SEC] * 2


def compiled_in_place(net: nn.Module) -> nn.Module:
    net.compile(backend="aot_eager")
    return net


COMPILE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "wrapped": lambda net: cast(nn.Module, torch.compile(net, backend="aot_eager")),
    "in place": compiled_in_place,
}


@pytest.mark.parametrize("how", COMPILE)
def test_a_compiled_model(how: str, now: FakeNow, windows: list[Any]) -> None:
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    net = COMPILE[how](plain)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert profile.modules[0].type_name == "Sequential"
    assert [step.forward for step in seconds(windows)] == [LOSS_SEC] * 2


def test_a_loop_that_breaks_off_reports_what_there_is(now: FakeNow) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for place, rows in enumerate(loader(8, now)):
            loss_of(net(rows), now).backward()
            optimizer.step()
            if place == 4:
                break
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.timed_steps) == (FORWARD, (4,))


@pytest.mark.parametrize("step", [1, 4])
def test_an_exception_that_leaves_the_loop_is_the_users_and_there_is_a_report(now: FakeNow, step: int) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    profiler = profile_training(net, optimizer, **SETTINGS)
    with pytest.raises(ZeroDivisionError), profiler:
        for place, rows in enumerate(loader(8, now)):
            loss_of(net(rows), now).backward()
            optimizer.step()
            if place == step:
                raise ZeroDivisionError
    assert profile_of(profiler).flops.forward == FORWARD
    assert any("interrupted by ZeroDivisionError" in note for note in profile_of(profiler).notes)


def test_a_batch_that_the_loop_gives_up_is_in_no_count(now: FakeNow) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for place, rows in enumerate(loader(10, now)):
            try:
                wide = torch.cat([rows, rows], dim=1) if place == 1 else rows  # does not fit the first layer
                loss_of(net(wide), now).backward()
            except RuntimeError:
                continue
            optimizer.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)


def test_updates_inside_the_backward_end_the_step_when_it_returns(now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizers = {weight: SlowSGD([weight], now) for weight in net.parameters()}

    def update(weight: Any) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in optimizers:
        weight.register_post_accumulate_grad_hook(update)
    with profile_training(net, list(optimizers.values()), **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward, profile.samples) == (FORWARD, BACKWARD, BATCH)
    assert [(step.backward, step.optimizer) for step in seconds(windows)] == [(BACKWARD_SEC, 4 * UPDATE_SEC)] * 2


@pytest.mark.parametrize("place", ["before the loss", "before the update", "after the update"])
def test_a_batch_that_is_fetched_ahead_belongs_to_the_next_step(place: str, now: FakeNow, windows: list[Any]) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
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


def test_the_wait_for_a_training_batch_is_seen_though_the_model_is_still_in_evaluation_mode(
    now: FakeNow, windows: list[Any]
) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS):
        for rows in loader(8, now):
            net.train()
            loss_of(net(rows), now).backward()
            optimizer.step()
            net.eval()
            with torch.no_grad():
                net(rows)
    assert seconds(windows) == [STEP, STEP]
    assert [step.excluded_sec for step in windows[0].timed_steps] == [{"validation": FORWARD_SEC}] * 2


def test_a_model_that_trains_in_evaluation_mode_is_profiled_from_its_first_step(
    now: FakeNow, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net(now).eval()
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, profile_step=0, timing_steps=2, trace=False) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.samples, profile.variable) == (FORWARD, BATCH, False)
    assert profiler.throughput is not None and profiler.throughput.ips_unit == "samples/s"
    assert "could not be" not in caplog.text


def test_a_loader_that_fails_once_is_seen_again_afterwards(now: FakeNow, windows: list[Any]) -> None:
    class Failing(Rows):
        def __getitem__(self, place: int) -> torch.Tensor:
            if place == 1 * BATCH:
                raise OSError("no such row")
            return super().__getitem__(place)

    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        batches = iter(DataLoader(Failing(10, now), batch_size=BATCH))
        while True:
            try:
                rows = next(batches)
            except OSError:
                continue
            except StopIteration:
                break
            loss_of(net(rows), now).backward()
            optimizer.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.samples) == (FORWARD, BATCH)
    assert "data_wait" not in windows[0].mixed_phases


@pytest.mark.parametrize("where", ["forward", "backward", "update"])
def test_a_step_that_raises_while_steps_are_timed_is_left_out_and_changes_no_time_of_the_others(
    where: str, now: FakeNow, windows: list[Any]
) -> None:
    class Failing(SlowSGD):
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            if where == "update" and place == 5:
                raise RuntimeError("no update")
            return super().step(closure)

    def fail(_: torch.Tensor) -> None:
        raise RuntimeError("no gradient")

    net = Net(now)
    optimizer = Failing(net.parameters(), now)
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
            now.sleep(256.0)
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert not any("Training ended" in note for note in profile.notes)
    # The step that the loop had left goes on to the next update, and is not like the counted one.
    whole = [step for step in seconds(windows) if step == replace(STEP, other=256.0)]
    assert len(seconds(windows)) == len(whole) == 4


def test_batches_are_otherwise_what_they_were() -> None:
    with profile_training(nn.Linear(2, 2)) as profiler:
        numbers = profiler.batches([1, 2, 3])
        assert (bool(numbers), len(numbers), numbers[1], list(numbers)) == (True, 3, 2, [1, 2, 3])
        assert bool(profiler.batches(iter([])))
        copied: Any = copy.deepcopy(numbers)
        assert copied == [1, 2, 3] == pickle.loads(pickle.dumps(numbers))


def test_step_0_can_be_counted(now: FakeNow) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, profile_step=0, timing_steps=2, trace=False) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert profile_of(profiler).counted_steps == (0,)
    assert profile_of(profiler).flops.forward == FORWARD


def test_windows_follow_each_other(now: FakeNow) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, profile_step=1, every=8, timing_steps=2, trace=False) as profiler:
        for rows in loader(16, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    assert [profile.counted_steps for profile in profiler.profiles] == [(1,), (9,)]
    assert {profile.flops.forward for profile in profiler.profiles} == {FORWARD}


def test_the_first_layer_alone_is_the_roots_child(now: FakeNow) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in loader(8, now):
            loss_of(net(rows), now).backward()
            optimizer.step()
    first = next(module for module in profile_of(profiler).modules if module.name == "first")
    assert (first.total.forward, first.total.backward) == (FIRST, FIRST)


@pytest.mark.parametrize("when", [1, 2], ids=["before the update", "after the first batch"])
def test_an_evaluation_in_the_middle_of_an_accumulated_step_is_no_part_of_it(
    when: int, now: FakeNow, windows: list[Any]
) -> None:
    net = Net(now)
    optimizer = SlowSGD(net.parameters(), now)
    steps, others = 8, loader(3, now)
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for number, rows in enumerate(loader(2 * steps, now)):
            loss_of(net(rows), now).backward()
            if number % 4 == when:
                net.eval()
                with torch.no_grad():
                    for one in others:
                        net(one)
                net.train()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward) == (2 * FORWARD, 2 * BACKWARD)
    assert profile.notes == ()
    assert all(step.data_wait == 2 * FETCH_SEC and step.backward == 2 * BACKWARD_SEC for step in seconds(windows))
    assert profiler.throughput is not None
    assert profiler.throughput.model_flops == steps * 2 * (FORWARD + BACKWARD)
