"""Lightning's DeepSpeedStrategy on two ranks, gloo, real engines: its config's block, its steps, its parameters."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import deepspeed
import torch
from torch import nn

from lightning_flops import FlopsProfilerCallback, Profile
from lightning_flops.records import TimePhase
from tests.deepspeed.on_cpu import strategy
from tests.deepspeed.scenario import scenario
from tests.left_on_objects import left_on_object
from tests.lightning.nets import BATCH, HIDDEN, IN, OUT, ROOT, batch_flops, loader, net_class, new_trainer, nothing
from tests.listening import listening

BLOCK = {"enabled": True, "profile_step": 2, "module_depth": 1, "timing_steps": 2, "trace": False}
OFF = {**BLOCK, "enabled": False}
SHORT: dict[str, Any] = {"max_epochs": 1, "limit_train_batches": 2}
BATCHES, RANKS = 18, 2
"""Batches on each rank and in each epoch: four and a half steps of four."""
PARAMS = (IN * HIDDEN + HIDDEN) + (HIDDEN * OUT + OUT)
STEP = batch_flops(times=4)


def net(root: str, *, fails_at: int | None, manual: bool) -> Any:
    """A module whose training_step calls ``self(x)``: its forward runs inside the engine's."""

    class Net(net_class(root, validates=True)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> Any:
            return self.net(x)

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor | None:
            x, y = batch
            loss = nn.functional.mse_loss(self(x), y)
            self.losses.append(loss.item())
            if len(self.losses) == fails_at:
                raise RuntimeError("the user's own")
            if not manual:
                return loss
            self.manual_backward(loss)
            self.optimizers().step()
            return None

    torch.manual_seed(3)
    return Net(now=None, at=nothing, manual=manual)


def fit(
    *callbacks: Any,
    block: object | None,
    root: str = ROOT,
    stage: int = 2,
    fails_at: int | None = None,
    manual: bool = False,
    **kwargs: Any,
) -> SimpleNamespace:
    """Train; the user's config comes back and nothing of ours stays. Says what came of it."""
    logging.getLogger("lightning_flops").setLevel(logging.INFO)
    written = copy.deepcopy(block)
    config: dict[str, Any] = {"zero_allow_untested_optimizer": True, "zero_optimization": {"stage": stage}}
    config |= {} if block is None else {"flops_profiler": block}
    module, raised = net(root, fails_at=fails_at, manual=manual), ""
    settings = {"accumulate_grad_batches": 1 if manual else 4, "max_epochs": 3, "limit_val_batches": 1, **kwargs}
    settings |= {"strategy": strategy(root, config, ranks=RANKS), "devices": RANKS, "num_sanity_val_steps": 0}
    trainer = new_trainer(root, ".", *callbacks, **settings)
    with listening("lightning_flops", form="%(levelname)s: %(message)s") as messages:
        try:
            trainer.fit(module, loader(BATCHES * RANKS), loader(2))
        except (AttributeError, RuntimeError, TypeError) as error:
            raised = f"{type(error).__name__}: {error}"
    engine = trainer.strategy.model if isinstance(trainer.strategy.model, deepspeed.DeepSpeedEngine) else None
    owners = [trainer, trainer.strategy, trainer.fit_loop, trainer.fit_loop.epoch_loop, *module.modules()]
    owners += [] if engine is None else [engine, *engine.modules()]
    assert [name for owner in owners for name in left_on_object(owner)] == []
    assert block is None or (config["flops_profiler"] is block and block == written)
    assert engine is None or engine.flops_profiler_enabled() is False
    with deepspeed.zero.GatheredParameters(list(module.parameters())) if stage == 3 else contextlib.nullcontext():
        weights = {name: weight.detach().tolist() for name, weight in module.named_parameters()}
    ours = [one for one in trainer.callbacks if isinstance(one, FlopsProfilerCallback)]
    return SimpleNamespace(
        raised=raised,
        training=(module.losses, weights, torch.get_rng_state().tolist()),
        messages=messages,
        callbacks=len(ours),
        profiles=[one.profile for one in ours if one.profile is not None],
        steps=(None if engine is None else engine.global_steps, trainer.global_step),
    )


@cache
def plain(root: str = ROOT, stage: int = 2) -> SimpleNamespace:
    return fit(root=root, stage=stage, block=dict(OFF))


def only(found: SimpleNamespace) -> Profile:
    (profile,) = found.profiles
    assert isinstance(profile, Profile)
    return profile


def reports() -> list[str]:
    return [str(path) for path in Path().rglob("profile.json")]


def rank() -> int:
    return int(os.environ["RANK"])


@scenario("lightning.pytorch 2", "pytorch_lightning 3")
def a_step_is_the_engines_its_flops_are_exact_and_the_training_is_the_same_bits(pair: str) -> None:
    root, stage = pair.split()[0], int(pair.split()[1])
    without, found = plain(root, stage), fit(FlopsProfilerCallback(), root=root, stage=stage, block=dict(BLOCK))
    assert without.profiles == [] and len(without.training[0]) == 3 * BATCHES
    assert (found.training, found.steps) == (without.training, without.steps)
    # The engine accumulates across epochs of 18 batches; Lightning's own count starts anew in each.
    assert found.steps == (3 * BATCHES // 4, 3 * (BATCHES // 4))
    profile = only(found)
    assert profile.context.rank == rank()
    assert (profile.flops.forward, profile.flops.backward) == (STEP.forward, STEP.backward)
    assert (profile.flops.recompute, profile.flops.optimizer) == (0, 0)
    assert (profile.micro_steps, profile.samples) == (4, 4 * BATCH)
    by_name = {module.name: module for module in profile.modules}
    assert by_name["net.0.linear"].total.forward == 4 * 2 * BATCH * IN * HIDDEN
    assert by_name["net.1"].total.backward == 4 * 2 * (2 * BATCH * HIDDEN * OUT)
    # Parameters are the model's, also where each rank holds a part.
    assert (profile.params, profile.trainable_params, by_name["net.1"].params) == (PARAMS, PARAMS, HIDDEN * OUT + OUT)
    assert profile.local_params is not None
    assert profile.local_params < PARAMS if stage == 3 else profile.local_params == PARAMS
    assert (profile.profile_step, len(profile.timed_steps), profile.settings.module_depth) == (2, 2, 1)
    timing = profile.timing
    assert timing is not None and timing.timed_steps == 2
    names: tuple[TimePhase, ...] = ("data_wait", "transfer", "forward", "backward", "optimizer", "other")
    assert all(timing.seconds_of(name) is not None for name in names)


@scenario()
def arguments_win_over_the_block_and_the_traced_step_has_times_of_modules() -> None:
    found = fit(FlopsProfilerCallback(profile_step=1, timing_steps=3, trace=True), block=dict(BLOCK))
    profile = only(found)
    assert (profile.profile_step, len(profile.timed_steps), profile.settings.module_depth) == (1, 3, 1)
    times = {module.name: module.times for module in profile.modules}
    for name in ("", "net.0.linear", "net.1"):
        one = times[name]
        assert one is not None and one.forward_sec > 0 and one.backward_sec is not None, name
    assert profile.traced is not None and found.training == plain().training


@scenario()
def an_exception_in_the_users_step_leaves_as_it_came_and_the_report_says_so() -> None:
    found = fit(FlopsProfilerCallback(), block=dict(BLOCK), fails_at=14)
    profile = only(found)
    assert (found.raised, profile.flops.forward, profile.timing) == ("RuntimeError: the user's own", STEP.forward, None)
    assert any("interrupted by RuntimeError" in note for note in profile.notes)


@scenario()
def manual_optimization_has_its_steps_counted() -> None:
    found = fit(FlopsProfilerCallback(), block=dict(BLOCK), manual=True, max_epochs=1)
    profile = only(found)
    assert (found.steps[0], profile.micro_steps) == (18, 1)
    assert (profile.flops.forward, profile.flops.backward) == (batch_flops().forward, batch_flops().backward)


@scenario()
def what_is_wrong_in_a_block_is_said_and_training_is_as_without_us() -> None:
    wrong = fit(FlopsProfilerCallback(), block={**BLOCK, "profile_step": "2", "step": 1}, **SHORT)
    assert (wrong.raised, wrong.profiles) == ("", [])
    assert wrong.training[0] == plain().training[0][: len(wrong.training[0])] != []
    words = (
        "in the DeepSpeed config, flops_profiler.step is not a setting, did you mean profile_step?",
        "this fit is not profiled: flops_profiler.profile_step must be an integer >= 0, or a list of such, got '2'",
    )
    said = [message for message in wrong.messages if "flops_profiler." in message]
    assert said == [f"WARNING: {one}" for one in words] * (rank() == 0)
    refused = fit(FlopsProfilerCallback(), block=["profile_step"], **SHORT)  # in DeepSpeed's own words
    assert (refused.raised, refused.training[0]) == ("AttributeError: 'list' object has no attribute 'get'", [])
    off = fit(FlopsProfilerCallback(), block=dict(OFF), **SHORT)
    not_enabled = "WARNING: flops_profiler.enabled is not true: this fit is not profiled"
    assert (off.profiles, off.messages) == ([], [not_enabled] * (rank() == 0))


@scenario()
def by_the_environment_the_block_is_served_without_any_code() -> None:
    with patch.dict(os.environ, {"LIGHTNING_FLOPS": "1"}):
        without, unasked = fit(block=None), reports()
        found, asked = fit(block=dict(BLOCK)), reports()
        own = fit(FlopsProfilerCallback(profile_step=1), block=dict(BLOCK))
    profile = only(found)
    # Who asks for a profile, as the block does, gets a folder for it.
    assert (unasked, asked) == ([], ["lightning_flops/profile.json"] if rank() == 0 else [])
    assert (found.callbacks, profile.profile_step, len(profile.timed_steps)) == (1, 2, 2)
    assert (profile.flops.forward, profile.flops.backward) == (STEP.forward, STEP.backward)
    assert found.training == plain().training
    profile = only(without)
    assert (profile.profile_step, profile.flops.forward) == (1, STEP.forward)
    assert (own.callbacks, only(own).profile_step) == (2, 1)
    assert [message for message in own.messages if "not profiled" in message] == []
