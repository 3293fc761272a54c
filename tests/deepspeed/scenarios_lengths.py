"""Runs under DeepSpeed whose batches all have other lengths, or never do, and what each of them spends."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from lightning_flops.deepspeed import attach
from lightning_flops.session.session import Session
from tests.checks import figures, train
from tests.deepspeed.engines import BLOCK, config, engine_of, installed, left_on
from tests.lengths import VOCAB, Encoder, hold_to, sentences, truths

STEPS = 500


def lengths() -> dict[str, Any]:
    sessions: list[Session] = []
    begin = Session.begin

    def keep(session: Session) -> None:
        sessions.append(session)
        begin(session)

    data, model = sentences(STEPS), Encoder()
    block = {**BLOCK, "profile_step": 3, "timing_steps": 12, "monitor": True}
    with (
        patch.object(Session, "begin", keep),
        patch("lightning_flops.session.session.SHARE", 1.0),
        patch("lightning_flops.session.samples._GUESS", 0),
        installed(),
    ):
        engine = engine_of(config(block=block), model)
        for ids in data:
            engine.backward(engine(ids).square().mean())
            engine.step()
        handle = attach(engine)
        handle.detach()
    left = left_on(engine)
    keys = Counter((((tuple(batch.shape),),), 1) for batch in data)

    def step(batches: tuple[Any, ...]) -> None:
        for shapes in batches:
            engine.backward(engine(torch.randint(VOCAB, shapes[0])).square().mean())
            engine.step()

    truth = truths(engine.module, keys, step)
    summary = handle.throughput
    return {
        "left": left,
        "keys": len(keys),
        "known": hold_to(sessions[0], truth),
        "model_flops": None if summary is None else summary.model_flops,
        "counted": 0 if summary is None else summary.steps_counted,
        "truth": sum(
            steps * (truth[key]["forward", "float32"] + truth[key]["backward", "float32"])
            for key, steps in keys.items()
        ),
    }


def checks(keeps: float) -> dict[str, Any]:
    trained, bare = (train("DeepSpeed", Path.cwd(), keeps=keeps, profiled=profiled) for profiled in (True, False))
    same = (trained.losses, trained.weights) == (bare.losses, bare.weights)
    return {**figures(trained.summary), "same": same}


SCENARIOS = {
    "lengths": lengths,
    "confirmed": functools.partial(checks, 1.0),
    "refuted": functools.partial(checks, 0.5),
}
