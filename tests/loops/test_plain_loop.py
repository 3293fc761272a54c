"""Loops that people write: what a step is in each, what it computes, and which second belongs to which part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from lightning_flops import Profile, profile_training
from lightning_flops.pytorch import TrainingProfiler
from lightning_flops.records import PhaseSeconds
from lightning_flops.schema.profile import ThroughputSummary
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
from tests.results import profile_of, throughput_of

SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 2, "trace": False}

STEP = PhaseSeconds(
    data_wait=FETCH_SEC, forward=FORWARD_SEC + LOSS_SEC, backward=BACKWARD_SEC, optimizer=UPDATE_SEC, other=0.0
)
"""The times of a step of one batch in which nothing else happens."""

Step = Callable[[TrainingProfiler, int, Tensor], object]


def times(step: PhaseSeconds, number: int) -> PhaseSeconds:
    """So many of *step* in one."""
    return PhaseSeconds(**{one.name: number * getattr(step, one.name) for one in fields(step)})


class Loop:
    """A net, its optimizer, and the windows of the profiler that its steps are run under."""

    def __init__(self, now: FakeNow, windows: list[Any]) -> None:
        self.now, self.windows = now, windows
        self.net = Net(now)
        self.optimizer = SlowSGD(self.net.parameters(), now)
        self.profiler = profile_training(self.net, self.optimizer, **SETTINGS)

    def loss(self, rows: Tensor) -> Tensor:
        return loss_of(self.net(rows), self.now)

    def step(self, _: TrainingProfiler, place: int, rows: Tensor) -> None:
        """The step that everybody writes."""
        self.loss(rows).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, step: Step | None = None, batches: int = 8, **given: Any) -> Profile:
        """The profile of so many batches, each of which *step* gets, with its place."""
        self.begin(step, batches, **given)
        return profile_of(self.profiler)

    def begin(self, step: Step | None = None, batches: int = 8, **given: Any) -> None:
        """The same loop, which may have no profile."""
        given = {"model": self.net, "optimizer": self.optimizer, **SETTINGS, **given}
        self.profiler = profile_training(**given)
        with self.profiler:
            for place, rows in enumerate(loader(batches, self.now)):
                (step or self.step)(self.profiler, place, rows)

    @property
    def summary(self) -> ThroughputSummary:
        return throughput_of(self.profiler)

    @property
    def seconds(self) -> list[PhaseSeconds]:
        """The times of every timed step of the only window."""
        (window,) = self.windows
        return [step.seconds for step in window.timed_steps]

    @property
    def excluded(self) -> list[dict[str, float]]:
        """What ran between the timed steps and is in none."""
        (window,) = self.windows
        return [step.excluded_sec for step in window.timed_steps]


@pytest.fixture
def loop(now: FakeNow, windows: list[Any]) -> Loop:
    return Loop(now, windows)


def flops(profile: Profile) -> tuple[int, int]:
    """Forward and backward of the counted step."""
    return profile.flops.forward, profile.flops.backward


def test_a_loop_is_profiled_without_a_line_inside_it(loop: Loop) -> None:
    profile = loop.run()
    assert (profile.flops.forward, profile.flops.backward, profile.flops.optimizer) == (FORWARD, BACKWARD, 0)
    assert (profile.profile_step, profile.counted_steps, profile.timed_steps) == (1, (1,), (4, 5))
    assert (profile.samples, profile.micro_steps, profile.context.micro_batch_size) == (BATCH, 1, BATCH)
    assert profile.modules[0].name == "" and profile.modules[0].type_name == "Net"
    assert profile.context.framework == "torch" and profile.context.precision == "float32"
    assert loop.seconds == [STEP, STEP]
    assert set(loop.windows[0].mixed_phases) == {"transfer", "other"}
    run = loop.summary
    assert (run.ips_unit, run.mfu, run.model_flops) == ("samples/s", None, 8 * (FORWARD + BACKWARD))
    assert "no dense peak" in run.unavailable["mfu"]
    assert loop.run(batch_size=lambda rows: 10 * len(rows)).samples == 10 * BATCH
    loop.net.eval()  # a model that trains in evaluation mode
    assert loop.run(profile_step=0).flops.forward == FORWARD


@pytest.mark.parametrize("before_loss", [False, True])
def test_the_loss_is_forward_though_gradients_are_cleared_before_its_backward(loop: Loop, before_loss: bool) -> None:
    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        output = loop.net(rows)
        if before_loss:
            loop.optimizer.zero_grad()
        loss = loss_of(output @ output.T, loop.now)
        if not before_loss:
            loop.optimizer.zero_grad()
        loss.backward()
        loop.optimizer.step()

    similarities = 2 * BATCH * NARROW * BATCH
    assert flops(loop.run(step)) == (FORWARD + similarities, BACKWARD + 2 * similarities)
    assert loop.seconds == [STEP, STEP]


@pytest.mark.parametrize("notified", [False, True])
def test_accumulated_batches_are_one_step(loop: Loop, notified: bool) -> None:
    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        (loop.loss(rows) / 3).backward()
        if place % 3 == 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
        if notified:
            profiler.step()

    profile = loop.run(step, 24)
    assert flops(profile) == (3 * FORWARD, 3 * BACKWARD)
    assert (profile.samples, profile.micro_steps, profile.context.accumulate) == (3 * BATCH, 3, 3)
    assert loop.seconds == [replace(times(STEP, 3), optimizer=UPDATE_SEC)] * 2


def test_without_an_optimizer_a_step_ends_where_the_loop_says(loop: Loop) -> None:
    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        loop.step(profiler, place, rows)
        profiler.step()

    profile = loop.run(step, optimizer=None)
    assert (flops(profile), profile.samples) == ((FORWARD, BACKWARD), BATCH)
    assert loop.seconds == [STEP] * 2  # torch calls hooks at any optimizer's step


@pytest.mark.parametrize("kind", ["stream", "loader", "none"])
def test_batches_of_any_iterable_are_seen_and_without_one_those_of_the_forwards(loop: Loop, kind: str) -> None:
    with loop.profiler as profiler:
        data: Any = profiler.batches(stream(8, loop.now) if kind == "stream" else loader(8, loop.now))
        if kind == "none":
            data = [torch.randn(BATCH, WIDE)] * 8
        elif kind == "loader":  # is otherwise the loader
            assert len(data) == 8 and data.batch_size == BATCH
        for rows in data:
            if kind == "none":
                loop.now.sleep(FETCH_SEC)
            loop.loss(rows).backward()
            loop.optimizer.step()
    profile = profile_of(profiler)
    assert (flops(profile), profile.samples) == ((FORWARD, BACKWARD), BATCH)
    if kind == "none":
        assert {"data_wait", "transfer", "other"} <= set(loop.windows[0].mixed_phases)
        assert [step.other for step in loop.seconds] == [FETCH_SEC] * 2
    else:
        assert loop.seconds == [STEP, STEP] and "data_wait" not in loop.windows[0].mixed_phases


def test_lbfgs_runs_its_closure_several_times_in_one_step(loop: Loop) -> None:
    optimizer = torch.optim.LBFGS(loop.net.parameters(), max_iter=3, tolerance_change=0.0, tolerance_grad=0.0)
    calls = [0]

    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        def closure() -> Tensor:
            calls[0] += 1
            optimizer.zero_grad()
            loss = loop.loss(rows)
            loss.backward()
            return loss

        optimizer.step(closure)

    profile = loop.run(step, optimizer=optimizer)
    a_step = calls[0] // 8
    assert a_step > 1 and calls[0] == 8 * a_step
    assert flops(profile) == (a_step * FORWARD, a_step * BACKWARD)
    assert (profile.samples, profile.micro_steps) == (BATCH, 1)
    for timed in loop.seconds:
        assert (timed.forward, timed.backward) == (a_step * (FORWARD_SEC + LOSS_SEC), a_step * BACKWARD_SEC)


def test_a_batch_whose_update_a_scaler_skips_belongs_to_the_next_step(loop: Loop) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        scaler.scale(loop.loss(rows) * (float("inf") if place in (1, 4) else 1.0)).backward()
        scaler.step(loop.optimizer)
        scaler.update()
        loop.optimizer.zero_grad()

    profile = loop.run(step)
    assert (profile.counted_steps, profile.samples, profile.micro_steps) == ((1,), 2 * BATCH, 2)
    assert flops(profile) == (2 * FORWARD, 2 * BACKWARD)


def test_a_gradient_penalty_is_a_backward(loop: Loop) -> None:
    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        rows.requires_grad_()
        output = loop.net(rows)
        torch.autograd.grad(output.sum(), rows, retain_graph=True)
        loss_of(output, loop.now).backward()
        loop.optimizer.step()

    # The slope takes a product in each layer, without its weights' gradients; the backward now reaches the rows, too.
    assert flops(loop.run(step)) == (FORWARD, FORWARD + 2 * FORWARD)
    assert [timed.backward for timed in loop.seconds] == [2 * BACKWARD_SEC] * 2


@pytest.mark.parametrize("around_all", [True, False], ids=["no_grad around all", "no_grad around each forward"])
@pytest.mark.parametrize("where", ["after the first batch", "before the update", "between steps"])
def test_an_evaluation_is_in_no_figure(loop: Loop, where: str, around_all: bool) -> None:
    def evaluate(here: str) -> None:
        if here != where:
            return
        loop.net.eval()
        with torch.set_grad_enabled(not around_all):
            for others in loader(2, loop.now):
                with torch.no_grad():
                    loop.net(others)
        loop.net.train()

    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        loop.loss(rows).backward()
        evaluate("before the update" if place % 2 else "after the first batch")
        if place % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
            evaluate("between steps")

    profile = loop.run(step, 16)
    assert (flops(profile), profile.notes) == ((2 * FORWARD, 2 * BACKWARD), ())
    assert loop.seconds == [replace(times(STEP, 2), optimizer=UPDATE_SEC)] * 2
    assert loop.excluded == [{"validation": 2 * (FETCH_SEC + FORWARD_SEC)}] * 2
    assert loop.summary.model_flops == 8 * 2 * (FORWARD + BACKWARD)


@pytest.mark.parametrize("whose", ["its own", "another's"])
@pytest.mark.parametrize("where", ["between steps", "inside a step"])
def test_what_the_loop_leaves_out_is_in_no_step(whose: str, where: str, loop: Loop) -> None:
    """As in an evaluation of a model that is in training mode, or of an averaged one."""
    now = loop.now
    evaluated = loop.net if whose == "its own" else Net(now)

    def evaluate(profiler: TrainingProfiler) -> None:
        with profiler.outside_of_steps("samples"):
            for others in loader(2, now):
                loss_of(evaluated(others), now)

    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        loss = loop.loss(rows)
        if where == "inside a step":
            evaluate(profiler)
        loss.backward()
        loop.optimizer.step()
        if where == "between steps":
            evaluate(profiler)

    assert loop.run(step).samples == BATCH
    assert loop.seconds == [STEP] * 2
    assert loop.excluded == [{"samples": 2 * (FETCH_SEC + FORWARD_SEC + LOSS_SEC)}] * 2
    summary = loop.summary
    assert summary.ips is not None and summary.model_flops == 8 * (FORWARD + BACKWARD)
    assert summary.ips.average * summary.batch_cost_sec.average == pytest.approx(BATCH)


def test_a_teachers_forward_belongs_to_the_step(loop: Loop) -> None:
    teacher = Net(loop.now).eval()

    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        with torch.no_grad():
            wanted = teacher(rows)
        loss_of(loop.net(rows) - wanted, loop.now).backward()
        loop.optimizer.step()

    profile = loop.run(step)
    assert (profile.flops.forward, profile.outside.forward) == (2 * FORWARD, FORWARD)
    assert [timed.other for timed in loop.seconds] == [FORWARD_SEC] * 2


def test_of_a_model_that_is_not_called_forward_is_what_ran_before_the_backward(loop: Loop) -> None:
    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        loop.now.sleep(FORWARD_SEC)
        loss_of(loop.net.second(loop.net.first(rows)), loop.now).backward()
        loop.optimizer.step()

    profile = loop.run(step)
    assert (flops(profile), profile.samples) == ((FORWARD, BACKWARD), BATCH)
    assert any("The model was not called" in note for note in profile.notes)
    assert [timed.forward for timed in loop.seconds] == [LOSS_SEC + FORWARD_SEC] * 2


@pytest.mark.parametrize("at", [1, 4])
def test_an_exception_that_leaves_the_loop_is_the_users_and_there_is_a_report(loop: Loop, at: int) -> None:
    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        loop.step(profiler, place, rows)
        if place == at:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        loop.run(step)
    profile = profile_of(loop.profiler)
    assert profile.flops.forward == FORWARD
    assert any("interrupted by ZeroDivisionError" in note for note in profile.notes)


def test_updates_inside_the_backward_end_the_step_when_it_returns(loop: Loop) -> None:
    optimizers = {weight: SlowSGD([weight], loop.now) for weight in loop.net.parameters()}

    def update(weight: Any) -> None:
        optimizers[weight].step()
        optimizers[weight].zero_grad()

    for weight in optimizers:
        weight.register_post_accumulate_grad_hook(update)
    profile = loop.run(lambda _, place, rows: loop.loss(rows).backward(), optimizer=[*optimizers.values()])
    assert (flops(profile), profile.samples) == ((FORWARD, BACKWARD), BATCH)
    assert [(one.backward, one.optimizer) for one in loop.seconds] == [(BACKWARD_SEC, 4 * UPDATE_SEC)] * 2


@pytest.mark.parametrize("place", ["before the loss", "before the update", "after the update"])
def test_a_batch_that_is_fetched_ahead_belongs_to_the_next_step(loop: Loop, place: str) -> None:
    with loop.profiler as profiler:
        batches = iter(loader(10, loop.now))
        rows, ahead = next(batches, None), None

        def fetch(here: str) -> None:
            nonlocal ahead
            ahead = next(batches, None) if here == place else ahead

        while rows is not None:
            output = loop.net(rows)
            fetch("before the loss")
            loss_of(output, loop.now).backward()
            fetch("before the update")
            loop.optimizer.step()
            fetch("after the update")
            rows = ahead
    profile = profile_of(profiler)
    assert (profile.flops.forward, profile.samples, profile.micro_steps) == (FORWARD, BATCH, 1)
    assert loop.seconds == [STEP, STEP]


def test_a_step_that_raises_while_steps_are_timed_is_left_out_and_changes_no_time_of_the_others(loop: Loop) -> None:
    def fail(_: Tensor) -> None:
        raise RuntimeError("no gradient")

    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        try:
            output = loop.net(torch.cat([rows, rows], dim=1) if place == 5 else rows)
            if place == 9:
                output.register_hook(fail)
            loss_of(output, loop.now).backward()
            loop.optimizer.step()
        except RuntimeError:
            return
        loop.now.sleep(256.0)

    profile = loop.run(step, 14, timing_steps=4)
    assert flops(profile) == (FORWARD, BACKWARD)
    assert not any("Training ended" in note for note in profile.notes)
    # The step that the loop had left goes on to the next update, and is not like the counted one.
    assert loop.seconds == [replace(STEP, other=256.0)] * 4


@pytest.mark.parametrize("notified", [False, True])
def test_a_step_of_two_models_ends_with_the_last_optimizer_or_where_the_loop_says(notified: bool, loop: Loop) -> None:
    models: dict[str, nn.Module] = {"critic": Net(loop.now), "net": Net(loop.now)}
    optimizers = [SlowSGD(one.parameters(), loop.now) for one in models.values()]

    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        for model, optimizer in zip(models.values(), optimizers, strict=True):
            loss_of(model(rows), loop.now).backward()
            optimizer.step()
        if notified:
            profiler.step()

    given = optimizers[::-1] if notified else optimizers  # in the wrong order, a step is half of one at first
    profile = loop.run(step, model=models, optimizer=given, profile_step=2 if notified else 1)
    assert (flops(profile), profile.micro_steps) == ((2 * FORWARD, 2 * BACKWARD), 1)
    by_name = {one.name: one.total.forward for one in profile.modules}
    assert (by_name["critic"], by_name["net"], by_name["net.first"]) == (FORWARD, FORWARD, FIRST)
    assert loop.seconds == [replace(times(STEP, 2), data_wait=FETCH_SEC)] * 2
    assert loop.summary.model_flops == 8 * 2 * (FORWARD + BACKWARD)


def test_what_each_step_leaves_out_is_in_the_first_lines(loop: Loop) -> None:
    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        loop.step(profiler, place, rows)
        with profiler.outside_of_steps("saving"):
            loop.now.sleep(64.0)

    profile = loop.run(step)
    assert "Left out of each step: saving 64 s." in " ".join(str(profile).split())
    assert "Left out" not in str(loop.run())


class SharpnessAware(torch.optim.Optimizer):
    """SAM as people write it: a closure asks for the gradient further up the slope, and an inner optimizer updates."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__([one for group in inner.param_groups for one in group["params"]], {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        assert closure is not None
        weights = [one for group in self.param_groups for one in group["params"]]
        up = [0.01 * one.grad for one in weights]
        torch._foreach_add_(weights, up)
        self.zero_grad()
        with torch.enable_grad():
            closure()
        torch._foreach_sub_(weights, up)
        self.inner.step()
        self.zero_grad()


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("several", [False, True])
def test_one_batch_for_ever_is_new_in_each_step_and_once_in_it(several: bool, forwards: int, tmp_path: Path) -> None:
    """Of 60 steps on the same 4 rows some are traced, where a step ends as the next forward begins."""
    net = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    optimizers = [torch.optim.SGD(one.parameters()) for one in (net if several else [net])]
    rows = torch.randn(4, 3)
    with profile_training(net, optimizers, profile_step=2, timing_steps=4, lines=False, log_dir=tmp_path) as profiler:
        for _ in range(60):
            torch.stack([net(rows).sum() for _ in range(forwards)]).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    summary, profile = throughput_of(profiler), profile_of(profiler)
    assert [note for note in profile.notes if "samples/s" in note] == []
    assert profile.context.micro_batch_size == 4
    assert (summary.ips_unit, profile.traced is not None) == ("samples/s", True)
    assert summary.ips is not None and summary.batch_cost_sec is not None
    assert summary.ips.average * summary.batch_cost_sec.average == pytest.approx(4)


