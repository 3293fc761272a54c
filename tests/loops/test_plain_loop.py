"""Loops that people write: what a step is in each, what it computes, and which second belongs to which part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

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


def train(net: nn.Module, optimizer: SlowSGD, now: FakeNow, batches: int = 8) -> None:
    """The loop that everybody writes."""
    for rows in loader(batches, now):
        loss_of(net(rows), now).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_loop_is_profiled_without_a_line_inside_it(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        train(net, optimizer, now)
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


def test_the_dtype_of_an_autocast_is_named_beside_the_parameters(net: Net, optimizer: SlowSGD, now: FakeNow) -> None:
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
    net: Net, optimizer: SlowSGD, before_loss: bool, now: FakeNow, windows: list[Any]
) -> None:
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
def test_accumulated_batches_are_one_step(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any], told: bool
) -> None:
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


def test_without_an_optimizer_a_step_ends_where_the_loop_says(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
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
    net: Net, optimizer: SlowSGD, now: FakeNow, caplog: pytest.LogCaptureFixture
) -> None:
    with profile_training(net, **SETTINGS) as profiler:
        train(net, optimizer, now)
    assert profiler.profile is None
    assert "profile_step is 1, and this run ended after 0 step(s)" in caplog.text


def test_batches_of_any_iterable_are_seen(net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        for rows in profiler.batches(stream(8, now)):
            loss_of(net(rows), now).backward()
            optimizer.step()
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.samples) == (FORWARD, BATCH)
    assert seconds(windows) == [STEP, STEP]
    assert "data_wait" not in windows[0].mixed_phases


def test_a_loader_in_batches_is_told_once_and_is_otherwise_the_loader(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
    with profile_training(net, optimizer, **SETTINGS) as profiler:
        data = profiler.batches(loader(4, now))
        assert len(data) == 4 and data.batch_size == BATCH
        for _ in range(2):
            for rows in data:
                loss_of(net(rows), now).backward()
                optimizer.step()
    assert profile_of(profiler).samples == BATCH
    assert seconds(windows) == [STEP, STEP]


def test_batches_without_a_loader_are_those_of_the_forwards(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
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


def test_a_batch_whose_update_a_scaler_skips_belongs_to_the_next_step(
    net: Net, optimizer: SlowSGD, now: FakeNow
) -> None:
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


def test_a_gradient_penalty_is_a_backward(net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]) -> None:
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
def test_an_evaluation_between_steps_is_in_no_figure(
    net: Net, optimizer: SlowSGD, around_all: bool, now: FakeNow, windows: list[Any]
) -> None:
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
    for step in windows[0].timed_steps:
        assert step.excluded_sec == {"validation": 2 * (FETCH_SEC + FORWARD_SEC)}


def test_what_the_loop_leaves_out_is_in_no_step_and_a_checkpoint_is_other(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any], tmp_path: Path
) -> None:
    class Slowly:
        def __reduce__(self) -> tuple[Any, ...]:
            now.sleep(64.0)
            return str, ()

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
        train(net, optimizer, now)
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert profile.modules[0].type_name == "Sequential"
    assert [step.forward for step in seconds(windows)] == [LOSS_SEC] * 2


@pytest.mark.parametrize("step", [1, 4])
def test_an_exception_that_leaves_the_loop_is_the_users_and_there_is_a_report(
    net: Net, optimizer: SlowSGD, now: FakeNow, step: int
) -> None:
    profiler = profile_training(net, optimizer, **SETTINGS)
    with pytest.raises(ZeroDivisionError), profiler:
        for place, rows in enumerate(loader(8, now)):
            loss_of(net(rows), now).backward()
            optimizer.step()
            if place == step:
                raise ZeroDivisionError
    assert profile_of(profiler).flops.forward == FORWARD
    assert any("interrupted by ZeroDivisionError" in note for note in profile_of(profiler).notes)


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


def test_the_wait_for_a_training_batch_is_seen_though_the_model_is_still_in_evaluation_mode(
    net: Net, optimizer: SlowSGD, now: FakeNow, windows: list[Any]
) -> None:
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
        train(net, optimizer, now)
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.samples, profile.variable) == (FORWARD, BATCH, False)
    assert profiler.throughput is not None and profiler.throughput.ips_unit == "samples/s"
    assert "could not be" not in caplog.text


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


@pytest.mark.parametrize("when", [1, 2], ids=["before the update", "after the first batch"])
def test_an_evaluation_in_the_middle_of_an_accumulated_step_is_no_part_of_it(
    net: Net, optimizer: SlowSGD, when: int, now: FakeNow, windows: list[Any]
) -> None:
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
        train(net, optimizer, now)
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
        train(net, optimizer, now, 16)
    traced = profile_of(profiler).traced
    assert traced is not None and traced.tables is not None and traced.tables.modules is not None
    rows_of = {row.name: row for row in traced.tables.modules.rows}
    assert {name: row.calls for name, row in rows_of.items()} == {"": 1, "first": 1, "second": 1}
    inside = rows_of["first"].forward_us + rows_of["second"].forward_us
    assert rows_of[""].forward_us == pytest.approx(rows_of[""].own_forward_us + inside)


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
        train(net, optimizer, now)
    assert profile_of(profiler).samples == 10 * BATCH


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
