"""How the ranks share the work, as the names of a device mesh's dimensions say."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_flops.adapters.lightning import run_context


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        ({"data_parallel": 4, "tensor_parallel": 2}, {"dp": 4, "tp": 2}),
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 3, "cp": 2, "tp": 2}, {"dp": 6, "tp": 2, "pp": 2, "cp": 2}),
        ({"data_parallel": 2, "ulysses": 4}, {"dp": 2, "sp": 4}),
        # Ranks with different experts see different data.
        ({"dp_shard": 3, "ep": 4, "tp": 2}, {"dp": 12, "tp": 2, "ep": 4}),
        ({"data_parallel": 2, "expert_parallel": 2}, {"dp": 4, "ep": 2}),
    ],
)
def test_sizes_go_by_the_names_of_the_meshs_dimensions(mesh: dict[str, int], expected: dict[str, int]) -> None:
    shape = SimpleNamespace(mesh_dim_names=tuple(mesh), shape=tuple(mesh.values()))
    strategy = SimpleNamespace(root_device=torch.device("cpu"), device_mesh=shape)
    ranks = {"global_rank": 0, "world_size": math.prod(mesh.values())}
    trainer: Any = SimpleNamespace(strategy=strategy, precision="32-true", accumulate_grad_batches=1, **ranks)
    found = run_context(trainer)
    sizes = {name: getattr(found, f"{name}_size") for name in ("dp", "tp", "pp", "cp", "sp", "ep")}
    assert {name: size for name, size in sizes.items() if size != 1} == expected
