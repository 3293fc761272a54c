"""The step and the window in every kind of training loop: what is counted, what is timed, where steps end."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback, render_text
from lightning_flops.measure.batches import tensor_shapes
from lightning_flops.measure.timing.phase_timer import PhaseTimer
from lightning_flops.records import PhaseFlops, PhaseSeconds
from tests.fake_clock import FakeNow
from tests.lightning.nets import BATCH, IN, OUT, ROOT, MakeTrainer, Rows, batch_flops, loader, new_gan, new_net
from tests.listening import warnings_in
from tests.loops.nets import Slow
from tests.loops.test_ragged_batches import of_images
from tests.results import profile_of, throughput_of


def flops(window: Any) -> PhaseFlops:
    return sum((step.flops for step in window.counted_steps), PhaseFlops())


def indices(steps: Any) -> list[int]:
    return [step.index for step in steps]


def test_automatic_optimization(trainer: MakeTrainer, now: FakeNow, windows: list[Any]) -> None:
    def fetched() -> None:
        now.sleep(0.5)
        torch.ones(9, 9) @ torch.ones(9, 9)  # what a loader computes is not the model's work

    callback = FlopsProfilerCallback(profile_step=1, timing_steps=3)
    trainer(callback).fit(new_net(now=now), loader(12, on_fetch=fetched))
    (window,) = windows
    assert (indices(window.counted_steps), indices(window.timed_steps)) == ([1], [4, 5, 6])
    assert flops(window) == batch_flops()
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(data_wait=3.0, forward=2.0, backward=4.0, optimizer=8.0)
        assert (step.samples, step.micro_steps) == (BATCH, 1)
    assert callback.profile is not None


def test_accumulated_and_ragged_last_batches_are_steps(trainer: MakeTrainer, now: FakeNow, windows: list[Any]) -> None:
    # Each epoch: batches 0-3 are one step, 4-7 another, 8-9 a ragged third.
    whole, ragged = (FlopsProfilerCallback(profile_step=step, timing_steps=2) for step in (0, 2))
    trainer(whole, accumulate_grad_batches=4, max_epochs=3).fit(new_net(now=now), loader(10))
    trainer(ragged, accumulate_grad_batches=4, max_epochs=4).fit(new_net(), loader(10))
    first, second = windows
    assert flops(first) == batch_flops(times=4)
    # Steps 1 and 2 settle, 2 and 5 are ragged: steps like the counted one come back at 3 and 4.
    assert indices(first.timed_steps) == [3, 4]
    for step in first.timed_steps:
        assert step.seconds == PhaseSeconds(forward=8.0, backward=16.0, optimizer=8.0)
        assert (step.samples, step.micro_steps) == (4 * BATCH, 4)
    assert (flops(second), second.counted_steps[0].micro_steps) == (batch_flops(times=2), 2)


def test_manual_optimization_with_two_optimizers(trainer: MakeTrainer, now: FakeNow, windows: list[Any]) -> None:
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=2)
    trainer(callback).fit(new_gan(now=now), loader(8))
    (window,) = windows
    assert indices(window.counted_steps) == [1]  # a batch is a step, however many optimizers step in it
    assert flops(window) == batch_flops(times=2)
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(forward=4.0, backward=8.0, optimizer=16.0)
    assert window.mixed_phases == ()
    summary = throughput_of(callback)
    assert (summary.steps_estimated, summary.model_flops) == (0, 8 * batch_flops(times=2).total)


def test_half_of_the_steps_of_manual_optimization_are_timed_without_marks_too(
    trainer: MakeTrainer, now: FakeNow, windows: list[Any]
) -> None:
    callback = FlopsProfilerCallback(profile_step=0, timing_steps=16, trace=False)
    trainer(callback).fit(new_gan(now=now), loader(40))
    (window,) = windows
    assert [step.seconds.total for step in window.timed_steps] == [28.0] * 8
    assert [step.seconds.total for step in window.plain_steps] == [28.0] * 8
    assert profile_of(callback).notes == ()  # no step differs from another, and the run was long enough


@pytest.mark.parametrize("every", [1, 2])
def test_bare_optimizers_and_backwards_in_manual_optimization_are_the_steps(
    trainer: MakeTrainer, now: FakeNow, windows: list[Any], every: int
) -> None:
    net = new_net(now=now, manual=True)

    def training_step(batch: Any, batch_idx: int) -> None:
        now.sleep(2.0)
        slow: Any = Slow.apply(net.net(batch[0]), now, 0.0, 4.0)  # type: ignore[no-untyped-call]
        slow.square().sum().backward()
        if batch_idx % every == every - 1:
            optimizer = net.optimizers(use_pl_optimizer=False)
            optimizer.step()
            optimizer.zero_grad()

    net.training_step = training_step
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=2)
    trainer(callback).fit(net, loader(8 * every))
    (window,) = windows
    assert (indices(window.counted_steps), flops(window)) == ([1], batch_flops(times=every))
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(forward=2.0 * every, backward=4.0 * every, optimizer=8.0)
        assert (step.samples, step.micro_steps) == (every * BATCH, every)
    assert throughput_of(callback).model_flops == 8 * batch_flops(times=every).total


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_without_an_optimizer_every_batch_is_a_step(trainer: MakeTrainer, windows: list[Any]) -> None:
    net = new_gan()
    net.configure_optimizers = lambda: None
    net.training_step = lambda batch, batch_idx: net.manual_backward(net.critic(batch[0]).square().sum())
    trainer(FlopsProfilerCallback(profile_step=2, timing_steps=2)).fit(net, loader(8))
    assert (indices(windows[0].counted_steps), flops(windows[0])) == ([2], batch_flops())


def test_lbfgs_runs_its_closure_several_times_a_step(trainer: MakeTrainer, now: FakeNow, windows: list[Any]) -> None:
    net = new_net(now=now)
    given: dict[str, Any] = {"max_iter": 2, "tolerance_grad": 0.0, "tolerance_change": 0.0}
    net.configure_optimizers = lambda: torch.optim.LBFGS(net.parameters(), **given)
    trainer(FlopsProfilerCallback(profile_step=1, timing_steps=2)).fit(net, loader(6))
    (window,) = windows
    closures = len(net.losses) // 6
    assert closures > 1
    # From its second step on, LBFGS with one pair of directions takes five dot products over all parameters: y.s, y.y,
    # two of the two-loop recursion, and the directional derivative.
    params = 4 * 8 + 8 + 8 * 3 + 3
    assert flops(window) == batch_flops(times=closures) + PhaseFlops(optimizer=5 * 2 * params)
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(forward=2.0 * closures, backward=4.0 * closures)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_the_count_does_not_depend_on_the_precision(trainer: MakeTrainer, windows: list[Any], precision: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on a CPU, Lightning runs bf16 in place of "16-mixed" and warns
        trainer(FlopsProfilerCallback(timing_steps=1), precision=precision).fit(new_net(), loader(6))
    assert flops(windows[0]) == batch_flops()
    dtypes = {cell.dtype for cell in windows[0].flops.cells if cell.flops}
    assert dtypes == {{"64-true": "float64"}.get(precision, "bfloat16")}


def built_late(net: Any) -> None:
    layers = net.net
    del net.net
    net.configure_model = lambda: setattr(net, "net", layers)


def skips_odd_batches(net: Any) -> None:
    step = net.training_step
    net.training_step = lambda batch, batch_idx: None if batch_idx % 2 else step(batch, batch_idx)


def ends_its_epoch_early(net: Any) -> None:
    net.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 4 else None


def with_teacher(net: Any) -> None:
    """The frozen teacher's forward is one of the step: its products are as many as a layer from IN to OUT has."""
    teacher, step = torch.nn.Linear(IN, OUT).eval().requires_grad_(False), net.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = teacher(batch[0])
        return step((batch[0], target), batch_idx)

    net.training_step = training_step


