"""Every ZeRO stage, with and without accumulation: the same losses with and without us, and exact FLOPs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import deepspeed
import torch

from tests.deepspeed.engines import Net, batches, config, counted_plainly, engine_of, installed, outcome, train, weights

STEPS = 10


def zero(stage: int, accumulate: int) -> dict[str, Any]:
    settings = config(stage=stage, accumulate=accumulate)
    # The traced step is part of what training must not notice; one of the two has it.
    more = {"trace": accumulate == 1, "monitor": True}
    with_block = {**settings, "flops_profiler": {**settings["flops_profiler"], **more}}
    plain = engine_of(config(stage=stage, accumulate=accumulate, block=None))
    plain_losses = train(plain, STEPS * accumulate)
    plain_weights = weights(plain)
    plain.destroy()
    with installed():
        engine = engine_of(with_block)
        losses = train(engine, STEPS * accumulate)
    trained = weights(engine)
    result = outcome(
        engine,
        same_losses=losses == plain_losses,
        same_weights=trained == plain_weights,
        losses=len(set(losses)),
        builtin=hasattr(engine, "flops_profiler") or engine.wall_clock_breakdown(),
        plainly=counted_plainly(Net(), batches(1)[0]),
        random_state=torch.get_rng_state().sum().item(),
    )
    engine.destroy()
    return result


def low_precision(kind: str, stage: int) -> dict[str, Any]:
    with installed():
        engine = engine_of({**config(stage=stage), kind: {"enabled": True}})
        train(engine, STEPS)
        return outcome(engine, dtype=str(next(engine.module.parameters()).dtype))


def offload(stage: int) -> dict[str, Any]:
    settings = config(stage=stage, accumulate=2, zero_force_ds_cpu_optimizer=False)
    settings["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:
        settings["zero_optimization"]["offload_param"] = {"device": "cpu"}
    with installed():
        engine = engine_of(settings)
        train(engine, STEPS * 2)
        return outcome(engine)


def made_sharded() -> dict[str, Any]:
    """The model is made inside ``zero.Init``, so that no rank ever holds it whole."""
    settings = config(stage=3)
    with installed():
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = Net()
        engine = engine_of(settings, model)
        train(engine, STEPS)
        return outcome(engine)


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    **{
        f"zero_{stage}_accumulate_{accumulate}": functools.partial(zero, stage, accumulate)
        for stage in range(4)
        for accumulate in (1, 4)
    },
    **{f"bf16_{stage}": functools.partial(low_precision, "bf16", stage) for stage in (0, 1, 3)},
    **{f"offload_{stage}": functools.partial(offload, stage) for stage in (2, 3)},
    "made_sharded": made_sharded,
}
