"""Operators without a formula: at least what is seen, and what a Python kernel runs is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_flops.analysis.flop_counts import FlopCounts
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.counting.formulas import registry as formula_registry
from lightning_flops.measure.counting.formulas.custom import register_flop_formula
from lightning_flops.measure.torch_private.needed import depth

PRODUCT = 2 * 3 * 4 * 5
"""(3, 4) by (4, 5)"""


@pytest.fixture(autouse=True)
def forget_formulas() -> Iterator[None]:
    before = dict(formula_registry.user_formulas)
    yield
    formula_registry.user_formulas.clear()
    formula_registry.user_formulas.update(before)
    formula_registry.forget_entries()


def counted(run: Callable[[], Any], root: nn.Module | None = None) -> FlopCounts:
    counter = FlopCounter(root)
    with counter:
        run()
    assert depth() == 0
    return FlopCounts(counter.record())


def foreign_product(left: Tensor, right: Tensor) -> Tensor:
    """A product that no dispatcher hears of."""
    return torch.from_numpy(np.matmul(left.detach().numpy(), right.detach().numpy()))


@torch.library.custom_op("fla::chunk_gla_fwd", mutates_args=())
def opaque(q: Tensor, k: Tensor) -> Tensor:
    return foreign_product(foreign_product(q, k.T), k)


def test_an_opaque_operator_on_tensors_of_one_shape_makes_a_lower_bound_unless_the_user_says_0() -> None:
    model = nn.Sequential(nn.Linear(4, 4))

    def run() -> None:
        opaque(model(torch.ones(3, 4)).detach(), torch.ones(3, 4))

    counts = counted(run, model)
    listed = counts.uncounted["fla.chunk_gla_fwd"]
    assert (listed.calls, listed.heavy) == (1, True)
    assert counts.is_lower_bound
    assert counts.forward == 2 * 3 * 4 * 4  # the layer's
    register_flop_formula(opaque, 0)
    counts = counted(run, model)
    assert (dict(counts.uncounted), counts.is_lower_bound) == ({}, False)


@torch.library.custom_op("opaquetest::product", mutates_args=())
def product(x: Tensor, weight: Tensor) -> Tensor:
    return (x @ weight).relu()


class Caller(nn.Module):
    """Calls an operator with its weight, (4, 5)."""

    def __init__(self, operator: Any) -> None:
        super().__init__()
        self.operator = operator
        self.weight = nn.Parameter(torch.ones(4, 5))

    def forward(self, x: Tensor) -> Any:
        return self.operator(x, self.weight)


def test_what_a_python_kernel_runs_is_counted_in_the_module_that_calls_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Caller(product))
    with torch.no_grad():
        counts = counted(lambda: model(torch.ones(3, 4)), model)
    assert counts.by_module()["1"].forward == PRODUCT
    assert counts.forward == 2 * 3 * 4 * 4 + PRODUCT
    listed = counts.uncounted["opaquetest.product"]  # what it does beside is not known
    assert (listed.calls, listed.modules, listed.heavy) == (1, ("1",), True)
    assert counts.by_operator()["aten.matmul"].forward == PRODUCT


@pytest.mark.parametrize("key", ["CPU", "CompositeExplicitAutograd", "CompositeImplicitAutograd"])
@pytest.mark.parametrize("inference", [False, True])
def test_kernels_that_a_library_puts_in_place_are_looked_into(key: str, inference: bool) -> None:
    library: Any = torch.library.Library("opaquelibrary", "FRAGMENT")  # type: ignore[no-untyped-call]
    name = f"product_{key}_{inference}"
    library.define(f"{name}(Tensor x, Tensor weight) -> Tensor")
    library.impl(name, lambda x, weight: x @ weight, key)
    operator = getattr(torch.ops.opaquelibrary, name)
    with torch.inference_mode(inference):
        counts = counted(lambda: operator(torch.ones(3, 4), torch.ones(4, 5)))
    assert counts.forward == PRODUCT
    assert list(counts.uncounted) == ([] if "Implicit" in key else [f"opaquelibrary.{name}"])


def test_a_formula_of_the_users_stands_for_all_that_the_kernel_runs() -> None:
    register_flop_formula(product, lambda args, kwargs, out: 7)
    counts = counted(lambda: product(torch.ones(3, 4), torch.ones(4, 5)))
    assert (counts.forward, dict(counts.uncounted)) == (7, {})
    register_flop_formula(product, 0)
    counts = counted(lambda: product(torch.ones(3, 4), torch.ones(4, 5)))
    assert (counts.forward, dict(counts.uncounted)) == (0, {})


@torch.library.custom_op("opaquetest::product_with_backward", mutates_args=())
def product_with_backward(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


@torch.library.custom_op("opaquetest::two_products", mutates_args=())
def two_products(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ weight.T, x.T @ grad


product_with_backward.register_autograd(
    lambda context, grad: two_products(grad, *context.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def test_a_registered_backward_is_counted_as_backward_of_the_module_that_called_the_operator() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Caller(product_with_backward), nn.Linear(5, 2))
    counts = counted(lambda: model(torch.ones(3, 4)).sum().backward(), model)
    caller = counts.by_module()["1"]
    assert (caller.forward, caller.backward, caller.recompute) == (PRODUCT, 2 * PRODUCT, 0)


# The run does not notice


@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered:UserWarning")
@pytest.mark.parametrize("with_formula", [False, True])
def test_a_python_kernel_runs_as_it_does_without_a_counter(with_formula: bool) -> None:
    """Autocast, lazy conjugation and autograd reach into the kernel as far as they do in a plain run."""
    library: Any = torch.library.Library("opaqueplain", "FRAGMENT")  # type: ignore[no-untyped-call]
    name = f"product_{with_formula}"
    library.define(f"{name}(Tensor x, Tensor weight) -> Tensor")
    library.impl(name, lambda x, weight: x @ weight, "CPU")
    of_library = getattr(torch.ops.opaqueplain, name)

    @torch.library.custom_op(f"opaqueplain::cast_{with_formula}", mutates_args=())
    def of_decorator(x: Tensor, weight: Tensor) -> Tensor:
        made = x @ weight
        assert made.dtype is torch.bfloat16
        assert not made.requires_grad
        return made.float()

    of_decorator.register_autograd(lambda context, grad: (grad @ torch.ones(5, 4), None))

    @torch.library.custom_op(f"opaqueplain::conjugated_{with_formula}", mutates_args=())
    def conjugated(x: Tensor) -> Tensor:
        return x.conj() + 0

    if with_formula:
        for operator in (of_library, of_decorator, conjugated):
            register_flop_formula(operator, 0)

    torch.manual_seed(0)
    x, weight, numbers = torch.randn(3, 4), torch.randn(4, 5), torch.randn(3, dtype=torch.complex64)

    def run() -> list[Tensor]:
        leaf, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            cast = of_decorator(leaf, leaf_weight)
        one = of_library(leaf, leaf_weight)
        (cast.sum() + one.sum()).backward()
        assert leaf.grad is not None
        assert leaf_weight.grad is not None
        return [cast.detach(), one.detach(), leaf.grad, leaf_weight.grad, conjugated(numbers)]

    plain = run()
    seen: list[Tensor] = []
    counts = counted(lambda: seen.extend(run()))
    assert all(torch.equal(left, right) for left, right in zip(plain, seen, strict=True))
    assert counts.forward == (0 if with_formula else 2 * PRODUCT)
