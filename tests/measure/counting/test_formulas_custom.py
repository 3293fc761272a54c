"""Formulas of users, and operators without one: at least what is seen, and what a Python kernel runs is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from lightning_flops import count_flops
from lightning_flops.analysis.counts import FlopCounts
from lightning_flops.measure.counting.flop_counter import FlopCounter
from lightning_flops.measure.counting.formulas import registry as formula_registry
from lightning_flops.measure.counting.formulas.registry import register_flop_formula
from lightning_flops.measure.torch_private.needed import depth
from lightning_flops.records import PhaseFlops
from tests.corpus.case import Parts
from tests.measure.counting.recording import flops_by_operator, leaf, meta, work_of


@torch.library.custom_op("formulatest::pair_product", mutates_args=())
def pair_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a @ b


@torch.library.custom_op("formulatest::scaled_up", mutates_args=())
def scaled_up(a: torch.Tensor) -> torch.Tensor:
    return a * 2


@pytest.fixture(autouse=True)
def forget_formulas() -> Iterator[None]:
    before = dict(formula_registry.user_formulas)
    yield
    formula_registry.user_formulas.clear()
    formula_registry.user_formulas.update(before)
    formula_registry.entries.clear()


def pair_product_flops(args: Any, kwargs: Any, out: Any) -> int:
    a, b = args
    return int(2 * a.shape[0] * a.shape[1] * b.shape[1])


def run_pair_product() -> torch.Tensor:
    return cast(torch.Tensor, pair_product(torch.ones(3, 4), torch.ones(4, 5)))


def counted(run: Callable[[], Any], root: nn.Module | None = None) -> FlopCounts:
    counter = FlopCounter(root)
    with counter:
        run()
    assert depth() == 0
    return FlopCounts(counter.record())


TARGETS: dict[str, Any] = {
    "name": "formulatest::pair_product",
    "name of the overload": "formulatest::pair_product.default",
    "what custom_op returned": pair_product,
    "packet": torch.ops.formulatest.pair_product,
    "overload": torch.ops.formulatest.pair_product.default,
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_custom_operator_counts_by_its_formula(target: str) -> None:
    assert list(counted(run_pair_product).uncounted) == ["formulatest.pair_product"]
    assert register_flop_formula(TARGETS[target], pair_product_flops) is pair_product_flops
    assert flops_by_operator(run_pair_product) == {"formulatest.pair_product": 2 * 3 * 4 * 5}


def test_registering_decorates_and_the_last_formula_wins() -> None:
    register_flop_formula(pair_product, pair_product_flops)

    @register_flop_formula("formulatest::pair_product")
    def one_flop(args: Any, kwargs: Any, out: Any) -> int:
        return 1

    assert one_flop((), {}, None) == 1
    assert flops_by_operator(run_pair_product) == {"formulatest.pair_product": 1}


def test_a_users_formula_wins_over_ours() -> None:
    register_flop_formula(torch.ops.aten.mm, lambda args, kwargs, out: 7)
    assert work_of("aten::mm", meta(3, 4), meta(4, 5)).flops == 7


def test_formulas_registered_with_torch_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils import flop_counter

    registered = dict(flop_counter.flop_registry)
    monkeypatch.setattr(flop_counter, "flop_registry", registered)
    formula_registry.entries.clear()

    @flop_counter.register_flop_formula(torch.ops.formulatest.pair_product)
    def by_shape(a: Any, b: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(2 * a[0] * a[1] * out_shape[1])

    @flop_counter.register_flop_formula(torch.ops.formulatest.scaled_up, get_raw=True)
    def by_tensor(a: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(3 * a.numel() + out_val.numel())

    assert flops_by_operator(run_pair_product) == {"formulatest.pair_product": 120}
    assert flops_by_operator(lambda: scaled_up(torch.ones(5))) == {"formulatest.scaled_up": 3 * 5 + 5}


@pytest.mark.parametrize("target", [3, "no_namespace", "::", torch.Tensor, print])
def test_what_cannot_have_a_formula_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match=r"namespace|FLOP formula"):
        register_flop_formula(target, lambda args, kwargs, out: 0)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] @ x.mT + x.mT @ grads[0], None


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x @ x @ x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


apply_cube: Any = Cube.apply
apply_square: Any = Square.apply  # taken before anything is registered, as libraries do
register_flop_formula(
    Square,
    lambda args, kwargs, out: args[1] * out.numel(),
    backward=lambda args, kwargs, out: 100 * args[0].numel() + len(out),
)
register_flop_formula(Cube, lambda args, kwargs, out: len(args))


def test_a_functions_formula_sees_the_arguments_of_apply_forward_and_gradients_backward() -> None:
    counts = counted(lambda: apply_square(leaf(3, 3), 5).sum().backward())
    assert (counts.forward, counts.backward) == (5 * 9, 100 * 9 + 2)
    # A forward without a context shows its first argument too.
    assert counted(lambda: apply_cube(leaf(3, 3)).sum().backward()).forward == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_watching_recompiles_nothing_and_breaks_no_graph() -> None:
    backend = CompileCounter()

    def squared_sine(x: torch.Tensor) -> Any:
        return Square.apply(x, 1).sin()  # type: ignore[no-untyped-call]

    run = torch.compile(squared_sine, backend=backend, fullgraph=True)
    x = leaf(3, 3)
    run(x).sum().backward()
    with count_flops():
        run(x).sum().backward()
    run(x).sum().backward()
    assert backend.frame_count == 1


def test_a_triton_kernel_is_heard_of_without_its_launchs_own_arguments() -> None:
    # Triton is not at hand: a class that says it is from there, with the run method its kernels are launched by.
    class JITFunction:
        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None: ...

        def __getitem__(self, grid: Any) -> Any:
            return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)

        def __call__(self) -> None: ...

    JITFunction.__module__ = "triton.runtime.jit"
    kernel = JITFunction()
    register_flop_formula(kernel, lambda args, kwargs, out: args[0].numel() * kwargs["BLOCK"] * len(kwargs))
    assert counted(lambda: kernel[(1,)](torch.ones(6), BLOCK=16)).forward == 6 * 16


@pytest.mark.parametrize("number", [1.5, "0", True, [0]])
def test_what_is_neither_a_formula_nor_a_whole_number_is_refused(number: Any) -> None:
    with pytest.raises(TypeError, match="a FLOP formula is a function or a whole number"):
        register_flop_formula(pair_product, number)
    with pytest.raises(TypeError, match="a FLOP formula is a function or a whole number"):
        register_flop_formula(Square, lambda args, kwargs, out: 0, backward=number)


def test_operators_called_by_higher_order_ones_count_as_themselves() -> None:
    from torch._higher_order_ops.out_dtype import out_dtype
    from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

    mm, state = torch.ops.aten.mm.default, torch.get_rng_state()
    left, right = torch.ones(3, 4), torch.ones(4, 5)
    runs: dict[str, Callable[[], Any]] = {
        "out_dtype": lambda: out_dtype(mm, torch.int32, left.to(torch.int8), right.to(torch.int8)),
        "run_and_save_rng_state": lambda: run_and_save_rng_state(mm, left, right),
        "run_with_rng_state": lambda: run_with_rng_state(state, mm, left, right),
    }
    for name, run in runs.items():
        assert flops_by_operator(run) == {f"higher_order.{name}": 120}
    counts = counted(lambda: run_and_save_rng_state(torch.ops.formulatest.scaled_up.default, torch.ones(3)))
    assert list(counts.uncounted) == ["higher_order.run_and_save_rng_state"]


PRODUCT = 2 * 3 * 4 * 5
"""(3, 4) by (4, 5)"""


@torch.library.custom_op("fla::chunk_gla_fwd", mutates_args=())
def opaque(q: Tensor, k: Tensor) -> Tensor:
    return q.clone()  # the product of a kernel that no dispatcher sees


def test_an_opaque_operator_on_tensors_of_one_shape_makes_a_lower_bound_unless_the_user_says_0() -> None:
    model = nn.Sequential(nn.Linear(4, 4))

    def run() -> None:
        opaque(model(torch.ones(3, 4)).detach(), torch.ones(3, 4))

    counts = counted(run, model)
    listed = counts.uncounted["fla.chunk_gla_fwd"]
    assert (listed.calls, listed.may_have_flops) == (1, True)
    assert counts.is_lower_bound
    assert counts.forward == 2 * 3 * 4 * 4  # the layer's
    register_flop_formula(opaque, 0)
    counts = counted(run, model)
    assert (dict(counts.uncounted), counts.is_lower_bound) == ({}, False)


@torch.library.custom_op("opaquetest::two_products", mutates_args=())
def two_products(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return grad @ weight.T, x.T @ grad


pair_product.register_autograd(
    lambda context, grad: two_products(grad, *context.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


def caller() -> nn.Module:
    """Calls the operator with its weight, (4, 5)."""
    return Parts(lambda self, x: pair_product(x, self.weight), weight=nn.Parameter(torch.ones(4, 5)))


def test_what_a_python_kernel_runs_is_counted_in_the_module_that_calls_it() -> None:
    model = nn.Sequential(nn.Linear(4, 4), caller())
    with torch.no_grad():
        counts = counted(lambda: model(torch.ones(3, 4)), model)
    assert counts.by_module()["1"].forward == PRODUCT
    assert counts.forward == 2 * 3 * 4 * 4 + PRODUCT
    listed = counts.uncounted["formulatest.pair_product"]  # what it does beside is not known
    assert (listed.calls, listed.modules, listed.may_have_flops) == (1, ("1",), True)
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
    for formula, flops in ((lambda args, kwargs, out: 7, 7), (12, 12), (0, 0)):
        assert register_flop_formula(pair_product, formula) == formula
        counts = counted(run_pair_product)
        assert (counts.forward, dict(counts.uncounted)) == (flops, {})


def test_a_registered_backward_is_counted_as_backward_of_the_module_that_called_the_operator() -> None:
    model = nn.Sequential(nn.Linear(4, 4), caller(), nn.Linear(5, 2))
    counts = counted(lambda: model(torch.ones(3, 4)).sum().backward(), model)
    assert counts.by_module()["1"] == PhaseFlops(forward=PRODUCT, backward=2 * PRODUCT)


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
