"""How a profiler gets onto an engine and off it again, what it refuses, and where its reports go."""

from __future__ import annotations

import contextlib
import copy
import csv
import gc
import io
import pickle
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.engine import DeepSpeedEngine
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from lightning_flops.adapters.deepspeed import adapter_of
from lightning_flops.deepspeed import attach, install, uninstall
from lightning_flops.errors import ConfigError, LightningFlopsError
from lightning_flops.pytorch import profile_training
from lightning_flops.run import delivery
from tests.deepspeed.engines import (
    BLOCK,
    SAMPLES,
    WINDOW,
    config,
    engine_of,
    flops_of,
    installed,
    left_on,
    logged,
    profile_of,
    profiled,
    train,
)
from tests.deepspeed.launching import BACKWARD, FORWARD
from tests.deepspeed.scenario import Skipped, scenario

STEPS = 8


@scenario("absent", "disabled", "unsaid")
def an_engine_without_an_enabled_block_is_left_alone(how: str) -> None:
    block = {"absent": None, "disabled": {**BLOCK, "enabled": False}, "unsaid": {"profile_step": 2}}[how]
    settings = config(block=block)
    before = sorted(vars(engine_of(settings)))
    with installed(), logged() as lines:
        engine = engine_of(settings)
        train(engine, 3)
    assert (sorted(vars(engine)), left_on(engine)) == (before, [])
    # Off is what the user wrote; without a word the block may have been forgotten, or its name misspelt.
    said = "flops_profiler.enabled is not true: this engine is not profiled"
    assert lines == ([] if how == "disabled" else [said])


@scenario()
def uninstall_gives_back_what_install_replaced() -> None:
    def replaced() -> tuple[Any, Any]:
        return deepspeed_config.DeepSpeedFlopsProfilerConfig, DeepSpeedEngine.__init__

    names = replaced()
    install()
    install()
    assert all(one is not other for one, other in zip(replaced(), names, strict=True))
    engine = engine_of(config())
    uninstall()
    uninstall()
    assert replaced() == names
    train(engine, STEPS)  # an engine that was made before is profiled on
    later = engine_of(config(block={**BLOCK, "enabled": False}))
    assert profile_of(engine).flops.forward == FORWARD
    assert left_on(later) == []


@scenario()
def attach_refuses_what_it_cannot_profile_and_other_settings() -> None:
    def message(model: Any, *block: Any) -> str:
        try:
            attach(model, *block)
        except LightningFlopsError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing raised"

    engine = engine_of(config(block=None))
    assert message(nn.Linear(2, 2)) == (
        "LightningFlopsError: attach needs what deepspeed.initialize returns first, got Linear"
    )
    assert message(engine, "no/such/ds_config.json") == (
        "ConfigError: cannot read the DeepSpeed config no/such/ds_config.json: No such file or directory"
    )
    assert "flops_profiler.train_batch_size is not a setting" in message(engine, {"train_batch_size": 8})
    assert "flops_profiler.profile_step must be an integer >= 0" in message(engine, {"profile_step": -3})
    first = attach(engine, {**BLOCK})
    assert "profiled already with other settings" in message(engine, {**BLOCK, "profile_step": 5})
    assert attach(engine) is first and attach(engine, {**BLOCK}) is first
    first.detach()
    same = attach(engine, {**BLOCK})
    assert same is not first
    same.detach()
    second = attach(engine, {**BLOCK, "profile_step": 1})
    train(engine, STEPS)
    assert second is not first and first.profile is None
    assert profile_of(engine, second).counted_steps == (1,)


@scenario()
def attach_switches_the_builtin_profiler_off() -> None:
    """The hook was not installed when the engine was made, so DeepSpeed's profiler is part of it."""
    engine = engine_of(config(block={"enabled": True, "profile_step": 2}))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        handle = attach(engine, {**BLOCK})
        train(engine, STEPS)
        assert profile_of(engine, handle).flops.forward == FORWARD
    assert printed.getvalue().count("Flops Profiler ---") == 1
    assert engine.flops_profiler_enabled()  # again, now that ours is detached


@scenario()
def an_engine_that_is_let_go_in_its_window_is_gone() -> None:
    plain = engine_of(config(block=None))
    train(plain, 3)
    known = weakref.ref(plain)
    del plain
    gc.collect()
    if known() is not None:
        raise Skipped("this DeepSpeed keeps engines itself")
    with installed(), logged() as lines:
        engine = engine_of(config(block={**BLOCK, "profile_step": 5, "monitor": True}))
        train(engine, 3)
        known = weakref.ref(engine)
        del engine
        gc.collect()
    assert known() is None
    assert lines == ["nothing was profiled: profile_step is 5, and this run ended after 3 step(s)"]


