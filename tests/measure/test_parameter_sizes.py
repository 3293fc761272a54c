from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lightning_flops.measure.module_scope import describe_modules
from lightning_flops.measure.parameter_sizes import held


def _parameter(*shape: int, **marks: Any) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(shape))
    for name, value in marks.items():
        setattr(parameter, name, value)
    return parameter


def _sizes(parameter: nn.Parameter) -> tuple[int, bool, int]:
    return held(parameter)[1:4]


@pytest.fixture
def two_tensor_parallel_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What DeepSpeed keeps once an engine was given a model-parallel unit of two ranks."""
    groups: Any = ModuleType("deepspeed.utils.groups")
    groups.mpu = SimpleNamespace(get_tensor_model_parallel_world_size=lambda: 2)
    monkeypatch.setitem(sys.modules, "deepspeed.utils.groups", groups)


def test_an_experts_parameter_counts_once_for_each_rank_that_has_other_experts() -> None:
    assert _sizes(_parameter(3, 4, allreduce=False, group_name="ep_size_8")) == (12 * 8, True, 12)


@pytest.mark.parametrize("marks", [{"allreduce": True, "group_name": "ep_size_8"}, {"allreduce": False}, {}])
def test_a_parameter_that_is_not_marked_as_an_experts_counts_once(marks: dict[str, Any]) -> None:
    assert _sizes(_parameter(3, 4, **marks)) == (12, True, 12)


@pytest.mark.usefixtures("two_tensor_parallel_ranks")
def test_a_tensor_parallel_shard_counts_once_for_each_rank_and_a_replica_once_in_all() -> None:
    assert _sizes(_parameter(3, 4, tensor_model_parallel=True)) == (24, True, 12)
    assert _sizes(_parameter(3, 4, tensor_model_parallel=False)) == (12, True, 12)


@pytest.mark.usefixtures("two_tensor_parallel_ranks")
def test_an_uneven_shard_counts_with_the_whole_shape_that_deepspeed_kept() -> None:
    meta = {"logical_shape": (5, 4)}  # this rank has 3 of its 5 rows
    shard = _parameter(3, 4, tensor_model_parallel=True, ds_autotp_universal_checkpoint_meta=meta)
    assert _sizes(shard) == (20, True, 12)


def test_a_later_stages_copy_of_a_tied_weight_is_held_and_not_counted_again() -> None:
    assert _sizes(_parameter(3, 4, ds_pipe_replicated=True)) == (0, True, 12)
    assert _sizes(_parameter(3, 4, ds_pipe_replicated=False)) == (12, True, 12)


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
