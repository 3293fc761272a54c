"""Names and sizes of a model's modules."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from lightning_flops.measure.module_scope import describe_modules, named_modules


def names_of(root: nn.Module) -> list[str]:
    return [record.name for record in describe_modules(root)]


def test_wrappers_leave_their_prefix_out_and_the_wrapped_modules_type_in() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), checkpoint_wrapper(nn.Linear(3, 4)))
    compiled: Any = torch.compile(inner, backend="eager")
    records = {record.name: record for record in describe_modules(compiled)}
    assert list(records) == ["", "0", "1"]
    assert records[""].type_name == "Sequential"
    assert records["1"].type_name == "Linear"
    assert records["1"].params == 3 * 4 + 4


def test_a_users_attribute_with_a_wrappers_name_stays_in_the_name() -> None:
    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(2, 3)
            self._orig_mod = nn.Linear(3, 4)

    assert names_of(Holder()) == ["", "module", "_orig_mod"]


def test_tied_weights_count_once_in_each_subtree() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(7, 5), "head": nn.Linear(5, 7, bias=False)})
    model["head"].weight = model["embedding"].weight
    records = {record.name: record for record in describe_modules(model)}
    assert (records["embedding"].params, records["head"].params, records[""].params) == (35, 35, 35)


def test_a_shared_module_is_listed_under_each_name_as_an_alias_of_the_first() -> None:
    shared = nn.Sequential(nn.Linear(2, 2))
    records = {record.name: record for record in describe_modules(nn.ModuleDict({"a": shared, "b": shared}))}
    assert [(name, record.alias_of) for name, record in records.items()] == [
        ("", None),
        ("a", None),
        ("a.0", None),
        ("b", "a"),
        ("b.0", "a.0"),
    ]
    assert records[""].params == 2 * 2 + 2


def test_a_description_that_raises_says_so() -> None:
    class Rude(nn.Module):
        def extra_repr(self) -> str:
            raise AttributeError("not set up")

    assert describe_modules(Rude())[0].extra_repr == "extra_repr raised AttributeError"
    assert describe_modules(nn.Linear(2, 3))[0].extra_repr == "in_features=2, out_features=3, bias=True"


def test_a_module_that_contains_itself_is_named_once() -> None:
    loop = nn.Module()
    loop.add_module("inner", nn.Linear(2, 2))
    loop.add_module("again", loop)
    assert names_of(loop) == ["", "inner"]
    assert [name for name, _ in named_modules(loop)] == ["", "inner"]


def test_bytes_of_parameters_are_told_by_dtype_and_of_a_shared_one_once() -> None:
    model = nn.ModuleDict(
        {"one": nn.Linear(4, 3), "other": nn.Linear(4, 3), "short": nn.Linear(4, 3, dtype=torch.float16)}
    )
    one, other = model["one"], model["other"]
    assert isinstance(one, nn.Linear)
    other.weight = one.weight
    records = {record.name: record for record in describe_modules(model)}
    # Two biases of 3 and one weight of 12 in 4 bytes; 15 parameters in 2 bytes.
    assert records[""].parameter_bytes == {"float16": 15 * 2, "float32": (12 + 3 + 3) * 4}
    assert records["other"].parameter_bytes == {"float32": 15 * 4}
