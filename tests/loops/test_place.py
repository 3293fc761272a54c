"""How ranks share the work by the sizes of a mesh, and which of the optimizers given are others' wrappers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops.adapters.place import mesh_sizes, optimizers_in, sizes_along


@pytest.mark.parametrize(
    ("known", "different_data"),
    [
        ({}, 16),
        ({"tp": 2}, 8),
        ({"tp": 2, "pp": 4}, 2),
        ({"ep": 4}, 16),  # ranks with other experts see other data
        ({"tp": 2, "ep": 4}, 8),
        ({"tp": 32}, 1),
    ],
)
def test_ranks_along_all_but_experts_see_the_same_data(known: dict[str, int], different_data: int) -> None:
    sizes = sizes_along(known, world_size=16)
    assert sizes.dp_size == different_data
    assert {name: getattr(sizes, f"{name}_size") for name in known} == known


def test_kinds_of_a_mesh_are_known_by_their_usual_names_and_one_kind_along_two_dimensions_is_their_product() -> None:
    mesh = SimpleNamespace(mesh_dim_names=("replicas", "tensor_parallel", "sp", "ulysses"), shape=(3, 4, 2, 5))
    assert mesh_sizes(mesh) == {"tp": 4, "sp": 10}
    assert mesh_sizes(None) == {}


class Averages:
    """An optimizer of the user's around another one, which it steps twice, as SAM does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.step()


def test_an_optimizer_around_another_one_makes_the_steps_and_not_the_one_inside() -> None:
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    around = Averages(inner)
    assert optimizers_in(around) == (around,)
    assert optimizers_in([around, inner]) == (around, inner)
