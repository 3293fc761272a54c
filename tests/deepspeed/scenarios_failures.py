"""The profiler itself fails, somewhere: training does not notice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

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


def failures() -> dict[str, Any]:
    return {str(place): fails_at(place) for place in (None, *PLACES)}


SCENARIOS: dict[str, Callable[[], Any]] = {"failures": failures}
