"""How a profiler gets onto an engine and off it again, what it refuses, and where its reports go."""

from __future__ import annotations

import argparse
import contextlib
import copy
import csv
import functools
import gc
import io
import json
import logging
import pickle
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from deepspeed import initialize  # bound before anything is installed
from deepspeed.runtime import config as deepspeed_config
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import nn

from lightning_flops.adapters.deepspeed_engine import adapter_of
from lightning_flops.config import ProfilerConfig
from lightning_flops.deepspeed import attach, install, uninstall
from lightning_flops.errors import LightningFlopsError
from tests.deepspeed.engines import BLOCK, Net, config, engine_of, installed, left_on, logged, outcome, train

STEPS = 8


def given_as(form: str) -> dict[str, Any]:
    """The config as a dict, as a path, and as the path in ``args.deepspeed_config``."""
    settings = config()
    Path("ds_config.json").write_text(json.dumps(settings), encoding="utf-8")
    model = Net()
    forms: dict[str, dict[str, Any]] = {
        "dict": {"config": settings},
        "path": {"config": "ds_config.json"},
        "arguments": {"args": argparse.Namespace(deepspeed_config="ds_config.json", local_rank=0)},
    }
    more = forms[form]
    with installed():
        engine = initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **more)[0]
        train(engine, STEPS)
        return outcome(engine, builtin=hasattr(engine, "flops_profiler"), breakdown=engine.wall_clock_breakdown())


def left_alone(block: Any) -> dict[str, Any]:
    """With the block absent or not enabled the engine is as it is without the hook."""
    settings = config(block=block)
    before = sorted(vars(engine_of(settings)))
    with installed(), logged() as lines:
        engine = engine_of(settings)
        kinds = sorted({type(value).__name__ for value in vars(engine).values()})
        train(engine, 3)
    return {"same": sorted(vars(engine)) == before, "left": left_on(engine), "kinds": kinds, "logged": lines}


def installed_and_uninstalled() -> dict[str, Any]:
    names = (deepspeed_config.DeepSpeedFlopsProfilerConfig, DeepSpeedEngine.__init__)
    install()
    install()
    replaced = (deepspeed_config.DeepSpeedFlopsProfilerConfig, DeepSpeedEngine.__init__)
    engine = engine_of(config())
    uninstall()
    uninstall()
    restored = (deepspeed_config.DeepSpeedFlopsProfilerConfig, DeepSpeedEngine.__init__)
    train(engine, STEPS)
    later = engine_of(config(block={**BLOCK, "enabled": False}))
    found = outcome(engine)
    return dict(
        found,
        replaced=all(one is not other for one, other in zip(replaced, names, strict=True)),
        restored=all(one is other for one, other in zip(restored, names, strict=True)),
        later=left_on(later),
    )


def wrong_engines() -> dict[str, Any]:
    def message(call: Callable[[], Any]) -> str:
        try:
            call()
        except LightningFlopsError as error:
            return f"{type(error).__name__}: {error}"
        return "nothing raised"

    engine = engine_of(config(block=None))
    hollow = DeepSpeedEngine.__new__(DeepSpeedEngine)
    nn.Module.__init__(hollow)
    found = {
        "no engine": message(lambda: attach(nn.Linear(2, 2))),
        "no module": message(lambda: attach(hollow)),
        "no file": message(lambda: attach(engine, "no/such/ds_config.json")),
        "no setting": message(lambda: attach(engine, {"train_batch_size": 8})),
        "no rule": message(lambda: attach(engine, {"profile_step": -3})),
    }
    first = attach(engine, {**BLOCK})
    found["another"] = message(lambda: attach(engine, {**BLOCK, "profile_step": 5}))
    same = attach(engine) is first and attach(engine, {**BLOCK}) is first
    first.detach()
    second = attach(engine, {**BLOCK, "profile_step": 1})
    train(engine, STEPS)
    return outcome(engine, second, messages=found, same=same, another=second is not first, first=first.profile is None)


def attached_by_defaults() -> dict[str, Any]:
    engine = engine_of(config(block=None))
    handle = attach(engine)
    settings = handle.config
    handle.detach()
    handle.detach()
    left = left_on(engine)
    again = attach(engine)
    tapped = left_on(engine)
    again.detach()
    return {"defaults": settings == ProfilerConfig(), "left": left, "new": again is not handle, "tapped": bool(tapped)}


