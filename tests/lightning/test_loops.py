"""The step and the window in every kind of training loop: what is counted, what is timed, where steps end."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from lightning_flops.analysis.profile import build_profile
from lightning_flops.records import PhaseFlops, PhaseSeconds
from tests.fake_clock import FakeNow
from tests.lightning.nets import (
    BATCH,
    FORWARD,
    IN,
    OUT,
    Rows,
    Stream,
    batch_flops,
    loader,
    new_gan,
    new_net,
)

MakeTrainer = Callable[..., Any]


@pytest.fixture(autouse=True)
def keep_window(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every window that was turned into a profile."""
    windows: list[Any] = []

    def keep(window: Any, **kwargs: Any) -> Any:
        windows.append(window)
        return build_profile(window, **kwargs)

    monkeypatch.setattr("lightning_flops.run.results.build_profile", keep)
    return windows


def flops(window: Any) -> PhaseFlops:
    total = PhaseFlops()
    for step in window.counted_steps:
        total = total + step.flops
    return total


def test_automatic_optimization(root: str, trainer: MakeTrainer, now: FakeNow, keep_window: list[Any]) -> None:
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=3)
    batches = loader(12, on_fetch=lambda: now.sleep(0.5))
    trainer(callback).fit(new_net(root, now=now), batches)
    (window,) = keep_window
    assert [step.index for step in window.counted_steps] == [1]
    assert flops(window) == batch_flops()
    assert [step.index for step in window.timed_steps] == [4, 5, 6]
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(data_wait=3.0, forward=2.0, backward=4.0, optimizer=8.0)
        assert (step.samples, step.micro_steps) == (BATCH, 1)
    assert callback.profile is not None


def test_gradient_accumulation_with_a_ragged_last_group(
    root: str, trainer: MakeTrainer, now: FakeNow, keep_window: list[Any]
) -> None:
    callback = FlopsProfilerCallback(profile_step=0, timing_steps=2)
    # Each epoch: batches 0-3 are one step, 4-7 another, 8-9 a ragged third.
    trainer(callback, accumulate_grad_batches=4, max_epochs=3).fit(new_net(root, now=now), loader(10))
    (window,) = keep_window
    assert flops(window) == batch_flops(times=4)
    # Steps 1 and 2 settle, 2 and 5 are ragged: the counted step's signature comes back at 3 and 4.
    assert [step.index for step in window.timed_steps] == [3, 4]
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(forward=8.0, backward=16.0, optimizer=8.0)
        assert (step.samples, step.micro_steps) == (4 * BATCH, 4)


def test_a_ragged_group_is_a_step_when_it_is_the_counted_one(
    root: str, trainer: MakeTrainer, keep_window: list[Any]
) -> None:
    callback = FlopsProfilerCallback(profile_step=2, timing_steps=1)
    trainer(callback, accumulate_grad_batches=4, max_epochs=4).fit(new_net(root), loader(10))
    (window,) = keep_window
    assert flops(window) == batch_flops(times=2)
    assert window.counted_steps[0].micro_steps == 2


@pytest.mark.parametrize("raw", [False, True], ids=["lightning's optimizers", "bare optimizers"])
def test_manual_optimization_with_two_optimizers(
    root: str, trainer: MakeTrainer, now: FakeNow, keep_window: list[Any], raw: bool
) -> None:
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=2)
    # Once an SGD exists, its own step fires the hooks too when the nets' subclass calls it: one update all the same.
    torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    trainer(callback).fit(new_gan(root, now=now, raw=raw), loader(8))
    (window,) = keep_window
    assert [step.index for step in window.counted_steps] == [1]  # a batch is a step, however many optimizers step in it
    assert flops(window) == batch_flops(times=2)
    signature = window.counted_steps[0].signature
    assert (signature.forwards, signature.updates) == (1, 2)
    for step in window.timed_steps:
        backward = 0.0 if raw else 8.0
        assert step.seconds == PhaseSeconds(forward=4.0, backward=backward, optimizer=16.0)
    # A bare loss.backward() runs where only the forward is seen: the two times are not told apart, and that is said.
    assert window.mixed_phases == (("forward", "backward") if raw else ())
    # Steps outside of the window have as many updates as those in it, so all 8 have the FLOPs of the counted one.
    run = callback.throughput
    assert run is not None and run.steps_estimated == 0
    assert run.model_flops == 8 * batch_flops(times=2).total


