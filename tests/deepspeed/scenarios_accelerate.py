"""Loops of accelerate's over an engine that accelerate has made, with its own plugin and what it sets in a config."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops.config import ProfilerConfig
from lightning_flops.deepspeed import attach
from tests.deepspeed.engines import installed, left_on, logged

ROWS, ACCUMULATED, STEPS = 8, 2, 16
BLOCK: dict[str, Any] = {"enabled": True, "profile_step": 3, "timing_steps": 5, "output_file": "flops.txt"}


def prepared(**settings: Any) -> tuple[Any, Any, Any, Any]:
    """What ``Accelerator.prepare`` makes of a model, an optimizer and a loader, with its plugin."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": ACCUMULATED,
        "zero_optimization": {"stage": 0},
        "zero_allow_untested_optimizer": True,
        **settings,
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    rows: Any = torch.randn(ROWS * ACCUMULATED * STEPS, 64)
    loader: Any = DataLoader(rows, batch_size=ROWS)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def train(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[str]:
    losses = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item().hex())
    return losses


def outcome(engine: Any, profile: Any, losses: list[str], lines: list[str], **more: Any) -> dict[str, Any]:
    stage = {"stage": int(engine.zero_optimization_stage())}
    plain = train(*prepared(zero_optimization=stage))
    return {
        "profile": None if profile is None else profile.to_json(),
        "every": str(engine.steps_per_print()),
        "same": losses == plain,
        "left": left_on(engine),
        "logged": lines,
        **more,
    }


def by_block(**settings: Any) -> dict[str, Any]:
    with installed(), logged() as lines:
        loop = prepared(flops_profiler=BLOCK, **settings)
        losses = train(*loop)
    handle = attach(loop[1])
    handle.detach()
    with open("flops.txt", encoding="utf-8") as file:
        printed = file.read()
    assert handle.throughput is not None
    return outcome(loop[1], handle.profile, losses, lines, printed=printed, batches=handle.throughput.batches)


def attached() -> dict[str, Any]:
    with logged() as lines:
        loop = prepared()
        handle = attach(loop[1], ProfilerConfig(profile_step=3, timing_steps=5))
        losses = train(*loop)
        handle.detach()
    return outcome(loop[1], handle.profile, losses, lines)


def as_a_loop() -> dict[str, Any]:
    from lightning_flops import profile_training

    with logged() as lines:
        loop = accelerator, model, optimizer, _ = prepared()
        with profile_training(model, optimizer, accelerator=accelerator, profile_step=3, timing_steps=5) as profiler:
            losses = train(*loop)
    return outcome(model, profiler.profile, losses, lines)


def beside_another_loop() -> dict[str, Any]:
    """Another model trains in the same steps, under a profiler of its own that began first."""
    from lightning_flops import profile_training

    other = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(other.parameters(), 0.01)
    with profile_training(other, optimizer, profile_step=3, timing_steps=5) as profiler, logged() as lines:
        accelerator, model, engines, loader = prepared()
        handle = attach(model, ProfilerConfig(profile_step=3, timing_steps=5))
        losses = []
        for index, batch in enumerate(loader):
            losses += train(accelerator, model, engines, [batch])
            if index % ACCUMULATED:
                other(torch.ones(5, 4)).sum().backward()
                optimizer.step()
        handle.detach()
    assert profiler.profile is not None and handle.profile is not None
    backwards = [one.timing.backward_sec if one.timing else None for one in (handle.profile, profiler.profile)]
    found = outcome(model, handle.profile, losses, lines, backwards=backwards)
    return {**found, "other": [profiler.profile.flops.forward, profiler.profile.flops.backward]}


SCENARIOS: dict[str, Callable[[], Any]] = {
    "by_block": by_block,
    "by_block_of_auto": functools.partial(by_block, train_micro_batch_size_per_gpu="auto", gradient_clipping="auto"),
    "by_block_of_zero_2": functools.partial(by_block, zero_optimization={"stage": 2}),
    "attached": attached,
    "as_a_loop": as_a_loop,
    "beside_another_loop": beside_another_loop,
}
