"""Operators that torch runs in place of others on some devices: by Triton, by CuTe, by another library."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_flops import count_flops
from lightning_flops.measure.counting.formulas.registry import lookup


def test_such_an_operator_costs_what_the_one_that_it_replaces_costs() -> None:
    library: Any = torch.library.Library("_native", "FRAGMENT")  # type: ignore[no-untyped-call]
    library.define("bmm_triton_90(Tensor self, Tensor mat2) -> Tensor")
    library.impl("bmm_triton_90", torch.bmm, "CPU")
    with count_flops(None) as counts:
        torch.ops._native.bmm_triton_90(torch.ones(7, 3, 4), torch.ones(7, 4, 5))
    assert (counts.forward, counts.uncounted) == (7 * 2 * 3 * 4 * 5, {})
    library._destroy()


def test_all_of_torch_s_own_are_known() -> None:
    names = [schema.name.partition("::") for schema in torch._C._jit_get_all_schemas()]
    own = sorted({name for namespace, _, name in names if namespace == "_native"})
    if not own:
        pytest.skip("this torch replaces none")
    assert [name for name in own if lookup(getattr(torch.ops._native, name).default).kind == "unknown"] == []
