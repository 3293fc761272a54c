"""The profiler itself fails, somewhere: training does not notice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.deepspeed.engines import BLOCK, SAMPLES, config, engine_of, installed, left_on, logged
from tests.deepspeed.places_of_failure import PLACES

STEPS = 10


def fails_at(place: str | None) -> dict[str, Any]:
    """Train with a profiler that is broken at *place*; None: without any."""

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken on purpose")

    rows = torch.randn(STEPS * SAMPLES, 8, generator=torch.Generator().manual_seed(7))
    block = None if place is None else {**BLOCK, "profile_step": 1, "monitor": True}
    breaks = contextlib.nullcontext() if place is None else patch(place, broken)
    losses = []
    with installed(), logged() as lines, breaks:
        engine = engine_of(config(block=block))
        for (batch,) in DataLoader(TensorDataset(rows), batch_size=SAMPLES):
            loss = engine(batch).square().sum()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item().hex())
        left = left_on(engine)
        engine.destroy()
    return {"losses": losses, "logged": lines, "left": left, "left_at_the_end": left_on(engine)}


def failures() -> dict[str, Any]:
    return {str(place): fails_at(place) for place in (None, *PLACES)}


SCENARIOS: dict[str, Callable[[], Any]] = {"failures": failures}
