"""Loops of accelerate's over an engine that accelerate has made, with its own plugin and what it sets in a config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.utils.data import DataLoader

from lightning_flops import Profile, profile_training
from lightning_flops.deepspeed import attach
from tests.deepspeed.engines import config, installed, left_on, logged
from tests.deepspeed.scenario import scenario

ROWS, ACCUMULATED, STEPS = 8, 2, 16
# Two micro-batches of eight rows through layers of 64·128 and 128·10; the rows need no gradient.
FORWARD = 2 * 2 * 8 * (64 * 128 + 128 * 10)
BACKWARD = 2 * 2 * 8 * (64 * 128 + 2 * 128 * 10)
BLOCK: dict[str, Any] = {"enabled": True, "profile_step": 3, "timing_steps": 5, "output_file": "flops.txt"}


def prepared(**settings: Any) -> tuple[Any, Any, Any, Any]:
    """What ``Accelerator.prepare`` makes of a model, an optimizer and a loader, with its plugin."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    given = config(accumulate=ACCUMULATED, block=None, **{"train_micro_batch_size_per_gpu": ROWS, **settings})
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=given))
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


def judge(engine: Any, profile: Profile | None, losses: list[str], lines: list[str]) -> None:
    """It was counted exactly, and trained as without us."""
    assert str(engine.steps_per_print()) == "inf"  # as accelerate sets it in every config
    assert (left_on(engine), lines) == ([], [])
    assert profile is not None and (profile.flops.forward, profile.flops.backward) == (FORWARD, BACKWARD)
    assert (profile.counted_steps, len(profile.timed_steps)) == ((3,), 5)
    assert (profile.micro_steps, profile.samples) == (2, 16)
    assert profile.modules[0].calls == 2  # the engine's and, in it, the model's are one
    assert profile.timing is not None
    assert losses == train(*prepared(zero_optimization={"stage": int(engine.zero_optimization_stage())}))


@scenario("plain", "auto", "zero 2")
def by_block(kind: str) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "plain": {},
        "auto": {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto"},
        "zero 2": {"zero_optimization": {"stage": 2}},
    }
    with installed(), logged() as lines:
        loop = prepared(flops_profiler=BLOCK, **kinds[kind])
        losses = train(*loop)
    handle = attach(loop[1])
    handle.detach()
    judge(loop[1], handle.profile, losses, lines)
    printed = Path("flops.txt").read_text(encoding="utf-8")
    assert "fwd flops per GPU:" in printed and "303.1 K" in printed
    # A step was counted, two are for the trace, and more may have run while that was analyzed.
    assert handle.throughput is not None and handle.throughput.batches in range(2, 2 * (16 - 3) + 1, 2)


@scenario()
def as_a_loop() -> None:
    with logged() as lines:
        loop = accelerator, model, optimizer, _ = prepared()
        with profile_training(model, optimizer, accelerator=accelerator, profile_step=3, timing_steps=5) as profiler:
            losses = train(*loop)
    judge(model, profiler.profile, losses, lines)