@scenario()
def whoever_reads_the_profile_after_a_loop_waits_for_the_report_that_is_being_made() -> None:
    analyze = delivery.profile_of_window

    def slowly(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return analyze(*args, **kwargs)

    with mock.patch.object(delivery, "profile_of_window", slowly):
        engine = engine_of(config(block=None))
        handle = attach(engine, {**BLOCK, "lines": False})
        train(engine, STEPS)
        assert handle.profile is not None and handle.profile.profile_step == 2
        assert handle.throughput is None  # its run goes on
        handle.detach()


@scenario()
def monitors_of_deepspeeds_get_scalars_and_text_at_global_samples() -> None:
    """TensorBoard and CSV at once; two micro-steps of two samples, the window closes with step 6."""
    where = {"enabled": True, "output_path": str(Path.cwd()), "job_name": "job"}
    settings = config(
        accumulate=2,
        block={**BLOCK, "monitor": True, "output_file": "reports/flops.txt"},
        tensorboard={**where, "job_name": "tensorboard"},
        csv_monitor={**where, "job_name": "csv"},
    )
    settings["steps_per_print"] = 4
    with installed(), contextlib.redirect_stdout(io.StringIO()) as printed:
        engine = engine_of(settings)
        train(engine, 2 * 16)
        profile_of(engine)
    events = EventAccumulator("tensorboard", size_guidance={"tensors": 0, "scalars": 0}).Reload()
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    ((at, value),) = scalars["flops_profiler/fwd_flops"]
    assert (at in range(7 * 4, 16 * 4 + 1, 4), value) == (True, 2 * FORWARD)
    assert scalars["flops_profiler/bwd_flops"] == [(at, 2 * BACKWARD)]
    assert [step for step, _ in scalars["flops_profiler/samples_per_sec"]] == [at]
    assert "Train/Samples/lr" in scalars
    # Readings come every steps_per_print steps.
    assert [step for step, _ in scalars["flops_monitor/samples_per_sec"]] == [4 * 4, 8 * 4, 12 * 4, 16 * 4]
    (text,) = events.Tensors("flops_profiler/profile/text_summary")
    assert text.step == at and b"came out at step 7." in text.tensor_proto.string_val[0]
    with Path("csv/flops_profiler_fwd_flops.csv").open() as file:
        assert list(csv.reader(file)) == [["step", "fwd_flops"], [str(at), str(float(2 * FORWARD))]]
    # The report is in the file in place of the console, and the profile lies beside the logs.
    assert "came out at step 7." in Path("reports/flops.txt").read_text(encoding="utf-8")
    assert "Profile Summary" not in printed.getvalue()
    assert Path("tensorboard/lightning_flops/profile.json").exists()


@scenario()
def one_report_is_printed_whatever_the_accumulation_as_deep_as_it_is_asked_for() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as output:
        engine, _ = profiled(4 * STEPS, accumulate=4, block={**BLOCK, "module_depth": 0})
    printed = output.getvalue()
    assert printed.count("Profile Summary at step") == 1 and engine.global_steps == 8
    assert "Profile Summary at step 2:" in printed and "came out at step 7." in printed
    assert " x 4 micro-steps" in " ".join(printed.split())
    assert "depth 0" in printed and "depth 1" not in printed and "(first)" not in printed


_kept: list[Any] = []


@scenario()
def pickles_and_copies_in_a_counted_step_have_nothing_of_ours() -> None:
    engine = engine_of(config())
    handle = attach(engine, BLOCK)
    train(engine, 2)
    engine.backward(engine(torch.ones(2, 8)).square().sum())
    assert b"lightning_flops" not in pickle.dumps(torch.autograd.backward)
    same = copy.copy(engine)
    _kept.append(same)  # a copy that goes would have its engine destroy the optimizer that both have
    engine.step()
    copy.deepcopy(engine.module)(torch.ones(2, 8))
    train(engine, STEPS)
    assert flops_of(profile_of(engine, handle)) == (FORWARD, BACKWARD)
    assert adapter_of(same) is None


@scenario()
def a_loop_around_an_engine_says_how_often_and_where_throughput_is_written() -> None:
    """By itself an engine writes as often as it prints."""

    def written_at(**asked: Any) -> list[int]:
        engine, written = engine_of(config(block=None, steps_per_print=4)), list[tuple[int, str]]()

        def write(scalars: dict[str, float], step: int) -> None:
            written.extend((step, tag) for tag in scalars)

        with profile_training(engine, writer=write, profile_step=100, trace=False, **asked):
            train(engine, 10)
        return [step for step, tag in written if tag == "flops_monitor/batches_per_sec"]

    assert written_at() == [4, 8]
    assert written_at(log_every_n_steps=2, initial_step=500) == [502, 504, 506, 508, 510]


@scenario()
def an_optimizer_beside_an_engine_is_the_engines_own() -> None:
    engine = engine_of(config(block=None))
    other = torch.optim.SGD(nn.Linear(8, 2).parameters(), lr=0.1)
    try:
        profile_training(engine, other)
    except ConfigError as error:
        assert str(error).startswith("optimizer must be the engine's own, which makes its updates, or be left out, got")
    else:
        raise AssertionError("another optimizer was taken")
    for own in (engine.optimizer, engine.basic_optimizer):
        with profile_training(engine, own, **WINDOW, profile_step=1) as profiler:
            train(engine, STEPS)
        assert profiler.profile is not None
        assert profiler.profile.flops.forward == FORWARD


@scenario()
def what_a_handle_names_is_a_phase_and_a_model_that_is_only_asked_scores() -> None:
    engine, teacher = engine_of(config(block=None)), nn.Linear(8, 16, bias=False)
    handle = attach(engine, BLOCK)

    def step(engine: Any, batch: Any) -> torch.Tensor:
        with torch.no_grad():
            teacher(batch)
        with handle.phase("act"), torch.no_grad():
            engine.module(batch)
        loss: torch.Tensor = engine(batch).square().sum()
        engine.backward(loss)
        engine.step()
        return loss

    train(engine, STEPS, step=step)
    profile = profile_of(engine, handle)
    found = {name: one.flops for name, one in profile.phases.items()}
    of_teacher = 2 * SAMPLES * 8 * 16
    assert found == {"scoring": of_teacher, "training": FORWARD + BACKWARD, "act": FORWARD, "rest": 0}
    assert profile.flops.model == of_teacher + 2 * FORWARD + BACKWARD