def attached_to_the_builtin() -> dict[str, Any]:
    """The hook was not installed when the engine was made, so DeepSpeed's profiler is part of it."""
    engine = engine_of(config(block={"enabled": True, "profile_step": 2}))
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        handle = attach(engine, {**BLOCK})
        train(engine, STEPS)
        found = outcome(engine, handle)
    return {**found, "printed": _headings(printed.getvalue()), "enabled": engine.flops_profiler_enabled()}


def _headings(text: str) -> list[str]:
    return [line.strip("- ") for line in text.splitlines() if "Flops Profiler ---" in line]


def never_reached(how: str) -> dict[str, Any]:
    with installed(), logged() as lines:
        engine = engine_of(config(block={**BLOCK, "profile_step": 100}))
        train(engine, 3)
        handle = attach(engine)
        if how == "detach":
            handle.detach()
        else:
            engine.destroy()
        handle.detach()
    return {"logged": lines, "left": left_on(engine)}


def ended_early() -> dict[str, Any]:
    """The engine is destroyed when one step was counted and one timed."""
    with installed(), contextlib.redirect_stdout(io.StringIO()) as printed:
        engine = engine_of(config(block={**BLOCK, "timing_steps": 20}))
        train(engine, 6)
        handle = attach(engine)
        engine.destroy()
    return outcome(engine, handle, printed=printed.getvalue())


def forgotten() -> dict[str, Any]:
    """Nothing of ours keeps an engine alive that its user has let go, in the middle of a window."""
    with installed(), logged() as lines:
        engine = engine_of(config(block={**BLOCK, "profile_step": 5, "monitor": True}))
        train(engine, 3)
        known = weakref.ref(engine)
        del engine
        gc.collect()
    plain = engine_of(config(block=None))
    train(plain, 3)
    known_plain = weakref.ref(plain)
    del plain
    gc.collect()
    return {"alive": known() is not None, "plain alive": known_plain() is not None, "logged": lines}


def several_windows() -> dict[str, Any]:
    with installed():
        engine = engine_of(config(accumulate=2, block={**BLOCK, "profile_step": [0, 7], "monitor": True}))
        train(engine, 2 * 14)
    handle = attach(engine)
    found = outcome(engine, handle)
    profiles = handle.profiles
    throughput = handle.throughput
    return {
        **found,
        "counted": [list(profile.counted_steps) for profile in profiles],
        "flops": [profile.flops.forward for profile in profiles],
        "notes": [list(profile.notes) for profile in profiles],
        "throughput": throughput is not None,
    }


@contextlib.contextmanager
def _wandb(calls: list[tuple[dict[str, Any], int]]) -> Iterator[None]:
    """A wandb that notes what it is told, and refuses steps that go back as the real one does."""

    class Html:
        def __init__(self, text: str) -> None:
            self.text = text

    def log(data: dict[str, Any], step: int, **_: Any) -> None:
        assert not calls or step >= calls[-1][1], "a step went back"
        calls.append(({tag: getattr(value, "text", value) for tag, value in data.items()}, step))

    module = types.ModuleType("wandb")
    vars(module).update(init=lambda **_: None, log=log, Html=Html)
    with patch.dict(sys.modules, {"wandb": module}):
        yield


def monitors() -> dict[str, Any]:
    """TensorBoard, CSV and WandB as DeepSpeed's config enables them, all three at once."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    calls: list[tuple[dict[str, Any], int]] = []
    where = {"enabled": True, "output_path": str(Path.cwd()), "job_name": "job"}
    settings = config(
        accumulate=2,
        block={**BLOCK, "monitor": True, "output_file": "reports/flops.txt"},
        tensorboard={**where, "job_name": "tensorboard"},
        csv_monitor={**where, "job_name": "csv"},
        wandb={"enabled": True, "project": "a project"},
    )
    settings["steps_per_print"] = 4
    with installed(), _wandb(calls), contextlib.redirect_stdout(io.StringIO()) as printed:
        engine = engine_of(settings)
        train(engine, 2 * 16)
        found = outcome(engine, global_samples=engine.global_samples)
    events = EventAccumulator("tensorboard", size_guidance={"tensors": 0, "scalars": 0}).Reload()
    texts = {
        tag: [(event.step, event.tensor_proto.string_val[0].decode()) for event in events.Tensors(tag)]
        for tag in events.Tags()["tensors"]
        if tag.endswith("/text_summary")  # what the tab reads is no text
    }
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    tables = {}
    for path in Path("csv").glob("*.csv"):
        with path.open() as file:
            tables[path.stem] = list(csv.reader(file))
    return {
        **found,
        "texts": texts,
        "scalars": scalars,
        "csv": tables,
        "wandb": calls,
        "printed": "Profile Summary" in printed.getvalue(),
        "output_file": Path("reports/flops.txt").read_text(encoding="utf-8"),
        "files": sorted(str(path) for path in Path().rglob("*.json")),
    }


def tensorboard_of_ours() -> dict[str, Any]:
    """No monitor is on; the block names a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with installed():
        engine = engine_of(config(block={**BLOCK, "tensorboard_dir": "board"}))
        train(engine, STEPS)
        found = outcome(engine)
    events = EventAccumulator("board").Reload()
    flops = [(event.step, event.value) for event in events.Scalars("flops_profiler/fwd_flops")]
    files = sorted(path.name for path in Path("board").rglob("profile*.json"))
    return {**found, "flops": flops, "texts": events.Tags()["tensors"], "files": files}


