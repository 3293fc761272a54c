"""A pipeline of two stages whose batches have other numbers of rows in every step, or the same in all."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import lightning_flops.deepspeed
from lightning_flops import ProfilerConfig
from tests.deepspeed.scenarios_pipeline import IN, MICRO_STEPS, OUT, engine_of, net, own_names

STEPS = 80


def rows_of_steps() -> list[int]:
    """Rows of each micro-batch, the same within a step; more after a while."""
    numbers = random.Random(1)
    return [numbers.randint(2, 25 if step < 25 else 50) for step in range(STEPS)]


def trained(rows_of_steps: list[int], *, evaluates_after: int | None = None) -> dict[str, Any]:
    """Trains, and says what its stage knows of the whole run, and how many modes of torch an evaluation ran under."""
    engine = engine_of(net(2, dynamic_shape=True))
    before = own_names(engine)
    settings: dict[str, Any] = {"profile_step": 1, "timing_steps": 8, "trace": False}

    def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for rows in rows_of_steps:
            for _ in range(MICRO_STEPS):
                yield torch.randn(rows, IN), torch.randn(rows, OUT)

    def evaluate() -> None:
        layer = next(one for one in engine.module.modules() if isinstance(one, nn.Linear))
        hook = layer.register_forward_pre_hook(lambda *_: modes.append(torch._C._len_torch_dispatch_stack()))
        engine.eval_batch(batches())
        hook.remove()

    modes: list[int] = []
    data, losses = batches(), []
    with (
        patch("lightning_flops.run.run.SHARE", 1.0),
        patch("lightning_flops.session.samples._GUESS", 0),
    ):
        handle = lightning_flops.deepspeed.attach(engine, ProfilerConfig(**settings))
        for done in range(1, len(rows_of_steps) + 1):
            losses.append(float(engine.train_batch(data)))
            if done == evaluates_after:
                evaluate()
        handle.detach()
    assert handle.throughput is not None and handle.profile is not None
    return {
        "profile": handle.profile.to_json(),
        "throughput": handle.throughput.to_json(),
        "left": own_names(engine) == before,
        "losses": losses,
        "modes": sorted(set(modes)),
    }


SCENARIOS = {
    "varying": lambda: trained(rows_of_steps()),
    "constant": lambda: trained([4] * 108, evaluates_after=104),  # where the first check is due
}
