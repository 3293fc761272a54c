"""Whoever pickles or copies a run in a hook finds what there would be without the profiler.

Every hook is looked at the first time it is called in each state of the window.
"""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import lightning.pytorch as pl
import pytest

from lightning_flops import FlopsProfilerCallback
from tests.left_on_objects import left_on_object
from tests.lightning.nets import ROOT, loader, new_net, new_trainer

HOOKS = (
    "setup on_fit_start on_train_start on_train_epoch_start on_train_batch_start on_before_zero_grad "
    "on_before_backward on_after_backward on_before_optimizer_step on_train_batch_end on_validation_start "
    "on_validation_batch_start on_validation_batch_end on_validation_end on_train_epoch_end on_save_checkpoint "
    "on_train_end teardown"
).split()


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


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_what_is_pickled_or_copied_in_any_hook_has_nothing_of_ours(tmp_path: Path, manual: bool) -> None:
    callback = FlopsProfilerCallback(timing_steps=2)
    known: set[tuple[str, str]] = set()

    def look(hook: str, trainer: Any) -> None:
        if (hook, state_of(callback)) in known:
            return
        known.add((hook, state_of(callback)))
        epoch_loop, module = trainer.fit_loop.epoch_loop, trainer.lightning_module
        methods = [module.training_step, trainer.strategy.training_step, epoch_loop.advance, trainer.fit]
        for kind in (pickle.Pickler, cloudpickle.Pickler):
            assert b"lightning_flops" not in pickled_by(kind, [trainer, module, methods]), hook
        copied = copy.deepcopy(trainer)
        for one in (copied, copied.strategy, copied.fit_loop.epoch_loop, *copied.lightning_module.modules()):
            assert left_on_object(one) == [], hook

    settings = {"enable_checkpointing": True, "val_check_interval": 3, "num_sanity_val_steps": 0}
    trainer = new_trainer(ROOT, tmp_path, Probe(look), callback, **settings)
    trainer.fit(new_net(validates=True, manual=manual), loader(12), loader(1))
    assert {state for _, state in known} >= {"waiting", "counting", "settling", "timing", "tracing"}
    assert {hook for hook, _ in known} >= set(HOOKS) - ({"on_before_zero_grad"} if manual else set())
