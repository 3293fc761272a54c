"""How the ranks share the work, as the names of a device mesh's dimensions say."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lightning_flops.adapters.lightning import run_context
from lightning_flops.records import RunContext


def context_of(mesh: dict[str, int]) -> RunContext:
    """Of a Trainer whose strategy has a mesh of these dimensions."""
    strategy = SimpleNamespace(
        root_device=torch.device("cpu"),
        device_mesh=SimpleNamespace(mesh_dim_names=tuple(mesh), shape=tuple(mesh.values())),
    )
    trainer = SimpleNamespace(
        strategy=strategy,
        precision="32-true",
        global_rank=0,
        world_size=math.prod(mesh.values()),
        accumulate_grad_batches=1,
    )
    return run_context(cast(Any, trainer))


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"data_parallel": 4, "tensor_parallel": 2}, {"dp": 4, "tp": 2}),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}, {"pp": 2, "dp": 6, "cp": 2, "tp": 2}),
        ({"data_parallel": 2, "ulysses": 4}, {"dp": 2, "sp": 4}),
        # Ranks with different experts see different data.
        ({"dp_shard": 3, "ep": 4, "tp": 2}, {"dp": 12, "tp": 2, "ep": 4}),
        ({"data_parallel": 2, "expert_parallel": 2}, {"dp": 4, "ep": 2}),
    ],
)
def test_sizes_are_told_by_the_names_of_the_meshs_dimensions(mesh: dict[str, int], expected: dict[str, int]) -> None:
    found = context_of(mesh)
    sizes = {
        "dp": found.dp_size,
        "tp": found.tp_size,
        "pp": found.pp_size,
        "cp": found.cp_size,
        "sp": found.sp_size,
        "ep": found.ep_size,
    }
    assert {name: size for name, size in sizes.items() if size != 1} == expected