def test_a_closure_of_manual_optimization_is_the_optimizers_time_but_for_its_backward(
    root: str, trainer: MakeTrainer, now: FakeNow, keep_window: list[Any]
) -> None:
    net = new_net(root, now=now)
    net.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int) -> None:
        def closure() -> Any:
            now.sleep(2.0)
            loss = torch.nn.functional.mse_loss(net.net(batch[0]), batch[1])
            net.manual_backward(loss)
            return loss

        net.optimizers().step(closure)

    net.training_step = training_step
    trainer(FlopsProfilerCallback(timing_steps=2)).fit(net, loader(8))
    (window,) = keep_window
    assert flops(window) == batch_flops()
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(forward=0.0, backward=4.0, optimizer=2.0 + 8.0)


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
def test_without_an_optimizer_every_batch_is_a_step(root: str, trainer: MakeTrainer, keep_window: list[Any]) -> None:
    net = new_gan(root)
    net.configure_optimizers = lambda: None
    net.training_step = lambda batch, batch_idx: net.manual_backward(net.critic(batch[0]).square().sum())
    trainer(FlopsProfilerCallback(profile_step=2, timing_steps=2)).fit(net, loader(8))
    (window,) = keep_window
    assert [step.index for step in window.counted_steps] == [2]
    assert flops(window) == batch_flops()


def test_an_optimizer_of_a_package_that_is_named_after_lightning_is_one(
    root: str, trainer: MakeTrainer, keep_window: list[Any]
) -> None:
    net = new_net(root)
    net.automatic_optimization = False
    net.configure_optimizers = lambda: type("Own", (torch.optim.SGD,), {"__module__": f"{root}_spells.optimizers"})(
        net.parameters(), lr=0.01
    )

    def training_step(batch: Any, batch_idx: int) -> None:
        net.manual_backward(torch.nn.functional.mse_loss(net.net(batch[0]), batch[1]))
        if batch_idx % 2:
            net.optimizers().step()

    net.training_step = training_step
    trainer(FlopsProfilerCallback(profile_step=1, timing_steps=2)).fit(net, loader(12))
    (window,) = keep_window
    assert flops(window) == batch_flops(times=2)  # a step is two batches


def test_a_forward_in_a_hook_is_counted_wherever_the_hook_stands(
    root: str, trainer: MakeTrainer, keep_window: list[Any]
) -> None:
    net = new_net(root)
    teacher = torch.nn.Linear(IN, OUT)
    net.on_train_batch_end = lambda outputs, batch, batch_idx: teacher(batch[0])
    trainer(FlopsProfilerCallback(timing_steps=1)).fit(net, loader(6))
    assert flops(keep_window[0]).forward == FORWARD + 2 * BATCH * IN * OUT
    assert keep_window[0].mixed_phases == ("forward", "other")  # its time is not where the forward's is


def test_steps_that_differ_are_said_to_differ(root: str, trainer: MakeTrainer, keep_window: list[Any]) -> None:
    net = new_net(root)
    net.automatic_optimization = False

    def training_step(batch: Any, batch_idx: int) -> None:
        for _ in range(1 + batch_idx % 2):  # every second batch is used twice
            net.manual_backward(torch.nn.functional.mse_loss(net.net(batch[0]), batch[1]))
        net.optimizers().step()

    net.training_step = training_step
    trainer(FlopsProfilerCallback(profile_step=2, timing_steps=2)).fit(net, loader(12))
    (window,) = keep_window
    assert flops(window) == batch_flops()
    assert any("Steps differ: only 2 of the 4 steps watched" in note for note in window.notes)
    assert [step.index for step in window.timed_steps] == [6, 8]


def test_lbfgs_runs_its_closure_several_times_in_one_step(
    root: str, trainer: MakeTrainer, now: FakeNow, keep_window: list[Any]
) -> None:
    net = new_net(root, now=now, optimizer="lbfgs")
    trainer(FlopsProfilerCallback(profile_step=1, timing_steps=2)).fit(net, loader(6))
    (window,) = keep_window
    closures = len(net.losses) // 6
    assert closures > 1
    assert window.counted_steps[0].signature.forwards == closures
    # From its second step on, LBFGS with one pair of directions takes five dot products over all parameters: y.s, y.y,
    # two of the two-loop recursion, and the directional derivative.
    params = 4 * 8 + 8 + 8 * 3 + 3
    assert flops(window) == batch_flops(times=closures) + PhaseFlops(optimizer=5 * 2 * params)
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(forward=2.0 * closures, backward=4.0 * closures)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true", "64-true"])
def test_the_count_does_not_depend_on_the_precision(
    root: str, trainer: MakeTrainer, keep_window: list[Any], precision: str, recwarn: pytest.WarningsRecorder
) -> None:
    # On a CPU, Lightning runs bf16 in place of "16-mixed" and warns.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(FlopsProfilerCallback(timing_steps=1), precision=precision).fit(new_net(root), loader(6))
    (window,) = keep_window
    assert flops(window) == batch_flops()
    dtypes = {cell.dtype for cell in window.flops.cells if cell.flops}
    assert dtypes == {{"64-true": "float64"}.get(precision, "bfloat16")}


