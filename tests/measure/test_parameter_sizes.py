from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops.measure.module_scope import describe_modules, held


@pytest.mark.parametrize(
    ("marks", "size"),
    [
        ({}, 12),
        ({"allreduce": False, "group_name": "ep_size_8"}, 12 * 8),  # an expert's, once for each rank with other experts
        ({"allreduce": True, "group_name": "ep_size_8"}, 12),
        ({"allreduce": False}, 12),
        ({"tensor_model_parallel": True}, 24),  # a shard on each of two ranks
        ({"tensor_model_parallel": False}, 12),  # a replica
        # This rank has 3 of the 5 rows that DeepSpeed has cut.
        ({"tensor_model_parallel": True, "ds_autotp_universal_checkpoint_meta": {"logical_shape": (5, 4)}}, 20),
        ({"ds_pipe_replicated": True}, 0),  # a later stage's copy of a tied weight
        ({"ds_pipe_replicated": False}, 12),
    ],
)
def test_a_parameter_counts_once_for_each_rank_that_has_another_part_of_it(
    marks: dict[str, Any], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: Any = ModuleType("deepspeed.utils.groups")
    groups.mpu = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", groups)
    parameter = nn.Parameter(torch.zeros(3, 4))
    vars(parameter).update(marks)
    found = held(parameter)
    assert (found.shape, found.size, found.trainable, found.local) == ((3, 4), size, True, 12)


def _fsdp_around(module: nn.Module, flat: Any) -> Any:
    """What torch's FullyShardedDataParallel would be around *module*."""
    kind = type("FullyShardedDataParallel", (nn.Module,), {})
    kind.__module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"
    wrapper: Any = kind()
    wrapper._fsdp_wrapped_module = module
    wrapper._handle = SimpleNamespace(flat_param=flat)
    return wrapper


def _flat(linear: nn.Linear, *, in_shard: tuple[int, int | None], shared: tuple[Any, ...] = ()) -> Any:
    """A flat parameter made of *linear*'s two, of which this rank has so many elements."""
    return SimpleNamespace(
        dtype=torch.bfloat16,
        _params=[linear.weight, linear.bias],
        _param_infos=[SimpleNamespace(module=linear, param_name=name) for name in ("weight", "bias")],
        _shapes=[torch.Size((3, 4)), torch.Size((3,))],
        _shard_param_infos=[SimpleNamespace(numel_in_shard=number) for number in in_shard],
        _shared_param_infos=shared,
    )


def _emptied(linear: nn.Linear) -> nn.Linear:
    for parameter in linear.parameters():
        parameter.data = torch.empty(0)
    return linear


def test_what_fsdp_put_into_a_flat_parameter_counts_with_its_full_size() -> None:
    linear = _emptied(nn.Linear(4, 3))
    linear.bias.requires_grad_(False)
    wrapper = _fsdp_around(linear, _flat(linear, in_shard=(7, None)))
    (record,) = describe_modules(linear, whole=wrapper)
    assert (record.params, record.trainable_params, record.local_params, record.weight_sizes) == (15, 12, 7, (3, 4))
    assert record.parameter_bytes == {"bfloat16": 15 * 2}


def test_what_two_modules_share_of_a_flat_parameter_counts_once() -> None:
    model = nn.ModuleDict({"one": _emptied(nn.Linear(4, 3)), "other": _emptied(nn.Linear(4, 3, bias=False))})
    one, other = model["one"], model["other"]
    assert isinstance(one, nn.Linear)
    other.weight = one.weight
    shared = SimpleNamespace(module=other, param_name="weight", prim_module=one, prim_param_name="weight")
    wrapper = _fsdp_around(model, _flat(one, in_shard=(12, 1), shared=(shared,)))
    records = {record.name: record for record in describe_modules(model, whole=wrapper)}
    assert {name: (record.params, record.local_params) for name, record in records.items()} == {
        "": (15, 13),
        "one": (15, 13),
        "other": (12, 12),
    }


def test_a_flat_parameter_that_cannot_be_read_is_named_and_its_shard_counted() -> None:
    linear, notes = nn.Linear(4, 3), list[str]()
    (record,) = describe_modules(linear, whole=_fsdp_around(linear, object()), note=notes.append)
    assert record.params == 15
    (note,) = notes
    assert note.startswith("Parameters are those of this rank's shards: what FullyShardedDataParallel made them of")
