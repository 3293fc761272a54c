"""The profiler itself fails, somewhere: training does not notice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops.adapters import deepspeed_context as private_names
from lightning_flops.adapters.deepspeed_context import LOST
from lightning_flops.adapters.deepspeed_engine import EngineRun
from lightning_flops.config import ProfilerConfig
from lightning_flops.deepspeed import attach
from lightning_flops.run.run import Run
from tests.deepspeed.engines import BLOCK, SAMPLES, config, engine_of, installed, left_on, logged
from tests.deepspeed.places_of_failure import PLACES

STEPS = 10
OWNERS = {"EngineRun": EngineRun, "Run": Run}


def trained(engine: Any) -> list[str]:
    rows = torch.randn(STEPS * SAMPLES, 8, generator=torch.Generator().manual_seed(7))
    losses = []
    for (batch,) in DataLoader(TensorDataset(rows), batch_size=SAMPLES):
        loss = engine(batch).square().sum()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item().hex())
    engine.destroy()
    return losses


def fails_at(place: str | None) -> dict[str, Any]:
    """Train with a profiler whose method *place* raises; None: without any."""
    block = None if place is None else {**BLOCK, "profile_step": 1, "monitor": True}
    broken: Any = contextlib.nullcontext()
    if place is not None:
        owner, _, name = place.partition(".")
        broken = patch.object(OWNERS[owner], name, side_effect=RuntimeError("broken on purpose"))
    with installed(), logged() as lines, broken as raises:
        engine = engine_of({**config(block=block), "steps_per_print": 4})
        losses = trained(engine)
    return {
        "losses": losses,
        "called": raises is not None and raises.called,
        "logged": lines,
        "left": left_on(engine),
    }


def failures() -> dict[str, Any]:
    return {str(place): fails_at(place) for place in (None, *PLACES)}


def without(name: str | None) -> dict[str, Any]:
    """Train with a DeepSpeed that keeps no *name*, as far as the profiler can see: DeepSpeed itself needs it."""
    exists = private_names.exists
    hidden = patch.object(private_names, "exists", lambda owner, asked: asked != name and exists(owner, asked))
    with hidden, logged():
        engine = engine_of(config(block=None, stage=1))
        settings = ProfilerConfig(profile_step=1, timing_steps=2, trace=False)
        handle = None if name is None else attach(engine, settings)
        losses = trained(engine)
    notes = () if handle is None or handle.profile is None else handle.profile.notes
    return {"losses": losses, "notes": notes, "left": left_on(engine)}


def missing_names() -> dict[str, Any]:
    return {str(name): without(name) for name in (None, *LOST)}


SCENARIOS: dict[str, Callable[[], Any]] = {"failures": failures, "missing_names": missing_names}
