"""Operators that torch runs in place of others on some devices: by Triton, by CuTe, by another library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_flops import count_flops
from lightning_flops.instrument.counting.formulas import lookup

# (7, 3, 4) by (7, 4, 5)
LEFTS, RIGHTS = torch.ones(7, 3, 4), torch.ones(7, 4, 5)
PRODUCTS = 7 * 2 * 3 * 4 * 5

NAMES = {
    "bmm_triton_90": "(Tensor self, Tensor mat2) -> Tensor",
    "add__Tensor_triton_91": "(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> Tensor(a!)",
    "nothing_triton_93": "(Tensor self, Tensor mat2) -> Tensor",
}


@pytest.fixture(scope="module", autouse=True)
def defined() -> Iterator[None]:
    library: Any = torch.library.Library("_native", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name, arguments in NAMES.items():
        library.define(f"{name}{arguments}")
    library.impl("bmm_triton_90", torch.bmm, "CPU")
    library.impl("add__Tensor_triton_91", torch.Tensor.add_, "CPU")
    yield
    library._destroy()


def native(name: str) -> Any:
    return getattr(torch.ops._native, name).default


def test_such_an_operator_spends_what_the_one_that_it_replaces_spends() -> None:
    with count_flops(None) as counts:
        native("bmm_triton_90")(LEFTS, RIGHTS)
    assert (counts.forward, counts.uncounted) == (PRODUCTS, {})
    assert lookup(native("bmm_triton_90")).name == "_native.bmm_triton_90"


def test_an_overload_is_told_from_its_operator() -> None:
    assert lookup(native("add__Tensor_triton_91")).kind == lookup(torch.ops.aten.add_.Tensor).kind == "free"


def test_one_that_replaces_none_is_unknown() -> None:
    assert lookup(native("nothing_triton_93")).kind == "unknown"


def test_all_of_torch_s_own_are_known() -> None:
    names = [schema.name.partition("::") for schema in torch._C._jit_get_all_schemas()]
    own = {name for namespace, _, name in names if namespace == "_native" and name not in NAMES}
    if not own:
        pytest.skip("this torch replaces none")
    assert [name for name in sorted(own) if lookup(native(name)).kind == "unknown"] == []
