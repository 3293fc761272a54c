"""Triton is not at hand: a module of its name, whose kernels run what torch's dispatcher does not see.

What stands in the sources here is what a reader of a kernel's source would say of it: one has a product, one has none.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_flops import count_flops, register_flop_formula
from lightning_flops.measure.counting.formulas import registry


class JITFunction:
    """As Triton's: ``kernel[grid](…)`` calls ``run``, and ``src`` is the source."""

    def __init__(self, fn: Callable[..., object], src: str) -> None:
        self.fn, self.src = fn, src

    def run(self, x: Any, *, grid: Any, warmup: bool) -> None:
        x.numpy()[:] += 1.0

    def __getitem__(self, grid: Any) -> Any:
        return lambda x: self.run(x, grid=grid, warmup=False)


JITFunction.__module__ = "triton.runtime.jit"


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("triton.runtime.jit")
    module.JITFunction = JITFunction  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton.runtime.jit", module)


def product(x: Any) -> None: ...


def scaled(x: Any) -> None: ...


def through_a_helper(x: Any) -> object:
    return helper


HELPER_SOURCE = "def helper(a):\n    return tl.dot(a, a)"
helper = JITFunction(product, HELPER_SOURCE)


class Launches(nn.Module):
    def __init__(self, *kernels: JITFunction) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        for kernel in self.kernels:
            kernel[(1,)](x.detach())
        return x


def test_a_launch_from_python_is_listed_and_is_a_lower_bound_where_its_source_has_a_product() -> None:
    kernels = [
        JITFunction(product, "def product(x):\n    acc += tl.dot(a, b)"),
        JITFunction(scaled, "def scaled(x):\n    tl.store(x, tl.load(x) * dots)"),
        JITFunction(through_a_helper, "def through_a_helper(x):\n    helper(x)"),
    ]
    model, x = nn.Sequential(nn.Linear(4, 4), Launches(*kernels)), torch.ones(3, 4)
    with count_flops(model) as counts:
        model(x)
        model(x)
    assert counts.forward == 2 * 2 * 3 * 4 * 4
    assert {name: (one.calls, one.modules, one.may_have_flops) for name, one in counts.uncounted.items()} == {
        "triton.product": (2, ("1",), True),
        "triton.scaled": (2, ("1",), False),
        "triton.through_a_helper": (2, ("1",), True),
    }
    assert counts.is_lower_bound
    with count_flops(model) as counts:
        kernels[0].run(x, grid=(1,), warmup=True)  # compiles, and launches nothing
    assert not counts.uncounted
    assert "run" in vars(JITFunction)
    assert JITFunction.run.__qualname__ == "JITFunction.run"
    assert not hasattr(JITFunction.run, "__wrapped__")


def test_a_kernel_with_a_formula_and_one_that_an_operator_with_a_formula_launches_are_not() -> None:
    own = JITFunction(product, "tl.dot(a, b)")
    register_flop_formula(own, 7)
    inner = JITFunction(product, "tl.dot(a, b)")

    @torch.library.custom_op("launchtest::product", mutates_args=())
    def launches(x: Tensor) -> Tensor:
        inner[(1,)](x)
        return x.clone()

    register_flop_formula("launchtest::product", 11)
    try:
        with count_flops() as counts:
            own[(1,)](torch.ones(3))
            launches(torch.ones(3))
    finally:
        registry.user_formulas.pop("launchtest::product")
        registry.entries.clear()
    assert (counts.forward, dict(counts.uncounted)) == (18, {})


def test_what_operators_run_counts_as_it_does_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.ones(3, 4, requires_grad=True)

    def by_module() -> dict[str, Any]:
        with count_flops(model) as counts:
            gradients: Any = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            gradients[0].square().sum().backward()
        return {name: (one.forward, one.backward, one.recompute) for name, one in counts.by_module().items()}

    heard = by_module()
    monkeypatch.delitem(sys.modules, "triton.runtime.jit")
    assert heard == by_module()
    assert heard["0"][1] > heard["0"][0] == 2 * 3 * 4 * 4
