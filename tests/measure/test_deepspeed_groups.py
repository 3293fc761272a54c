from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lightning_flops.measure.module_scope import parallel_sizes
from lightning_flops.records import ParallelSizes


def _unit(**sizes: int) -> SimpleNamespace:
    """A model-parallel unit whose method of each name answers the size."""
    return SimpleNamespace(**{name: lambda size=size: size for name, size in sizes.items()})


@pytest.mark.parametrize(
    ("mpu", "expected"),
    [
        (None, ParallelSizes(dp_size=8)),  # without a unit all ranks see different data
        (  # Megatron
            _unit(get_tensor_model_parallel_world_size=2, get_pipeline_model_parallel_world_size=2),
            ParallelSizes(dp_size=2, tp_size=2, pp_size=2),
        ),
        (  # Megatron, with the sequences of each sample on two ranks
            _unit(get_tensor_model_parallel_world_size=2, get_context_parallel_world_size=2),
            ParallelSizes(dp_size=2, tp_size=2, cp_size=2),
        ),
        (  # the grid of a pipeline, whose "model parallel" is stages × slices
            _unit(get_slice_parallel_world_size=2, get_pipe_parallel_world_size=4, get_model_parallel_world_size=8),
            ParallelSizes(dp_size=1, tp_size=2, pp_size=4),
        ),
        (_unit(get_model_parallel_world_size=4), ParallelSizes(dp_size=2, tp_size=4)),  # the oldest name
    ],
)
def test_sizes_are_what_the_unit_says_by_the_name_that_means_it(mpu: Any, expected: ParallelSizes) -> None:
    assert parallel_sizes(SimpleNamespace(mpu=mpu, world_size=8)) == expected
