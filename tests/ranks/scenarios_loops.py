"""Two ranks in loops that are written by hand: with torch alone, under accelerate, under Fabric."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from lightning.fabric.loggers.tensorboard import TensorBoardLogger
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops import profile_training
from lightning_flops.run import delivery

BATCH, WIDE, MIDDLE, NARROW, STEPS = 4, 6, 8, 2, 8

SETTINGS: dict[str, Any] = {"profile_step": 1, "timing_steps": 2, "trace": False, "ranks_timeout_sec": 60.0}


def net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDE, MIDDLE), nn.ReLU(), nn.Linear(MIDDLE, NARROW))


def loader(batches: int) -> DataLoader[Any]:
    rows = torch.randn(batches * BATCH, WIDE, generator=torch.Generator().manual_seed(dist_rank()))
    return DataLoader(TensorDataset(rows), batch_size=BATCH)


def dist_rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def told(profiler: Any, model: nn.Module) -> dict[str, Any]:
    """What a test wants to know of a loop that was profiled, or was not."""
    weights = [weight.detach().tolist() for weight in model.parameters()]
    return {"profile": profiler and profiler.profile and profiler.profile.to_json(), "weights": weights}


def twice(run: Callable[[bool], dict[str, Any]]) -> dict[str, Any]:
    """*run* without and with the profiler, and whether the weights came out the same."""
    plain, profiled = run(False), run(True)
    return {**profiled, "same": plain["weights"] == profiled["weights"]}


def with_torch(profiled: bool) -> dict[str, Any]:
    if not dist.is_initialized():  # one group for all scenarios
        dist.init_process_group("gloo")
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with profile_training(model, optimizer, log_dir="logs", **SETTINGS) if profiled else nullcontext() as profiler:
        for (rows,) in loader(STEPS):
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return told(profiler, model)


def with_accelerate(profiled: bool) -> dict[str, Any]:
    driver = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, data = driver.prepare(model, optimizer, loader(2 * 3 * STEPS))
    with profile_training(model, optimizer, accelerator=driver, **SETTINGS) if profiled else nullcontext() as profiler:
        for (rows,) in data:
            with driver.accumulate(model):
                driver.backward(model(rows).square().mean())
                optimizer.step()
                optimizer.zero_grad()
    AcceleratorState._reset_state()  # accelerator.end_training() would end the process group, too
    return told(profiler, model)


def with_fabric(profiled: bool) -> dict[str, Any]:
    logger = TensorBoardLogger("board", name=str(profiled))
    fabric = Fabric(accelerator="cpu", strategy="ddp", devices=2, loggers=[logger])
    fabric.launch()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = fabric.setup(model, optimizer)
    data = fabric.setup_dataloaders(loader(2 * 3 * STEPS))
    with profile_training(model, optimizer, fabric=fabric, **SETTINGS) if profiled else nullcontext() as profiler:
        for place, (rows,) in enumerate(data):
            accumulating = place % 3 < 2
            with fabric.no_backward_sync(model, enabled=accumulating):
                fabric.backward(model(rows).square().mean())
            if not accumulating:
                optimizer.step()
                optimizer.zero_grad()
    events = sum(b"flops_profiler/profile" in path.read_bytes() for path in Path("board").rglob("events*"))
    return {**told(profiler, model), "events": events}


BY_THEN = 60


def two_windows() -> dict[str, Any]:
    """Rank 1 makes the report of its first window when it has made ``BY_THEN`` steps."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    analyze, has_gone_by = delivery.profile_of_window, threading.Event()

    def slowly(*args: Any, **kwargs: Any) -> Any:
        if dist_rank() == 1:
            has_gone_by.wait(60)
        return analyze(*args, **kwargs)

    settings = {**SETTINGS, "profile_step": [1, 12], "timing_steps": 4, "lines": False}
    slow = mock.patch.object(delivery, "profile_of_window", slowly)
    with slow, profile_training(model, optimizer, log_dir="windows", **settings) as profiler:
        for step, (rows,) in enumerate(loader(400)):
            if step == BY_THEN:
                has_gone_by.set()
            time.sleep(0.003)
            model(rows).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    profiles = profiler.profiles
    ranks = [one.ranks and [rank.rank for rank in one.ranks.ranks] for one in profiles]
    return {"timed": [one.timed_steps for one in profiles], "ranks": ranks}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "ddp": partial(twice, with_torch),
    "accelerate": partial(twice, with_accelerate),
    "fabric": partial(twice, with_fabric),
    "two_windows": two_windows,
}