@pytest.mark.parametrize("notified", [False, True])
def test_an_optimizer_around_another_one_makes_one_step(loop: Loop, notified: bool) -> None:
    """Of it the inner one is given, or none and the loop says where a step ends."""
    outer = SharpnessAware(loop.optimizer)

    def step(profiler: TrainingProfiler, place: int, rows: Tensor) -> None:
        loop.loss(rows).backward()
        outer.step(lambda: loop.loss(rows).backward())
        if notified:
            profiler.step()

    profile = loop.run(step, optimizer=None if notified else loop.optimizer)
    assert (flops(profile), profile.micro_steps, profile.samples) == ((2 * FORWARD, 2 * BACKWARD), 1, BATCH)
    assert (profile.counted_steps, profile.timed_steps) == ((1,), (4, 5))
    assert loop.summary.model_flops == 8 * 2 * (FORWARD + BACKWARD)
    twice = replace(times(STEP, 2), data_wait=FETCH_SEC, optimizer=UPDATE_SEC)
    assert loop.seconds == [twice, twice]


class Later(SlowSGD):
    """The discriminator's, in a loop that trains without it."""


def test_of_several_optimizers_one_that_makes_no_step_changes_nothing(loop: Loop) -> None:
    profile = loop.run(optimizer=[loop.optimizer, Later(Net(loop.now).parameters(), loop.now)])
    assert (flops(profile), profile.samples, profile.micro_steps) == ((FORWARD, BACKWARD), BATCH, 1)
    assert loop.summary.ips is not None and loop.summary.ips.maximum == BATCH / loop.summary.batch_cost_sec.minimum


