"""The oracle of the zoo, held to counts by hand: nothing of the counter is in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo_oracle import CallOracle, Expected


def expected(run: Callable[[], torch.Tensor], oracle: CallOracle | None = None) -> Expected:
    oracle = oracle or CallOracle()
    with oracle:
        out = run()
        if out.requires_grad:
            with oracle.in_backward():
                torch.autograd.backward([out], [torch.ones_like(out)])
    return oracle.expected


def inputs(*shape: int) -> Any:
    return torch.ones(shape, requires_grad=True)


@torch.no_grad()
def without_gradients() -> torch.Tensor:
    return nn.functional.linear(torch.ones(7, 3), torch.ones(5, 3))


def one_unused() -> torch.Tensor:
    nn.Linear(3, 5)(torch.ones(7, 3))
    return nn.functional.linear(torch.ones(7, 3), inputs(5, 3))


def attention_module() -> Any:
    rows = torch.ones(1, 5, 8)
    return nn.MultiheadAttention(8, 2, batch_first=True)(rows, rows, rows)[0]


LINEAR = 2 * 7 * 3 * 5
BROADCAST = 2 * 2 * 4 * 3 * 5
GROUPED = 2 * (6 * 4 * 4) * (2 * 3 * 3)  # 6x6 becomes 4x4, two inputs for each output channel
TRANSPOSED = 2 * (4 * 5) * (6 * 3)
SOLVE = 4 * 4 * 3
SCORES = 2 * 2 * 5 * 5 * 8
PROJECTIONS, MODULES_SCORES = 4 * 2 * 5 * 8 * 8, 2 * 2 * 5 * 5 * 4


@pytest.mark.parametrize(
    ("run", "by_hand"),
    [
        (lambda: nn.Linear(3, 5)(torch.ones(7, 3)), Expected(LINEAR, LINEAR)),
        (lambda: nn.Linear(3, 5)(inputs(7, 3)), Expected(LINEAR, 2 * LINEAR)),
        (without_gradients, Expected(LINEAR)),
        (one_unused, Expected(2 * LINEAR, LINEAR)),
        (lambda: torch.ones(2, 4, 3) @ inputs(3, 5), Expected(BROADCAST, BROADCAST)),
        # Written into, a product stays known.
        (lambda: nn.Linear(3, 5)(torch.ones(1, 7, 3)).mul_(2), Expected(LINEAR, LINEAR)),
        (lambda: nn.Conv2d(4, 6, 3, groups=2)(torch.ones(1, 4, 6, 6)), Expected(GROUPED, GROUPED)),
        (lambda: nn.ConvTranspose1d(4, 6, 3)(torch.ones(1, 4, 5)), Expected(TRANSPOSED, TRANSPOSED)),
        # Backward: the columns' gradient by a solve, the matrix's by its product with the solution.
        (
            lambda: torch.linalg.solve_triangular(torch.eye(4).requires_grad_(), inputs(4, 3), upper=False),
            Expected(SOLVE, SOLVE + 2 * 4 * 4 * 3),
        ),
        # Fused attention repeats its scores in the backward.
        (
            lambda: nn.functional.scaled_dot_product_attention(*(inputs(1, 2, 5, 8) for _ in range(3))),
            Expected(2 * SCORES, 4 * SCORES, SCORES),
        ),
        # Three of the four projections want the weight's gradient alone.
        (
            attention_module,
            Expected(PROJECTIONS + 2 * MODULES_SCORES, PROJECTIONS + PROJECTIONS // 4 + 4 * MODULES_SCORES),
        ),
    ],
)
def test_a_call_costs_its_products_backward_those_needed(run: Callable[[], torch.Tensor], by_hand: Expected) -> None:
    assert expected(run) == by_hand


@pytest.mark.parametrize(
    ("equation", "shapes", "flops"),
    [
        ("ij,jk->ik", [(2, 3), (3, 5)], 2 * 2 * 3 * 5),
        ("ij,kj", [(2, 3), (5, 3)], 2 * 2 * 3 * 5),
        ("...ij,jk->...ik", [(7, 2, 3), (3, 5)], 2 * 7 * 2 * 3 * 5),
        ("i,j->ij", [(2,), (3,)], 0),  # nothing is summed: multiplications that no matrix product runs
        ("bi,bj->bij", [(4, 2), (4, 3)], 0),
        ("ijk,jl->il", [(2, 3, 4), (3, 5)], 2 * 2 * 3 * 5),  # k is summed before
    ],
)
def test_an_einsum_costs_every_letter_that_meets(equation: str, shapes: list[tuple[int, ...]], flops: int) -> None:
    operands = [inputs(*shape) for shape in shapes]
    assert expected(lambda: torch.einsum(equation, *operands)) == Expected(flops, 2 * flops)


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM(3, 4, 2), 4), (nn.GRU(3, 4, 2), 3), (nn.RNN(3, 4, 2), 1)])
def test_a_recurrent_layer_multiplies_input_and_state_at_each_step(layer: nn.RNNBase, gates: int) -> None:
    first, other = 2 * 10 * gates * 4 * 3, 2 * 10 * gates * 4 * 4  # 5 steps of a batch of 2
    # The sequence itself needs no gradient.
    by_hand = Expected(first + 3 * other, first + 2 * 3 * other)
    assert expected(lambda: layer(torch.ones(5, 2, 3))[0]) == by_hand


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_calls_again_is_recomputed(reentrant: bool) -> None:
    first, second, product = nn.Linear(3, 3), nn.Linear(3, 3), 2 * 7 * 3 * 3
    oracle = CallOracle()
    repeat = oracle.checkpointing(checkpoint)

    def run() -> Any:
        return repeat(lambda x: second(first(x).relu()).relu(), inputs(7, 3), use_reentrant=reentrant)

    assert expected(run, oracle) == Expected(2 * product, 4 * product, 2 * product)
