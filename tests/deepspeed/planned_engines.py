"""``python -m tests.deepspeed.planned_engines``: what a rank of an engine of each ZeRO stage does in a step.

With ``plan``: what is said of each if it is to be planned.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import deepspeed
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_flops import LightningFlopsError, plan_job
from tests.ranks.planned_jobs import BATCH, WIDTH, Net, Seen, adamw


def engine(mesh: Any, stage: int) -> Any:
    net = Net()
    settings = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    made = deepspeed.initialize(model=net, optimizer=adamw(net), config=settings)[0]
    return made, torch.randn(BATCH, WIDTH)


def refusal(stage: int) -> str:
    try:
        return str(plan_job(lambda mesh: engine(mesh, stage), {"dp": 2}))
    except LightningFlopsError as error:
        return str(error)


def account(stage: int) -> dict[str, Any]:
    made, batch = engine(None, stage)

    def step() -> None:
        made.backward(made(batch).sum())
        made.step()

    step()
    step()
    seen, counter = Seen(), FlopCounterMode(display=False)
    with counter, seen:
        step()
    local = sum(getattr(one, "ds_tensor", one).numel() for one in made.module.parameters())
    made.destroy()
    return {"flops": counter.get_total_flops(), "local_params": local, "bytes": dict(seen.bytes)}


if __name__ == "__main__":
    asked: Any = refusal if sys.argv[1:] else account
    if asked is account:
        deepspeed.init_distributed("gloo")
    answer = [asked(stage) for stage in range(4)]
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