def test_configure_model_builds_the_layers_after_setup(root: str, trainer: MakeTrainer, keep_window: list[Any]) -> None:
    net = new_net(root)
    layers = net.net
    del net.net
    net.configure_model = lambda: setattr(net, "net", layers)
    trainer(FlopsProfilerCallback(timing_steps=1)).fit(net, loader(6))
    assert flops(keep_window[0]) == batch_flops()
    assert "net.0.linear" in [module.name for module in keep_window[0].modules]


def test_several_dataloaders_make_one_batch(root: str, trainer: MakeTrainer, keep_window: list[Any]) -> None:
    net = new_net(root)
    step = net.training_step
    net.training_step = lambda batch, batch_idx: step(batch["a"], batch_idx) + step(batch["b"], batch_idx)
    loaders = {"a": loader(6), "b": DataLoader(Rows(12), batch_size=2)}
    callback = FlopsProfilerCallback(timing_steps=1, batch_size=lambda batch: sum(len(x) for x, _ in batch.values()))
    trainer(callback).fit(net, loaders)
    (window,) = keep_window
    assert flops(window) == batch_flops() + batch_flops(batch=2)
    assert window.counted_steps[0].samples == BATCH + 2


def test_a_batch_size_that_cannot_be_told_is_not_guessed(
    root: str, trainer: MakeTrainer, keep_window: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    net = new_net(root)
    step = net.training_step
    net.training_step = lambda batch, batch_idx: step(batch["a"], batch_idx)
    trainer(FlopsProfilerCallback(timing_steps=1)).fit(net, {"a": loader(6), "b": DataLoader(Rows(12), batch_size=2)})
    assert keep_window[0].counted_steps[0].samples is None
    assert [r.levelname for r in caplog.records if "batch_size=" in r.message] == ["WARNING"]


def test_an_iterable_dataset_and_a_dict_batch(root: str, trainer: MakeTrainer, keep_window: list[Any]) -> None:
    net = new_net(root)
    step = net.training_step
    net.training_step = lambda batch, batch_idx: step((batch["in"]["x"], batch["y"]), batch_idx)

    def collate(rows: Any) -> Any:
        x, y = zip(*rows, strict=True)
        return {"in": {"x": torch.stack(x)}, "y": torch.stack(y)}

    stream = DataLoader(Stream(Rows(6 * BATCH)), batch_size=BATCH, collate_fn=collate)
    trainer(FlopsProfilerCallback(timing_steps=1), max_epochs=2).fit(net, stream)
    (window,) = keep_window
    assert flops(window) == batch_flops()
    assert window.counted_steps[0].samples == BATCH


def test_a_step_that_fetches_its_own_batch_waits_for_it_inside_the_forward(
    root: str, trainer: MakeTrainer, now: FakeNow, keep_window: list[Any]
) -> None:
    net = new_net(root, now=now)
    step = net.training_step

    def training_step(self: Any, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return step(batch, batch_idx)

    net.training_step = MethodType(training_step, net)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning warns of this kind of step
        trainer(FlopsProfilerCallback(timing_steps=1)).fit(net, loader(8, on_fetch=lambda: now.sleep(0.5)))
    (window,) = keep_window
    assert flops(window) == batch_flops()
    assert window.counted_steps[0].samples == BATCH
    assert window.timed_steps[0].seconds == PhaseSeconds(data_wait=3.0, forward=2.0, backward=4.0, optimizer=8.0)


def test_variable_batches_are_counted_as_often_as_timed(
    root: str, trainer: MakeTrainer, keep_window: list[Any]
) -> None:
    class Growing(torch.utils.data.Sampler[list[int]]):
        def __iter__(self) -> Any:
            return iter([list(range(size)) for size in range(1, 31)])

        def __len__(self) -> int:
            return 30

    callback = FlopsProfilerCallback(profile_step=0, timing_steps=10)
    trainer(callback).fit(new_net(root), DataLoader(Rows(30), batch_sampler=Growing()))
    (window,) = keep_window
    assert window.variable
    # Step 0 has 1 sample; steps 3 to 12 are timed; steps 13 to 21 hold 14 to 22 samples.
    sizes = [1, *range(14, 23)]
    assert flops(window) == batch_flops(batch=sum(sizes))
    assert [step.samples for step in window.counted_steps] == sizes
    assert [step.samples for step in window.timed_steps] == list(range(4, 14))


def test_each_fit_opens_a_new_window(root: str, trainer: MakeTrainer, keep_window: list[Any]) -> None:
    callback, net = FlopsProfilerCallback(timing_steps=1), new_net(root)
    first = trainer(callback, max_epochs=1)
    shown_at = []
    for epochs in (1, 2):
        first.fit_loop.max_epochs = epochs
        first.fit(net, loader(6))
        assert callback.profile is not None
        shown_at.append(callback.profile.report_step)
    assert [window.profile_step for window in keep_window] == [1, 1]
    assert [flops(window) for window in keep_window] == [batch_flops()] * 2
    assert shown_at[1] > shown_at[0]  # the run's own x-axis goes on


def test_a_resumed_fit_counts_its_steps_from_its_own_beginning(
    root: str, trainer: MakeTrainer, keep_window: list[Any], tmp_path: Any
) -> None:
    before = trainer(max_steps=50, max_epochs=-1)
    before.fit(new_net(root), loader(10))
    before.save_checkpoint(tmp_path / "at50.ckpt")
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=1)
    after = trainer(callback, max_steps=60, max_epochs=-1)
    after.fit(new_net(root), loader(10), ckpt_path=tmp_path / "at50.ckpt")
    (window,) = keep_window
    assert window.counted_steps[0].index == 1
    assert callback.profile is not None and callback.profile.report_step >= 50


def test_validation_inside_an_epoch_belongs_to_no_step(
    root: str, trainer: MakeTrainer, now: FakeNow, keep_window: list[Any]
) -> None:
    callback = FlopsProfilerCallback(profile_step=1, timing_steps=4)
    run = trainer(callback, val_check_interval=2, limit_val_batches=1, num_sanity_val_steps=1)
    run.fit(new_net(root, now=now, validates=True), loader(12), loader(1))
    (window,) = keep_window
    assert flops(window) == batch_flops()  # the forward of the validation is not in it
    for step in window.timed_steps:
        assert step.seconds == PhaseSeconds(forward=2.0, backward=4.0, optimizer=8.0)
    # Validation follows the batches 1, 3, 5 …, so it lies at the beginning of the steps 4 and 6.
    assert [step.index for step in window.timed_steps] == [4, 5, 6, 7]
    assert [step.excluded_sec for step in window.timed_steps] == [{"validation": 1000.0}, {}] * 2


def test_schedulers_and_callbacks_are_the_named_rest_and_checkpoints_are_left_out(
    root: str, trainer: MakeTrainer, now: FakeNow, keep_window: list[Any], tmp_path: Any
) -> None:
    module: Any = importlib.import_module(root)

    class Slow(module.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, *args: Any) -> None:
            now.sleep(0.25)

    class SlowCheckpoint(module.callbacks.ModelCheckpoint):  # type: ignore[misc]
        def _save_checkpoint(self, run: Any, path: str) -> None:
            super()._save_checkpoint(run, path)

    net = new_net(root, now=now)
    net.on_save_checkpoint = lambda checkpoint: now.sleep(500.0)
    saver = SlowCheckpoint(dirpath=tmp_path / "checkpoints", every_n_train_steps=1, save_top_k=-1)
    run = trainer(FlopsProfilerCallback(timing_steps=2), Slow(), saver, enable_checkpointing=True)
    run.fit(net, loader(8))
    for step in keep_window[0].timed_steps:
        assert step.seconds == PhaseSeconds(forward=2.0, backward=4.0, optimizer=8.0, other=0.25)
        assert step.excluded_sec == {"checkpoint": 500.0}


def test_the_time_between_epochs_belongs_to_no_step(
    root: str, trainer: MakeTrainer, now: FakeNow, keep_window: list[Any]
) -> None:
    net = new_net(root, now=now)
    net.on_train_epoch_start = lambda: now.sleep(300.0)
    trainer(FlopsProfilerCallback(profile_step=0, timing_steps=4), max_epochs=4).fit(net, loader(3))
    (window,) = keep_window
    assert [step.index for step in window.timed_steps] == [3, 4, 5, 6]
    assert all(step.seconds.total == 14.0 for step in window.timed_steps)
    assert [step.excluded_sec.get("epoch restart") for step in window.timed_steps] == [300.0, None, None, 300.0]


@pytest.mark.parametrize(("fast_dev_run", "accumulate", "counted"), [(True, 1, 0), (3, 1, 2), (4, 2, 1)])
def test_fast_dev_run_clamps_the_step(
    root: str,
    trainer: MakeTrainer,
    keep_window: list[Any],
    fast_dev_run: Any,
    accumulate: int,
    counted: int,
    tmp_path: Any,
) -> None:
    run = trainer(
        FlopsProfilerCallback(profile_step=100), fast_dev_run=fast_dev_run, accumulate_grad_batches=accumulate
    )
    run.fit(new_net(root), loader(6))
    assert [step.index for step in keep_window[0].counted_steps] == [counted]
    assert flops(keep_window[0]) == batch_flops(times=accumulate)
    assert list(tmp_path.iterdir()) == []  # a development run leaves no files


def test_barebones(root: str, keep_window: list[Any], tmp_path: Any) -> None:
    module: Any = importlib.import_module(root)
    run = module.Trainer(
        accelerator="cpu", devices=1, barebones=True, max_epochs=1, default_root_dir=tmp_path,
        callbacks=[FlopsProfilerCallback(timing_steps=1)],
    )  # fmt: skip
    run.fit(new_net(root), loader(6))
    assert flops(keep_window[0]) == batch_flops()


def test_overfit_batches(root: str, trainer: MakeTrainer, keep_window: list[Any]) -> None:
    trainer(FlopsProfilerCallback(timing_steps=1), overfit_batches=2, max_epochs=4).fit(new_net(root), loader(6))
    assert flops(keep_window[0]) == batch_flops()


def test_a_skipped_training_step_is_a_step_of_another_signature(
    root: str, trainer: MakeTrainer, keep_window: list[Any]
) -> None:
    net = new_net(root)
    step = net.training_step
    net.training_step = lambda batch, batch_idx: None if batch_idx % 2 else step(batch, batch_idx)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(FlopsProfilerCallback(profile_step=0, timing_steps=2)).fit(net, loader(10))
    (window,) = keep_window
    assert flops(window) == batch_flops()
    assert [step.index for step in window.timed_steps] == [4, 6]


def test_a_batch_that_is_none_and_an_epoch_that_ends_early_change_nothing(
    root: str, trainer: MakeTrainer, keep_window: list[Any]
) -> None:
    class Holes(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            rows = DataLoader(Rows(5 * BATCH), batch_size=BATCH)
            for i, batch in enumerate(rows):
                if i == 1:
                    yield None
                yield batch

    net = new_net(root)
    net.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 4 else None
    stream = DataLoader(Holes(), batch_size=None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning mentions the None
        trainer(FlopsProfilerCallback(profile_step=1, timing_steps=2), max_epochs=4).fit(net, stream)
    (window,) = keep_window
    assert flops(window) == batch_flops()
    assert [step.micro_steps for step in window.timed_steps] == [1, 1]


def test_a_frozen_teacher_and_a_forward_without_gradients_count_in_the_step(
    root: str, trainer: MakeTrainer, keep_window: list[Any]
) -> None:
    net = new_net(root)
    teacher = torch.nn.Linear(IN, OUT).eval().requires_grad_(False)
    step = net.training_step

    def training_step(batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        with torch.no_grad():
            target = teacher(x)
        return step((x, target), batch_idx)

    net.training_step = training_step
    trainer(FlopsProfilerCallback(timing_steps=1)).fit(net, loader(6))
    assert flops(keep_window[0]).forward == FORWARD + 2 * BATCH * IN * OUT
    assert flops(keep_window[0]).backward == batch_flops().backward


def test_a_trainers_subclass_is_named_by_the_framework_it_comes_from(
    root: str, keep_window: list[Any], tmp_path: Any
) -> None:
    base: Any = importlib.import_module(root).Trainer
    run = type("MyTrainer", (base,), {})(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_checkpointing=False, default_root_dir=tmp_path,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[FlopsProfilerCallback(timing_steps=1)],
    )  # fmt: skip
    run.fit(new_net(root), loader(6))
    assert keep_window[0].context.framework == root


@pytest.mark.parametrize("profile_step", [6, 50])
def test_a_step_beyond_the_run_is_one_warning_with_both_numbers(
    root: str, trainer: MakeTrainer, keep_window: list[Any], caplog: pytest.LogCaptureFixture, profile_step: int
) -> None:
    callback = FlopsProfilerCallback(profile_step=profile_step)
    trainer(callback).fit(new_net(root), loader(6))
    assert keep_window == []
    assert callback.profile is None
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    ours = [message for message in warnings if "profile" in message]
    assert ours == [f"nothing was profiled: profile_step is {profile_step}, and this fit ended after 6 step(s)"]