def failing_monitor() -> dict[str, Any]:
    with installed(), logged() as lines, contextlib.redirect_stdout(io.StringIO()) as printed:
        settings = config(csv_monitor={"enabled": True, "output_path": str(Path.cwd()), "job_name": "csv"})
        engine = engine_of(settings)
        with (
            patch.object(engine.monitor.csv_monitor, "log_dir", str(Path.cwd() / "gone")),
            patch.object(DeepSpeedEngine, "get_lr", lambda engine: [0.1]),
            patch.object(engine.monitor, "enabled", False),
        ):
            train(engine, STEPS)
            found = outcome(engine)
        return {**found, "logged": lines, "printed": "Profile Summary" in printed.getvalue()}


def printed_report() -> dict[str, Any]:
    """Without output_file the report is printed, once, whatever the accumulation."""
    with installed(), contextlib.redirect_stdout(io.StringIO()) as printed:
        engine = engine_of(config(accumulate=4, block={**BLOCK, "module_depth": 0}))
        train(engine, 4 * STEPS)
        found = outcome(engine, global_steps=engine.global_steps)
    return {**found, "printed": printed.getvalue()}


def batch_size_unlike_the_config() -> dict[str, Any]:
    with installed(), logged() as lines:
        engine = engine_of({**config(), "train_micro_batch_size_per_gpu": 16})
        train(engine, STEPS)
        return outcome(engine, logged=lines)


def silent_below_warning() -> dict[str, Any]:
    """A run in which all is well logs no warning."""
    data = torch.utils.data.TensorDataset(torch.randn(2 * STEPS, 8))
    with installed(), logged() as lines:
        engine = engine_of(config())
        for (batch,) in torch.utils.data.DataLoader(data, batch_size=2):
            engine.backward(engine(batch).square().sum())
            engine.step()
        found = outcome(engine)
    return {**found, "logged": lines, "level": logging.getLogger("lightning_flops").level}


_kept: list[Any] = []


def copied() -> dict[str, Any]:
    """A copy of the engine, of its model and of what is wrapped, in the middle of a counted step."""
    engine = engine_of(config())
    handle = attach(engine, BLOCK)
    train(engine, 2)
    engine.backward(engine(torch.ones(2, 8)).square().sum())
    ours = b"lightning_flops" in pickle.dumps((torch.autograd.backward, adapter_of(engine)))
    same = copy.copy(engine)
    _kept.append(same)  # a copy that goes would have its engine destroy the optimizer that both have
    engine.step()
    copy.deepcopy(engine.module)(torch.ones(2, 8))
    train(engine, STEPS)
    return outcome(engine, handle, ours=ours, adapted=adapter_of(same) is not None)


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{f"given_as_{form}": functools.partial(given_as, form) for form in ("dict", "path", "arguments")},
    "left_alone_absent": functools.partial(left_alone, None),
    "left_alone_disabled": functools.partial(left_alone, {**BLOCK, "enabled": False}),
    "left_alone_unsaid": functools.partial(left_alone, {"profile_step": 2}),
    "installed_and_uninstalled": installed_and_uninstalled,
    "wrong_engines": wrong_engines,
    "attached_by_defaults": attached_by_defaults,
    "attached_to_the_builtin": attached_to_the_builtin,
    "never_reached_detach": functools.partial(never_reached, "detach"),
    "never_reached_destroy": functools.partial(never_reached, "destroy"),
    "ended_early": ended_early,
    "forgotten": forgotten,
    "several_windows": several_windows,
    "monitors": monitors,
    "tensorboard_of_ours": tensorboard_of_ours,
    "failing_monitor": failing_monitor,
    "printed_report": printed_report,
    "batch_size_unlike_the_config": batch_size_unlike_the_config,
    "copied": copied,
    "silent_below_warning": silent_below_warning,
}
