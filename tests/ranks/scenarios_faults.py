"""Lightning on two ranks where something is not as it should be on rank 1, or on both, and training must not notice."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Callback
from torch import distributed as torch_distributed

from lightning_flops import FlopsProfilerCallback
from tests.lightning.nets import footprint, loader, new_net, new_trainer
from tests.listening import listening

ROOT = "lightning.pytorch"
RANK = int(os.environ.get("RANK", "0"))
BATCHES = 16
SEC_FOR_ANSWERS = 10.0
"""Less than rank 0 waits for a rank that does not answer."""
WINDOW: dict[str, Any] = {"profile_step": 1, "timing_steps": 2, "trace": False}

distributed: Any = torch_distributed  # which does not say what of it is public


def train(*callbacks: Any, **settings: Any) -> dict[str, Any]:
    """What a fit of all ranks is like: its losses and weights, its collectives, and what it leaves behind."""
    net = new_net(ROOT)
    settings = {"strategy": "ddp", "devices": int(os.environ["WORLD_SIZE"]), **settings}
    run = new_trainer(ROOT, str(Path.cwd()), *callbacks, **settings)
    torch.manual_seed(5)
    with listening("lightning_flops", level=logging.WARNING) as lines:
        run.fit(net, loader(2 * BATCHES))
    return {
        "losses": [loss.hex() for loss in net.losses],
        "weights": [weight.hex() for parameter in net.parameters() for weight in parameter.flatten().tolist()],
        "random": float(torch.rand(1)).hex(),
        "footprint": repr(footprint(run, net)),
        "collectives": distributed.group.WORLD._get_sequence_number_for_group(),
        "ours": our_keys(),
        "logged": lines,
    }


def profiled(*, callback: FlopsProfilerCallback | None = None, **settings: Any) -> dict[str, Any]:
    """The same with the profiler, and its profile."""
    callback = callback or FlopsProfilerCallback(**WINDOW)
    before = distributed.group.WORLD._get_sequence_number_for_group()
    result = train(callback, WaitsForAnswers(), **settings)
    result["collectives"] -= before
    # A collective of the test's own: the group still works.
    total = torch.tensor([RANK + 1])
    distributed.all_reduce(total)
    return {**result, "sum": total.item(), "profile": callback.profile and callback.profile.to_json()}


def our_keys() -> list[str]:
    """What of ours is in the store once every rank is here."""
    store = distributed.distributed_c10d._get_default_store()
    distributed.barrier()
    deadline = time.monotonic() + 20.0
    while ours := [key for key in store.list_keys() if "lightning_flops" in key]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    distributed.barrier()
    return ours


class WaitsForAnswers(Callback):
    """Has rank 0 wait before its last batches, for a while at most, until what rank 1 sent is in the store or read."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if RANK == 0 and batch_idx == BATCHES - 4:
            store = distributed.distributed_c10d._get_default_store()
            (callback,) = (one for one in trainer.callbacks if isinstance(one, FlopsProfilerCallback))
            deadline = time.monotonic() + SEC_FOR_ANSWERS
            while time.monotonic() < deadline and (callback.profile is None or callback.profile.ranks is None):
                if any(OF_RANK_1.fullmatch(key) for key in store.list_keys()):
                    break
                time.sleep(0.001)


OF_RANK_1 = re.compile(r"lightning_flops/.*/1")


def plain() -> dict[str, Any]:
    """Without a profiler, twice: the first fit makes the process group."""
    train()
    before = distributed.group.WORLD._get_sequence_number_for_group()
    result = train()
    result["collectives"] -= before
    return result


def profiler_fails() -> dict[str, Any]:
    fails = mock.patch("lightning_flops.run.delivery.profile_of_window", side_effect=RuntimeError("broken on purpose"))
    with fails if RANK == 1 else contextlib.nullcontext():
        return profiled()


def files_of(folder: str, **settings: Any) -> dict[str, Any]:
    """A fit of which each rank logs into *folder*, and the files that are there afterwards."""
    shared = Path("..", folder).resolve()
    traced = {**WINDOW, "trace": True, "trace_dir": shared / "traces"}
    callback = FlopsProfilerCallback(**traced, **settings)
    result = profiled(callback=callback, default_root_dir=str(shared / f"logs{RANK}"))
    distributed.barrier()
    return {**result, "files": sorted(str(path.relative_to(shared)) for path in shared.rglob("*") if path.is_file())}


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "plain": plain,
    "healthy": profiled,
    "profiler_fails": profiler_fails,
    "all_ranks": lambda: files_of("shared", all_ranks=True, output_file=Path("..", "shared", "flops.txt").resolve()),
    "rank_0_alone_writes": lambda: files_of("shared2"),
}
