"""Formulas of users: custom operators, autograd functions, kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from lightning_flops import count_flops
from lightning_flops.measure.counting.formulas import registry as formula_registry
from lightning_flops.measure.counting.formulas.contract import Unreadable
from lightning_flops.measure.counting.formulas.custom import register_flop_formula
from lightning_flops.measure.counting.formulas.registry import lookup
from tests.measure.counting.recording import flops_by_operator, leaf, meta, record, work_of


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
    formula_registry.forget_entries()


def pair_product_flops(args: Any, kwargs: Any, out: Any) -> int:
    a, b = args
    return int(2 * a.shape[0] * a.shape[1] * b.shape[1])


def run_pair_product() -> torch.Tensor:
    return cast(torch.Tensor, pair_product(torch.ones(3, 4), torch.ones(4, 5)))


TARGETS: dict[str, Any] = {
    "name": "formulatest::pair_product",
    "name of the overload": "formulatest::pair_product.default",
    "what custom_op returned": pair_product,
    "packet": torch.ops.formulatest.pair_product,
    "overload": torch.ops.formulatest.pair_product.default,
}


@pytest.mark.parametrize("target", TARGETS)
def test_a_custom_operator_counts_by_its_formula(target: str) -> None:
    assert record(run_pair_product).unknown == ["formulatest.pair_product"]
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
    formula_registry.forget_entries()

    @flop_counter.register_flop_formula(torch.ops.formulatest.pair_product)
    def by_shape(a: Any, b: Any, out_shape: Any = None, **kwargs: Any) -> int:
        return int(2 * a[0] * a[1] * out_shape[1])

    @flop_counter.register_flop_formula(torch.ops.formulatest.scaled_up, get_raw=True)
    def by_tensor(a: Any, out_val: Any = None, **kwargs: Any) -> int:
        return int(3 * a.numel() + out_val.numel())

    assert flops_by_operator(run_pair_product) == {"formulatest.pair_product": 120}
    assert flops_by_operator(lambda: scaled_up(torch.ones(5))) == {"formulatest.scaled_up": 3 * 5 + 5}


@pytest.mark.parametrize("target", [3, "no_namespace", "::", torch.nn.Linear, print])
def test_what_cannot_have_a_formula_is_refused(target: Any) -> None:
    with pytest.raises(TypeError, match=r"namespace|FLOP formula"):
        register_flop_formula(target, lambda args, kwargs, out: 0)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, times: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        if times < 0:
            raise ValueError("negative")
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
    with count_flops() as counts:
        apply_square(leaf(3, 3), 5).sum().backward()
    assert (counts.forward, counts.backward) == (5 * 9, 100 * 9 + 2)


def test_a_function_that_sets_its_context_apart_shows_all_its_arguments() -> None:
    with count_flops() as counts:
        apply_cube(leaf(3, 3)).sum().backward()
    assert counts.forward == 1


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_watching_recompiles_nothing_and_breaks_no_graph() -> None:
    compiled = []

    def backend(graph: Any, inputs: Any) -> Any:
        compiled.append(graph)
        return graph

    def squared_sine(x: torch.Tensor) -> Any:
        return Square.apply(x, 1).sin()  # type: ignore[no-untyped-call]

    run = torch.compile(squared_sine, backend=backend, fullgraph=True)
    x = leaf(3, 3)
    run(x).sum().backward()
    with count_flops():
        run(x).sum().backward()
    run(x).sum().backward()
    assert len(compiled) == 1


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
    with count_flops() as counts:
        kernel[(1,)](torch.ones(6), BLOCK=16)
    assert counts.forward == 6 * 16


def test_a_number_stands_for_a_formula_and_0_says_that_an_operator_is_free() -> None:
    assert register_flop_formula(pair_product, 0) == 0
    assert flops_by_operator(run_pair_product) == {"formulatest.pair_product": 0}
    entry = lookup(torch.ops.formulatest.pair_product.default)
    assert (entry.kind, entry.compute((), {}, None)) == ("formula", 0)
    register_flop_formula("formulatest::pair_product", 12)
    assert flops_by_operator(run_pair_product) == {"formulatest.pair_product": 12}


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
    with pytest.raises(Unreadable, match="scaled_up"):
        record(lambda: run_and_save_rng_state(torch.ops.formulatest.scaled_up.default, torch.ones(3)))