def test_an_optimizer_without_which_no_step_ends_is_named(loop: Loop, caplog: pytest.LogCaptureFixture) -> None:
    optimizers = [loop.optimizer, Later(Net(loop.now).parameters(), loop.now)]
    profiler = profile_training(loop.net, optimizers, **SETTINGS)
    with profiler:  # nothing is fetched: the next step may begin with either of them
        for rows in [torch.ones(BATCH, WIDE)] * 8:
            loop.step(profiler, 0, rows)
    assert profiler.profile is None
    assert "a step ends when SlowSGD and Later have made their updates" in caplog.text
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


def test_start_and_stop_do_what_with_does_and_a_second_start_ends_the_first(loop: Loop) -> None:
    profiler = loop.profiler
    for batches in (8, 6):
        profiler.start()
        assert profiler.profiles == ()
        for place, rows in enumerate(loader(batches, loop.now)):
            loop.step(profiler, place, rows)
    profiler.stop()
    profiler.stop()
    assert flops(profile_of(profiler)) == (FORWARD, BACKWARD)
    assert loop.summary.model_flops == 6 * (FORWARD + BACKWARD)


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


NORM_SEC, SCALE_SEC, VALUE_SEC, CLEAR_SEC, LOGGED_SEC = 0.25, 0.125, 1.5, 0.75, 3.0


