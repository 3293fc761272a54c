"""Whoever pickles or copies a run in a hook finds what there would be without the profiler.

Every hook is looked at the first time it is called in each state of the window.
"""

from __future__ import annotations

import copy
import io
import multiprocessing
import pickle
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import lightning.pytorch as pl
import pytest
import torch
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from tests.left_on_objects import left_on_object
from tests.lightning.nets import BATCH, FORWARD, ROOT, Rows, new_net, new_trainer
from tests.results import profile_of

HOOKS = (
    "setup on_fit_start on_train_start on_train_epoch_start on_train_batch_start on_before_zero_grad "
    "on_before_backward on_after_backward on_before_optimizer_step on_train_batch_end on_validation_start "
    "on_validation_batch_start on_validation_batch_end on_validation_end on_train_epoch_end on_save_checkpoint "
    "on_train_end teardown"
).split()


class Data(pl.LightningDataModule):
    """Data whose workers are given one of its own methods."""

    def __init__(self, batches: int, **loading: Any) -> None:
        super().__init__()
        self.batches, self.loading = batches, loading

    def collate(self, rows: list[Any]) -> Any:
        return torch.utils.data.default_collate(rows)

    def _loader(self, batches: int) -> Any:
        return DataLoader(Rows(batches * BATCH), batch_size=BATCH, collate_fn=self.collate, **self.loading)

    def train_dataloader(self) -> Any:
        return self._loader(self.batches)

    def val_dataloader(self) -> Any:
        return self._loader(1)


class Probe(pl.Callback):
    """Looks at the run in every hook; *look* gets the hook's name and the Trainer."""

    def __init__(self, look: Any = None) -> None:
        self.look = look

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "look": None}  # a copy does not look


def _probing(hook: str) -> Any:
    def probe(self: Any, trainer: Any, *args: Any, **kwargs: Any) -> None:
        if self.look is not None:
            self.look(hook, trainer)

    return probe


for _hook in HOOKS:
    setattr(Probe, _hook, _probing(_hook))


def pickled_by(kind: Any, thing: Any) -> bytes:
    """What *thing* is pickled to, the profiler itself aside."""

    class Pickler(kind):  # type: ignore[misc]
        def persistent_id(self, one: Any) -> Any:
            return "ours" if isinstance(one, FlopsProfilerCallback) else None

    stream = io.BytesIO()
    Pickler(stream).dump(thing)
    return stream.getvalue()


def state_of(callback: FlopsProfilerCallback) -> str:
    run = callback.run
    return "nothing" if run is None else run.window.recorder.state.value.replace("sampling", "waiting")


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    """Trains with validation and checkpoints among the steps; *look* is called in every hook."""

    def run(profiler: Any, look: Any, *, manual: bool = False, batches: int = 12, loading: Any = None) -> Any:
        settings = {"enable_checkpointing": True, "val_check_interval": 3, "num_sanity_val_steps": 0}
        folder = tmp_path / type(profiler).__name__
        made = new_trainer(ROOT, folder, Probe(look), profiler, **settings)
        made.fit(new_net(validates=True, manual=manual), datamodule=Data(batches, **(loading or {})))
        return made

    return run


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_what_is_pickled_or_copied_in_any_hook_has_nothing_of_ours(fit: Callable[..., Any], manual: bool) -> None:
    callback = FlopsProfilerCallback(timing_steps=2)
    known: set[tuple[str, str]] = set()

    def look(hook: str, trainer: Any) -> None:
        if (hook, state_of(callback)) in known:
            return
        known.add((hook, state_of(callback)))
        epoch_loop, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
        methods = [module.training_step, trainer.strategy.training_step, epoch_loop.advance, trainer.fit]
        for kind in (pickle.Pickler, cloudpickle.Pickler):
            assert b"lightning_flops" not in pickled_by(kind, [trainer, module, trainer.datamodule, methods]), hook
        copied = copy.deepcopy(trainer)
        for one in (copied, copied.strategy, copied.fit_loop.epoch_loop, *copied.lightning_module.modules()):
            assert left_on_object(one) == [], hook

    fit(callback, look, manual=manual)
    assert {state for _, state in known} >= {"waiting", "counting", "settling", "timing", "tracing"}
    assert {hook for hook, _ in known} >= set(HOOKS) - ({"on_before_zero_grad"} if manual else set())


def copies_of(profiler: Any, fit: Callable[..., Any], batches: set[int]) -> tuple[list[Any], list[float]]:
    """Copies of the Trainer taken at the end of *batches* of a fit, and the losses of that fit."""
    copies: list[Any] = []
    ends: Counter[str] = Counter()

    def look(hook: str, trainer: Any) -> None:
        ends[hook] += 1
        if hook == "on_train_batch_end" and ends[hook] - 1 in batches:
            copies.append(copy.deepcopy(trainer))

    made = fit(profiler, look)
    return copies, list(made.lightning_module.losses)


def trains_on(copied: Any) -> list[float]:
    """The losses of one more epoch of a copy, and those before."""
    torch.manual_seed(2)
    copied.fit_loop.max_epochs += 1
    copied.fit(copied.lightning_module, datamodule=copied.datamodule)
    return list(copied.lightning_module.losses)


@pytest.mark.filterwarnings("ignore:Checkpoint directory")  # the first fit's, in the second as in any Trainer
def test_a_copy_trains_on_like_a_copy_of_a_plain_trainer_and_is_profiled_anew(fit: Callable[..., Any]) -> None:
    batches = {0, 1, 3, 5, 11}  # before the counted step, after it, among the timed ones, in the trace, at the end
    copies, losses = copies_of(FlopsProfilerCallback(timing_steps=2), fit, batches)
    plain, plain_losses = copies_of(Probe(), fit, batches)
    assert losses == plain_losses and len(copies) == len(plain) == len(batches)
    for copied, copied_plain in zip(copies, plain, strict=True):
        (of_copy,) = [one for one in copied.callbacks if isinstance(one, FlopsProfilerCallback)]
        of_copy._profiles.clear()
        on, on_plain = trains_on(copied), trains_on(copied_plain)
        assert on == on_plain and len(on) >= len(losses)
        assert profile_of(of_copy).flops.forward == FORWARD


@pytest.fixture
def root_in_the_server_of_forks() -> Iterator[None]:
    """A server of forks that begins now imports it once, for all of its workers."""
    multiprocessing.set_forkserver_preload([ROOT])
    yield
    multiprocessing.set_forkserver_preload([])


@pytest.mark.usefixtures("root_in_the_server_of_forks")
@pytest.mark.filterwarnings("ignore:Consider setting `persistent_workers")  # whose iterators no Trainer can pickle
@pytest.mark.parametrize("method", [pytest.param("spawn", marks=pytest.mark.slow), "forkserver"])
def test_workers_that_are_started_afresh_get_a_method_of_the_datamodule(fit: Callable[..., Any], method: str) -> None:
    callback = FlopsProfilerCallback(timing_steps=2, trace=False)
    states: list[str] = []

    def look(hook: str, trainer: Any) -> None:
        if hook == "on_validation_start":
            states.append(state_of(callback))

    made = fit(callback, look, batches=4, loading={"num_workers": 1, "multiprocessing_context": method})
    assert states == ["settling"]  # step 1 is counted, validation comes after step 2
    assert profile_of(callback).flops.forward == FORWARD
    assert made.global_step == 4