def with_forward_in_a_hook(net: Any) -> None:
    teacher = torch.nn.Linear(IN, OUT)
    net.on_train_batch_end = lambda outputs, batch, batch_idx: teacher(batch[0])


TEACHERS = 2 * BATCH * IN * OUT
REFUSED_BY_BAREBONES = ("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger")
PROGRAMS: dict[str, tuple[Callable[[Any], None], dict[str, Any], int, int]] = {
    "layers of configure_model": (built_late, {}, 1, 0),
    "skipped steps": (skips_odd_batches, {}, 2, 0),
    "an epoch that ends early": (ends_its_epoch_early, {"max_epochs": 3}, 1, 0),
    "a frozen teacher": (with_teacher, {}, 1, TEACHERS),
    "a forward in a hook": (with_forward_in_a_hook, {}, 1, TEACHERS),
    "overfit_batches": (lambda net: None, {"overfit_batches": 2, "max_epochs": 4}, 1, 0),
    "barebones": (lambda net: None, {"barebones": True, **dict.fromkeys(REFUSED_BY_BAREBONES)}, 1, 0),
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_step_of_a_program_is_counted(trainer: MakeTrainer, windows: list[Any], kind: str) -> None:
    change, settings, step, more = PROGRAMS[kind]
    net = new_net()
    change(net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of steps that return None
        trainer(FlopsProfilerCallback(profile_step=step, timing_steps=1), **settings).fit(net, loader(8))
    assert flops(windows[0]) == batch_flops() + PhaseFlops(forward=more)
    assert windows[0].context.framework == ROOT
    assert "net.0.linear" in [module.name for module in windows[0].modules]


@pytest.mark.parametrize("second", [2, BATCH])  # one of the same size is no other half of the same rows
def test_several_dataloaders_make_one_batch_of_the_rows_of_all(
    trainer: MakeTrainer, windows: list[Any], caplog: pytest.LogCaptureFixture, second: int
) -> None:
    def fit(**settings: Any) -> Any:
        net = new_net()
        step = net.training_step
        net.training_step = lambda batch, batch_idx: step(batch["a"], batch_idx) + step(batch["b"], batch_idx)
        loaders = {"a": loader(6), "b": DataLoader(Rows(6 * second), batch_size=second)}
        trainer(FlopsProfilerCallback(timing_steps=1, **settings)).fit(net, loaders)
        return windows.pop()

    window = fit()
    assert flops(window) == batch_flops() + batch_flops(batch=second)
    assert window.counted_steps[0].samples == BATCH + second
    assert fit(batch_size=lambda batch: len(batch["a"][0])).counted_steps[0].samples == BATCH
    assert [r.levelname for r in caplog.records if "batch_size=" in r.message] == []


@pytest.mark.parametrize(("workers", "ours_sec"), [((None, 0), 0.0), ((0, 2), 3 * 0.25)])
def test_the_fewest_workers_of_several_loaders_are_said_and_beside_any_our_own_time_is_not_taken_off(
    trainer: MakeTrainer,
    now: FakeNow,
    windows: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    workers: tuple[int | None, ...],
    ours_sec: float,
) -> None:
    class Loader(list[Any]):
        """Batches by a loader that is not torch's, and does not always know its workers."""

        num_workers: int | None

    net, loaders = new_net(now=now), [Loader(loader(10)) for _ in workers]
    for one, number in zip(loaders, workers, strict=True):
        one.num_workers = number
    step = net.training_step
    net.training_step = lambda batch, batch_idx: step(batch[0], batch_idx)
    # It is asked of the batch, and of each loader's part of it.
    monkeypatch.setattr("lightning_flops.adapters.lightning.tensor_shapes", now.slowed(tensor_shapes, 0.25))
    trainer(FlopsProfilerCallback(profile_step=1, timing_steps=3)).fit(net, loaders)
    (window,) = windows
    assert window.facts.loader_workers == 0
    assert {one.seconds.total for one in window.timed_steps} == {14.0 + ours_sec}


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle", "max_size"])
def test_a_loader_that_has_ended_has_no_rows_in_a_batch(trainer: MakeTrainer, windows: list[Any], mode: str) -> None:
    net = new_net()
    step = net.training_step
    net.training_step = lambda batch, batch_idx: sum(step(one, batch_idx) for one in batch if one is not None)
    combined = importlib.import_module(f"{ROOT}.utilities").CombinedLoader
    both = combined([loader(8), DataLoader(Rows(3 * 2), batch_size=2)], mode)
    callback = FlopsProfilerCallback(profile_step=0 if mode == "min_size" else 5, timing_steps=1)
    trainer(callback).fit(net, both)
    counted = windows[0].counted_steps[0]
    assert counted.samples == (BATCH if mode == "max_size" else BATCH + 2)
    assert counted.flops == batch_flops(batch=counted.samples)


@pytest.mark.parametrize("settings", [{}, {"batch_size": BATCH}])
def test_a_batch_for_which_the_step_returns_none_has_no_samples_and_no_flops(
    trainer: MakeTrainer, windows: list[Any], settings: dict[str, Any]
) -> None:
    net = new_net()
    step = net.training_step
    net.training_step = lambda batch, batch_idx: None if batch_idx % 2 else step(batch, batch_idx)
    callback = FlopsProfilerCallback(profile_step=3, timing_steps=2, **settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`training_step` returned `None`")
        trainer(callback, accumulate_grad_batches=2).fit(net, loader(40))
    (counted,) = windows[0].counted_steps
    assert (counted.samples, counted.micro_steps, counted.flops) == (BATCH, 2, batch_flops())
    assert throughput_of(callback).model_flops == 20 * batch_flops().total


def test_only_steps_of_the_counted_shape_are_timed_and_where_those_are_few_more_are_counted(
    trainer: MakeTrainer, windows: list[Any]
) -> None:
    every_other = [list(range(1 + 5 * (at % 2 == 0))) for at in range(40)]
    given: dict[str, Any] = {"profile_step": 0, "timing_steps": 3, "trace": False}
    trainer(FlopsProfilerCallback(**given)).fit(new_net(), DataLoader(Rows(6), batch_sampler=every_other))
    window = windows.pop()
    assert (indices(window.timed_steps), window.variable) == ([4, 6, 8], False)
    assert window.notes == (
        "Steps differ: only 3 of the 6 steps watched had the counted step's batch shapes and numbers of forwards, "
        "backwards and updates. FLOPs, times and rates are of such steps.",
    )
    # Of the 40 steps from 3 on, 8 are like step 0. The last 20 of these are timed, and 19 more are counted.
    every_fifth = [list(range(100 + at if at % 5 else 6)) for at in range(70)]
    trainer(FlopsProfilerCallback(**{**given, "timing_steps": 20})).fit(
        new_net(), DataLoader(Rows(170), batch_sampler=every_fifth)
    )
    (window,) = windows
    assert window.variable and indices(window.timed_steps) == list(range(23, 43))
    assert indices(window.counted_steps) == [0, *range(43, 62)]


def test_a_forward_inside_the_update_makes_their_times_inseparable(trainer: MakeTrainer, windows: list[Any]) -> None:
    class Hidden(torch.optim.SGD):
        """Calls its closure, and the model once more."""

        def step(self, closure: Any = None) -> Any:
            net.net(torch.ones(BATCH, IN))
            return super().step(closure)

    net = new_net()
    net.configure_optimizers = lambda: Hidden(net.parameters(), lr=0.01)
    trainer(FlopsProfilerCallback(timing_steps=1, trace=False)).fit(net, loader(6))
    assert windows[0].mixed_phases == ("forward", "other")
    assert any("cannot be separated" in note for note in windows[0].notes)


def test_a_device_without_a_clock_is_counted_and_not_timed(
    trainer: MakeTrainer, windows: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_flops.run.window.clock_for", lambda device: None)
    trainer(FlopsProfilerCallback(trace=False)).fit(new_net(), loader(6))
    (window,) = windows
    assert (flops(window), window.timed_steps) == (batch_flops(), ())
    assert "no clock" in window.notes[0]


def test_variable_batches_are_counted_as_often_as_timed(trainer: MakeTrainer, windows: list[Any]) -> None:
    callback = FlopsProfilerCallback(profile_step=0, timing_steps=10)
    growing = [list(range(size)) for size in range(1, 31)]
    trainer(callback).fit(new_net(), DataLoader(Rows(30), batch_sampler=growing))
    (window,) = windows
    assert window.variable
    # Step 0 has 1 sample; steps 3 to 12 are timed; steps 13 to 21 hold 14 to 22 samples.
    sizes = [1, *range(14, 23)]
    assert flops(window) == batch_flops(batch=sum(sizes))
    assert [step.samples for step in window.counted_steps] == sizes
    assert [step.samples for step in window.timed_steps] == list(range(4, 14))
    # Their FLOPs are those of the timed steps: a formula of the batch's size gives them.
    profile = profile_of(callback)
    assert (profile.flops_of, profile.samples) == ("formula", 8.5)
    assert profile.flops.total == batch_flops(batch=sum(range(4, 14))).total / 10


def test_each_fit_and_a_resumed_one_has_its_own_window(trainer: MakeTrainer, windows: list[Any], tmp_path: Any) -> None:
    callback, net = FlopsProfilerCallback(profile_step=1, timing_steps=1), new_net()
    first = trainer(callback, max_epochs=1)
    shown_at = []
    for epochs in (1, 2):
        first.fit_loop.max_epochs = epochs
        first.fit(net, loader(6))
        shown_at.append(profile_of(callback).report_step)
    first.save_checkpoint(tmp_path / "at12.ckpt")
    trainer(callback, max_epochs=4).fit(new_net(), loader(6), ckpt_path=tmp_path / "at12.ckpt")
    shown_at.append(profile_of(callback).report_step)
    assert [indices(window.counted_steps) for window in windows] == [[1]] * 3
    assert [flops(window) for window in windows] == [batch_flops()] * 3
    assert shown_at[0] < shown_at[1] <= 12 < shown_at[2]  # the run's own x-axis goes on


def test_validation_inside_an_epoch_belongs_to_no_step(trainer: MakeTrainer, now: FakeNow, windows: list[Any]) -> None:
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=4)
    run = trainer(callback, val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=1)
    net = new_net(now=now, validates=True)
    net.on_train_batch_end = lambda *_: now.sleep(0.25)
    run.fit(net, loader(12), loader(1))
    (window,) = windows
    assert flops(window) == batch_flops()  # the forward of the validation is not in it
    of_each = PhaseSeconds(forward=2.0, backward=4.0, optimizer=8.0, other=0.25)
    assert {step.seconds for step in window.timed_steps} == {of_each}
    # Validation follows the batches 1, 3, 5 …, so it lies at the beginning of the steps 4 and 6.
    assert indices(window.timed_steps) == [4, 5, 6, 7]
    assert [step.excluded_sec for step in window.timed_steps] == [{"validation": 1000.0}, {}] * 2


def test_a_checkpoint_that_a_step_saves_is_a_part_of_it(
    trainer: MakeTrainer, now: FakeNow, windows: list[Any], tmp_path: Any
) -> None:
    net = new_net(now=now)
    step, net.on_save_checkpoint = net.training_step, lambda checkpoint: now.sleep(500.0)

    def training_step(batch: Any, batch_idx: int) -> Any:
        net.trainer.save_checkpoint(tmp_path / "latest.ckpt")
        return step(batch, batch_idx)

    net.training_step = training_step
    trainer(FlopsProfilerCallback(timing_steps=2)).fit(net, loader(8))
    for step in windows[0].timed_steps:
        assert step.seconds == PhaseSeconds(forward=502.0, backward=4.0, optimizer=8.0)
        assert step.excluded_sec == {}


@pytest.mark.parametrize("weights_only", [False, True])
def test_callbacks_are_the_rest_of_a_step_and_checkpoints_and_what_is_between_epochs_are_left_out(
    trainer: MakeTrainer, now: FakeNow, windows: list[Any], tmp_path: Any, weights_only: bool
) -> None:
    module: Any = importlib.import_module(ROOT)

    class Slow(module.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            now.sleep(0.25)

    net = new_net(now=now)
    net.on_save_checkpoint = lambda checkpoint: now.sleep(500.0)
    kept = {"every_n_train_steps": 1, "save_top_k": -1, "save_weights_only": weights_only}
    saver = module.callbacks.ModelCheckpoint(dirpath=tmp_path / "kept", **kept)
    run = trainer(FlopsProfilerCallback(timing_steps=2), Slow(), saver, enable_checkpointing=True)
    run.fit(net, loader(8))
    for step in windows[0].timed_steps:
        other, excluded = (
            (500.25, {}) if weights_only else (0.25, {"checkpoint": 500.0})
        )  # no callback's hook is called
        assert step.seconds == PhaseSeconds(forward=2.0, backward=4.0, optimizer=8.0, other=other)
        assert step.excluded_sec == excluded
    net = new_net(now=now)
    net.on_train_epoch_start = lambda: now.sleep(300.0)
    trainer(FlopsProfilerCallback(profile_step=0, timing_steps=4), Slow(), max_epochs=4).fit(net, loader(3))
    assert indices(windows[1].timed_steps) == [3, 4, 5, 6]
    assert all(step.seconds.total == 14.25 for step in windows[1].timed_steps)
    restarts = [step.excluded_sec.get("epoch restart") for step in windows[1].timed_steps]
    assert restarts == [300.0, None, None, 300.0]


def test_a_checkpoint_ends_where_the_validation_of_the_same_batch_begins(
    trainer: MakeTrainer, now: FakeNow, windows: list[Any], tmp_path: Any
) -> None:
    net = new_net(now=now, validates=True)
    net.on_save_checkpoint = lambda checkpoint: now.sleep(500.0)
    saver_class: Any = importlib.import_module(ROOT).callbacks.ModelCheckpoint
    saver = saver_class(dirpath=tmp_path / "kept", every_n_train_steps=2, save_top_k=-1)
    given: dict[str, Any] = {"limit_val_batches": 1, "val_check_interval": 2, "num_sanity_val_steps": 0}
    trainer(FlopsProfilerCallback(timing_steps=4), saver, enable_checkpointing=True, **given).fit(
        net, loader(12), loader(1)
    )
    found = [step.excluded_sec for step in windows[0].timed_steps]
    assert {"checkpoint": 500.0, "validation": 1000.0} in found
    assert all(one in ({}, {"checkpoint": 500.0, "validation": 1000.0}) for one in found)


@pytest.mark.parametrize(("fast_dev_run", "accumulate", "counted"), [(True, 1, 0), (3, 1, 2), (4, 2, 1)])
def test_fast_dev_run_clamps_the_step_and_leaves_no_files(
    trainer: MakeTrainer, windows: list[Any], fast_dev_run: Any, accumulate: int, counted: int, tmp_path: Any
) -> None:
    callback = FlopsProfilerCallback(profile_step=100)
    run = trainer(callback, fast_dev_run=fast_dev_run, accumulate_grad_batches=accumulate)
    run.fit(new_net(), loader(6))
    assert indices(windows[0].counted_steps) == [counted]
    assert flops(windows[0]) == batch_flops(times=accumulate)
    assert list(tmp_path.iterdir()) == []


def test_a_step_beyond_the_run_is_one_warning(trainer: MakeTrainer, caplog: pytest.LogCaptureFixture) -> None:
    callback = FlopsProfilerCallback(profile_step=6)
    trainer(callback).fit(new_net(), loader(6))
    assert callback.profile is None
    assert warnings_in(caplog) == ["nothing was profiled: profile_step is 6, and this fit ended after 6 step(s)"]


# ---- seconds slept in each hook come back under the name of its part, exactly

HOOKS: dict[str, tuple[float, str]] = {
    "on_train_batch_start": (16.0, "other"),
    "on_before_zero_grad": (32.0, "other"),
    "optimizer_zero_grad": (64.0, "optimizer"),
    "on_before_backward": (128.0, "other"),
    "on_after_backward": (256.0, "other"),
    "on_before_optimizer_step": (512.0, "other"),
    "configure_gradient_clipping": (1024.0, "optimizer"),
    "lr_scheduler_step": (2048.0, "other"),
    "transfer_batch_to_device": (4096.0, "transfer"),
    "on_train_batch_end": (8192.0, "other"),
}
"""What a user may write into a module, how long it takes here, and what that time is."""

FORWARD, BACKWARD, OPTIMIZER, FETCH = 2.0, 4.0, 8.0, 0.5


def profiler(timing_steps: int = 2) -> FlopsProfilerCallback:
    return FlopsProfilerCallback(profile_step=1, timing_steps=timing_steps, trace=False, lines=False, monitor=False)


def hooked(net: Any, now: FakeNow) -> Any:
    """*net*, each of whose hooks takes its time."""
    for name, (seconds, _) in HOOKS.items():  # Lightning looks for overridden hooks in the class
        setattr(type(net), name, now.slowed(getattr(type(net), name), seconds))
    configure = net.configure_optimizers

    def configure_optimizers() -> Any:
        optimizer = configure()
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    net.configure_optimizers = configure_optimizers
    return net


def hook_seconds(phase: str, **times: int) -> float:
    """Seconds of a step in the hooks that are *phase*, each called once or as often as *times* says."""
    return sum(seconds * times.get(name, 1) for name, (seconds, kind) in HOOKS.items() if kind == phase)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_every_hook_of_a_step_has_its_part_in_all_micro_steps(
    root: str, trainer: MakeTrainer, now: FakeNow, windows: list[Any], accumulate: int
) -> None:
    run = trainer(profiler(timing_steps=16), accumulate_grad_batches=accumulate, gradient_clip_val=1.0)
    run.fit(hooked(new_net(root, now=now), now), loader(24 * accumulate, on_fetch=lambda: now.sleep(FETCH)))
    (window,) = windows
    of_micro_steps = dict.fromkeys(
        ("on_train_batch_start", "on_train_batch_end", "on_before_backward", "on_after_backward"), accumulate
    )
    assert [step.index for step in window.timed_steps] == list(range(4, 12))
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(
            data_wait=accumulate * BATCH * FETCH,
            transfer=hook_seconds("transfer", transfer_batch_to_device=accumulate),
            forward=accumulate * FORWARD,
            backward=accumulate * BACKWARD,
            optimizer=OPTIMIZER + hook_seconds("optimizer"),
            other=hook_seconds("other", **of_micro_steps),
        )
    assert [step.seconds.total for step in window.plain_steps] == [window.timed_steps[0].seconds.total] * 8
    assert window.mixed_phases == ()


def test_hooks_of_callbacks_are_other_time_and_cost_no_mark(
    root: str, trainer: MakeTrainer, now: FakeNow, windows: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = importlib.import_module(root).Callback
    slow = type("Slow", (base,), {"on_before_optimizer_step": lambda *_: now.sleep(16), "state_key": "one name"})
    idle = type("Idle", (base,), {"state_key": "one name"})
    enter, marks = PhaseTimer.enter, Counter[int]()

    def counted(timer: PhaseTimer, part: str, **how: bool) -> None:
        marks[len(windows)] += 1
        enter(timer, part, **how)

    monkeypatch.setattr(PhaseTimer, "enter", counted)
    for callbacks in ((), (base(), idle()), (slow(), idle())):
        trainer(profiler(), *callbacks).fit(new_net(root, now=now), loader(8))
    assert [[step.seconds.other for step in window.timed_steps] for window in windows] == [[0, 0], [0, 0], [16, 16]]
    assert marks[0] == marks[1] == marks[2]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_half_of_the_steps_are_timed_without_marks_and_the_parts_are_scaled_to_them(
    trainer: MakeTrainer, windows: list[Any], now: FakeNow, accumulate: int
) -> None:
    net, callback = new_net(), FlopsProfilerCallback(profile_step=0, timing_steps=16, trace=False)
    step = net.training_step

    def slow(batch: Any, batch_idx: int) -> Any:  # marks make it longer by a quarter
        assert callback.run is not None
        now.sleep((5.0 if callback.run.window.recorder.marking else 4.0) / accumulate)
        return step(batch, batch_idx)

    net.training_step = slow
    trainer(callback, accumulate_grad_batches=accumulate).fit(net, loader(40 * accumulate))
    (window,) = windows
    assert [step.seconds.total for step in window.timed_steps] == [5.0] * 8
    assert [step.seconds.total for step in window.plain_steps] == [4.0] * 8
    profile = profile_of(callback)
    assert profile.timing is not None
    assert (profile.timing.forward_sec, profile.timing.global_step.mean_sec) == (4.0, 4.0)
    assert profile.rates.samples_per_sec == accumulate * BATCH / 4.0
    assert profile.notes == ()
    text = " ".join(render_text(profile).split())
    assert "Step 0 counted, steps 3-10 timed by parts, 8 more as a whole." in text
    assert "A typical step: 4 s; mean of those 8: 4 s, " in text
    assert "They took 25.0% longer than the 8 that were timed as a whole: all their times are scaled to these." in text


@pytest.mark.parametrize("step", [1, 2, 5])  # tensors agree on 3 rows in step 2; the last batch has 3
def test_samples_of_a_list_of_images_are_what_the_loader_was_asked_for(trainer: MakeTrainer, step: int) -> None:
    net, loader = new_net(), of_images(batch_size=8)
    net.training_step = lambda batch, batch_idx: sum(net.net(one.mean((1, 2)).new_ones(IN)).sum() for one in batch[0])
    callback = FlopsProfilerCallback(profile_step=step, timing_steps=1, trace=False)
    trainer(callback).fit(net, loader)
    assert profile_of(callback).samples == {1: 8, 2: 8, 5: 3}[step]


def test_after_steps_without_hooks_a_step_has_its_own_updates_and_the_trace_its_number(
    trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step is counted, 2 settle, 8 and 8 are timed, 8 have no hooks, one settles, one warms the tracer up."""
    monkeypatch.setattr("lightning_flops.measure.recorder._SHORT_SEC", float("inf"))
    once = {"wait": 0, "warmup": 1, "active": 1, "repeat": 1}
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=16, trace=True, trace_schedule=once, lines=False)
    trainer(callback).fit(new_net(), loader(40))
    summary, profile = throughput_of(callback), profile_of(callback)
    assert (summary.steps_estimated, summary.model_flops) == (0, 32 * batch_flops().total)
    assert profile.traced is not None
    assert profile.traced.index == 1 + 1 + 2 + 8 + 8 + 8 + 1 + 1
