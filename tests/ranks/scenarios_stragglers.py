"""Training on several ranks, of which the second is slow in one part of its step, and ranks that all keep pace."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_flops import FlopsProfilerCallback
from tests.lightning.nets import new_trainer

SLOW_RANK = 1
SLEEP_SEC_PER_RANK = 0.2
"""The more ranks share the cores, the longer is a healthy rank's step, which computes next to nothing."""
ALIKE_SEC = 0.1
"""Ranks that are no further apart keep pace: on a machine that others use as well, one may wait so long for a core."""
WIDTH = 64
BATCH = 8
STEPS = 24

Part = str


def sleep_if_slow(slow_in: Part, here: Part) -> None:
    if slow_in == here and int(os.environ["RANK"]) == SLOW_RANK:
        time.sleep(SLEEP_SEC_PER_RANK * int(os.environ["WORLD_SIZE"]))


class Samples(IterableDataset[Tensor]):
    """Batches that are read in the training process."""

    def __init__(self, slow_in: Part) -> None:
        self.slow_in = slow_in

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(STEPS):
            sleep_if_slow(self.slow_in, "data")
            yield torch.ones(BATCH, WIDTH)


class Layer(nn.Module):
    """A linear layer that may sleep in its forward, or where its backward begins."""

    def __init__(self, slow_in: Part) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.slow_in = slow_in

    def forward(self, inputs: Tensor) -> Tensor:
        sleep_if_slow(self.slow_in, "forward")
        outputs: Tensor = self.linear(inputs).relu()
        if outputs.requires_grad:
            outputs.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: sleep_if_slow(self.slow_in, "backward")
            )
        return outputs


class Net(LightningModule):
    """Four layers, the third of which may be slow."""

    def __init__(self, slow_in: Part) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(""), Layer(""), Layer(slow_in), Layer(""))
        self.slow_in = slow_in

    def training_step(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(Samples(self.slow_in), batch_size=None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: sleep_if_slow(self.slow_in, "optimizer"))
        return optimizer


def train(slow_in: Part) -> dict[str, Any]:
    limits = {"straggler_sec": ALIKE_SEC}
    callback = FlopsProfilerCallback(profile_step=2, timing_steps=8, advice_thresholds=limits)
    ranks = int(os.environ["WORLD_SIZE"])
    new_trainer("lightning.pytorch", ".", callback, strategy="ddp", devices=ranks).fit(Net(slow_in))
    return {"profile": callback.profile and callback.profile.to_json()}


SCENARIOS = {
    "healthy": partial(train, ""),
    **{f"slow_{part}": partial(train, part) for part in ("data", "forward", "backward", "optimizer")},
}
