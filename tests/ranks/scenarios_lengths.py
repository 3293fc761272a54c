"""Two ranks of DistributedDataParallel whose batches have other sizes in every step, and on each rank."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_flops import profile_training
from tests.every_step import SETTINGS, watched_sessions, wrong_steps
from tests.models_by_hand import model_named

STEPS = 150


def lengths(*, all_ranks: bool) -> dict[str, Any]:
    """What a rank knows of its run, and the truth of it."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    kind, numbers = model_named("BERT"), random.Random(dist.get_rank())
    sizes = [kind.sizes(numbers) for _ in range(STEPS)]
    model = DistributedDataParallel(kind.make().train())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        watched_sessions(share=1e6) as sessions,
        profile_training(model, optimizer, all_ranks=all_ranks, log_dir="logs", **SETTINGS) as profiler,
    ):
        for batch in profiler.batches([kind.batch(*one) for one in sizes]):
            model(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    (watched,) = sessions
    assert profiler.throughput is not None
    spent = [kind.spent(*one) for one in sizes]
    return {
        "throughput": profiler.throughput.to_json(),
        "model_flops": sum(one.model for one in spent),
        "wrong": wrong_steps(watched, spent),
        "outside": watched.session.flops.samples.taken,
    }


SCENARIOS: dict[str, Callable[[], dict[str, Any]]] = {
    "rank_0_counts": partial(lengths, all_ranks=False),
    "all_ranks_count": partial(lengths, all_ranks=True),
}