class ClearsSlowly(SlowSGD):
    """Takes its time to drop gradients as well."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._now.sleep(CLEAR_SEC)
        super().zero_grad(set_to_none)


@pytest.fixture
def slow_clipping(now: FakeNow, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch clips by takes its time: the norm, the scaling, and the limits of each value. Nothing is compiled."""
    torch._dynamo.reset()

    def slowly(original: Any, sec: float, *args: Any, **given: Any) -> Any:
        now.sleep(sec)
        return original(*args, **given)

    sleeps: Any = {(torch.linalg, "vector_norm"): NORM_SEC, (torch, "clamp"): SCALE_SEC}
    for (owner, name), sec in {**sleeps, (torch, "_foreach_clamp_min_"): VALUE_SEC}.items():
        monkeypatch.setattr(owner, name, partial(slowly, getattr(owner, name), sec))


@pytest.mark.parametrize("clears_before_backward", [False, True])
def test_clipping_and_dropping_gradients_are_of_the_update(
    loop: Loop, slow_clipping: None, clears_before_backward: bool
) -> None:
    """Also if the program has imported the clipping by its name; what the loop does beside it stays other."""
    optimizer = ClearsSlowly(loop.net.parameters(), loop.now)
    before = {one: vars(one[0])[one[1]] for one in ((torch.nn.utils, "clip_grad_value_"), (nn.Module, "zero_grad"))}

    def step(_: TrainingProfiler, place: int, rows: Tensor) -> None:
        loss = loop.loss(rows)
        if clears_before_backward:
            optimizer.zero_grad()
        loss.backward()
        loop.now.sleep(LOGGED_SEC)
        clip_grad_norm_(loop.net.parameters(), 1.0, foreach=True)
        torch.nn.utils.clip_grad_value_(loop.net.parameters(), 0.5, foreach=True)
        optimizer.step()
        if not clears_before_backward:
            optimizer.zero_grad()

    loop.run(step, optimizer=optimizer)
    clipped = NORM_SEC + SCALE_SEC + VALUE_SEC
    update = replace(STEP, optimizer=UPDATE_SEC + CLEAR_SEC + clipped, other=LOGGED_SEC)
    assert loop.seconds == [update, update]
    assert {one: vars(one[0])[one[1]] for one in before} == before
