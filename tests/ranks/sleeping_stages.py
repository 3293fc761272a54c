"""``python -m tests.ranks.sleeping_stages``: one rank of a pipeline whose stages sleep; prints the share it waited."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import torch
from torch import distributed as torch_distributed, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

distributed: Any = torch_distributed  # which does not say what of it is public
FORWARD_SEC, BACKWARD_SEC, MICROBATCHES = 0.1, 0.2, 4


class Sleep(torch.autograd.Function):
    slept = 0.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        Sleep.sleep(FORWARD_SEC)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        Sleep.sleep(BACKWARD_SEC)
        return gradients[0]

    @classmethod
    def sleep(cls, seconds: float) -> None:
        before = time.perf_counter()
        time.sleep(seconds)
        cls.slept += time.perf_counter() - before


class Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return Sleep.apply(self.layer(x))  # type: ignore[no-untyped-call]


def waited(kind: Any, rank: int) -> float:
    """The share of a step, the second, in which this rank did not sleep."""
    stage = PipelineStage(Stage(), rank, 2, torch.device("cpu"))
    schedule = kind(stage, MICROBATCHES, loss_fn=lambda out, target: (out - target).square().sum())
    share = 0.0
    for _ in range(2):
        distributed.barrier()
        began, Sleep.slept = time.perf_counter(), 0.0
        x = torch.randn(MICROBATCHES, 4)
        schedule.step(*[x][: rank == 0], target=x if rank == 1 else None)
        distributed.barrier()
        share = 1 - Sleep.slept / (time.perf_counter() - began)
    return share


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    place = int(os.environ["RANK"])
    answer = {kind.__name__: waited(kind, place) for kind in (ScheduleGPipe, Schedule1F1B)}
    distributed.destroy_process_group()
    sys.stdout.write(f"\n{json.dumps(answer)}\n")
