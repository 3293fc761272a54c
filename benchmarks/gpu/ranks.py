"""Part 7: NCCL with one rank, and with two where there are two devices; on a CPU the same with gloo."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_flops import Profile

from .checks import Check, Here, Row, exactly, holds, not_here, reported
from .nets import FIRST_STEP, SETTLES, Net, fit, layers, profiler

_STEPS = FIRST_STEP + 1 + SETTLES + 2 + 2 + 2
WIDTH, LAYERS, BATCH = 256, 2, 32

BY_HAND = 2 * BATCH * WIDTH**2 * (LAYERS + 2 * LAYERS - 1)
"""Forward: a product a layer; backward: two, but the first layer's, whose input needs no gradient, has one."""


def train(here: Here, *, devices: int) -> dict[str, Any]:
    """A fit with DDP on this rank, and what its profile says, as JSON has it."""
    torch.manual_seed(0)
    batches = [torch.randn(BATCH, WIDTH, device=here.device)] * (_STEPS * devices)  # Lightning deals them out
    callback = profiler(here, timing_steps=2, trace=True)
    done = fit(here, Net(layers(here, WIDTH, LAYERS)), batches, callback, strategy="ddp", devices=devices)
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
    profile = None if callback.profile is None else callback.profile.to_json()  # rank 0 has that of all
    return {"backend": backend, "log": done.log, "profile": profile}


@record  # so that what a rank raises is in the words of the launcher's error
def train_two(here: Here, output: Path) -> None:
    """One of two ranks; rank 0 writes what its profile says."""
    if here.on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found = train(here, devices=2)
    if int(os.environ["RANK"]) == 0:
        output.write_text(json.dumps(found))


def _two_ranks(here: Here) -> Iterator[Row]:
    if here.on_gpu and torch.cuda.device_count() < 2:
        yield not_here("two ranks", "there is one device")
        return
    output = here.folder / "two_ranks.json"
    _launched(here, output)
    profile = yield from _seen(here, json.loads(output.read_text()), ranks=2)
    yield exactly("two ranks: ranks that did not answer", profile.ranks and dict(profile.ranks.absences), {})
    tables = profile.traced and profile.traced.tables
    collectives, overlap = (tables.collectives or (), tables.overlap) if tables else ((), None)
    yield holds(
        "two ranks: collectives in the trace, and how far computation hides them",
        bool(collectives) and overlap is not None,
        f"{[row.name for row in collectives]}, overlap {overlap}",
    )


def _launched(here: Here, output: Path) -> None:
    """What torchrun does. On a CPU with forks of this process, which has imported everything and has computed nothing.

    CUDA cannot be used in a fork of a process that has used it.
    """
    meeting: dict[str, Any] = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": uuid.uuid4().hex}
    how: dict[str, Any] = {"start_method": "spawn" if here.on_gpu else "fork", "max_restarts": 0, **meeting}
    elastic_launch(LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, **how), train_two)(here, output)


def _seen(here: Here, found: dict[str, Any], *, ranks: int) -> Generator[Row, None, Profile]:
    words = "one rank" if ranks == 1 else "two ranks"
    yield exactly(f"{words}: the process group's backend", found["backend"], "nccl" if here.on_gpu else "gloo")
    if found["profile"] is None:
        raise RuntimeError(f"no profile; the profiler warned: {found['log']}")
    profile = Profile.from_json(found["profile"])
    yield exactly(f"{words}: what the profiler warned of", found["log"], [])
    yield exactly(f"{words}: world size", profile.context.world_size, ranks)
    yield exactly(f"{words}: model FLOPs of a step of a rank", profile.flops.model, BY_HAND)
    tables = profile.traced and profile.traced.tables
    yield holds(f"{words}: a step is traced", tables is not None, "; ".join(profile.notes) or "yes")
    if tables is not None:
        seen = [f"{row.name} × {row.calls}" for row in tables.collectives or ()]
        yield reported(f"{words}: collectives in the trace", seen)
    return profile


CHECKS = (
    Check("two ranks", _two_ranks),  # first: a process that has trained is not to be forked
    Check("one rank", lambda here: _seen(here, train(here, devices=1), ranks=1)),
)
