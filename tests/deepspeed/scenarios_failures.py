"""The profiler itself fails, somewhere: training does not notice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops.config import ProfilerConfig
from lightning_flops.deepspeed import attach
from lightning_flops.adapters.deepspeed_context import LOST
from lightning_flops.run import private_names
from tests.deepspeed.engines import BLOCK, SAMPLES, config, engine_of, installed, left_on, logged
from tests.deepspeed.places_of_failure import PLACES
from tests.session.seams import broken_at

STEPS = 10


def fails_at(place: str | None) -> dict[str, Any]:
    """Train with a profiler that is broken at *place*; None: without any."""

    rows = torch.randn(STEPS * SAMPLES, 8, generator=torch.Generator().manual_seed(7))
    block = None if place is None else {**BLOCK, "profile_step": 1, "monitor": True}
    breaks: Any = contextlib.nullcontext() if place is None else broken_at(place, RuntimeError("broken on purpose"))
    losses = []
    with installed(), logged() as lines, breaks as broken:
        engine = engine_of(config(block=block))
        for (batch,) in DataLoader(TensorDataset(rows), batch_size=SAMPLES):
            loss = engine(batch).square().sum()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
        left, in_training = left_on(engine), list(lines)
        engine.destroy()
    called = broken is not None and broken.called
    return {
        "losses": losses,
        "called": called,
        "logged": lines,
        "logged_in_training": in_training,
        "left": left,
        "left_at_the_end": left_on(engine),
    }


def failures(places: Sequence[str] = PLACES) -> dict[str, Any]:
    return {str(place): fails_at(place) for place in (None, *places)}


def without(name: str | None) -> dict[str, Any]:
    """Train with a DeepSpeed that keeps no *name*, as far as the profiler can see: DeepSpeed itself needs it."""
    exists = private_names.exists
    rows = torch.randn(STEPS * SAMPLES, 8, generator=torch.Generator().manual_seed(7))
    hidden = patch.object(private_names, "exists", lambda owner, asked: asked != name and exists(owner, asked))
    losses = []
    with hidden, logged():
        engine = engine_of(config(block=None, stage=1))
        settings = ProfilerConfig(profile_step=1, timing_steps=2, trace=False)
        # A config is asked for its block only where no other settings are given.
        handle = None if name is None else attach(engine, None if name in ("_config", "_param_dict") else settings)
        for (batch,) in DataLoader(TensorDataset(rows), batch_size=SAMPLES):
            loss = engine(batch).square().sum()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
        engine.destroy()
    notes = () if handle is None or handle.profile is None else handle.profile.notes
    return {"losses": losses, "notes": notes, "left": left_on(engine)}


def missing_names() -> dict[str, Any]:
    return {str(name): without(name) for name in (None, *LOST)}


SCENARIOS: dict[str, Callable[[], Any]] = {"failures": failures, "missing_names": missing_names}
