"""Traced steps in which real ranks communicate over gloo: DDP and DeepSpeed."""

from __future__ import annotations

import os
from typing import Any

import deepspeed
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_flops import FlopsProfilerCallback
from lightning_flops.deepspeed import attach
from tests.deepspeed.engines import config, engine_of
from tests.lightning.nets import new_trainer

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled first, for minutes

WIDTH = 64
LAYERS = 3
BATCH = 8
STEPS = 12
PARAMS = LAYERS * (WIDTH * WIDTH + WIDTH)

ONE_STEP = {"active": 1}
SETTINGS: dict[str, Any] = {"profile_step": 2, "timing_steps": 2, "record_shapes": True, "trace_schedule": ONE_STEP}


def layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


class Net(LightningModule):
    """Three linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers()

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader([torch.ones(WIDTH) for _ in range(STEPS * BATCH * 2)], batch_size=BATCH)  # type: ignore[arg-type]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def ddp() -> dict[str, Any]:
    callback = FlopsProfilerCallback(**SETTINGS)
    ranks = int(os.environ["WORLD_SIZE"])
    new_trainer("lightning.pytorch", ".", callback, strategy="ddp", devices=ranks, max_steps=STEPS).fit(Net())
    return {"profile": callback.profile and callback.profile.to_json()}


def zero_3() -> dict[str, Any]:
    torch.manual_seed(1)
    model = layers()
    block = {"enabled": True, "monitor": False, **SETTINGS}
    engine = engine_of(config(stage=3, block=block, train_micro_batch_size_per_gpu=BATCH), model)
    handle = attach(engine)
    for _ in range(STEPS):
        loss = engine(torch.ones(BATCH, WIDTH)).square().mean()
        engine.backward(loss)
        engine.step()
    handle.detach()
    engine.destroy()
    return {"profile": handle.profile and handle.profile.to_json()}


SCENARIOS = {"ddp": ddp, "zero_3": zero_3}
