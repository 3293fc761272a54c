"""The oracle of the zoo, held to counts by hand: nothing of the counter is in here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.zoo_oracle import CallOracle, Expected


def expected(run: Callable[[], torch.Tensor]) -> Expected:
    oracle = CallOracle()
    with oracle:
        out = run()
        if out.requires_grad:
            with oracle.in_backward():
                torch.autograd.backward([out], [torch.ones_like(out)])
    return oracle.expected


def test_a_linear_layer_costs_its_weight_for_each_row_and_its_input_a_gradient_only_if_it_needs_one() -> None:
    layer, product = nn.Linear(3, 5), 2 * 7 * 3 * 5
    assert expected(lambda: layer(torch.ones(7, 3))) == Expected(product, product)
    assert expected(lambda: layer(torch.ones(7, 3, requires_grad=True))) == Expected(product, 2 * product)


def test_without_gradients_there_is_no_backward() -> None:
    with torch.no_grad():
        assert expected(lambda: nn.Linear(3, 5)(torch.ones(7, 3))) == Expected(2 * 7 * 3 * 5)


def test_a_product_that_the_backward_does_not_reach_costs_its_forward_alone() -> None:
    used, unused = nn.Linear(3, 5), nn.Linear(3, 5)

    def run() -> torch.Tensor:
        unused(torch.ones(7, 3))
        result: torch.Tensor = used(torch.ones(7, 3))
        return result

    assert expected(run) == Expected(2 * (2 * 7 * 3 * 5), 2 * 7 * 3 * 5)


def test_a_batched_product_costs_the_size_after_broadcasting() -> None:
    left, right = torch.ones(2, 4, 3), torch.ones(3, 5, requires_grad=True)
    assert expected(lambda: left @ right) == Expected(2 * 2 * 4 * 3 * 5, 2 * 2 * 4 * 3 * 5)


def test_a_product_stays_known_when_its_result_is_written_into() -> None:
    layer = nn.Linear(3, 4)
    assert expected(lambda: layer(torch.ones(2, 5, 3)).mul_(2)) == Expected(2 * 10 * 3 * 4, 2 * 10 * 3 * 4)


def test_a_grouped_convolution_multiplies_within_its_groups() -> None:
    layer = nn.Conv2d(4, 6, 3, groups=2)  # 6x6 becomes 4x4, two inputs for each output channel
    product = 2 * (6 * 4 * 4) * (2 * 3 * 3)
    assert expected(lambda: layer(torch.ones(1, 4, 6, 6))) == Expected(product, product)


def test_a_transposed_convolution_spreads_each_input() -> None:
    layer = nn.ConvTranspose1d(4, 6, 3)
    product = 2 * (4 * 5) * (6 * 3)
    assert expected(lambda: layer(torch.ones(1, 4, 5))) == Expected(product, product)


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
def test_an_einsum_of_two_costs_every_letter_that_meets(
    equation: str, shapes: list[tuple[int, ...]], flops: int
) -> None:
    operands = [torch.ones(shape, requires_grad=True) for shape in shapes]
    assert expected(lambda: torch.einsum(equation, *operands)) == Expected(flops, 2 * flops)


@pytest.mark.parametrize("layer", [nn.LSTM(3, 4, 2), nn.GRU(3, 4, 2), nn.RNN(3, 4, 2)])
def test_a_recurrent_layer_multiplies_input_and_state_at_each_step(layer: nn.RNNBase) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1}[layer.mode]
    first, other = 2 * 10 * gates * 4 * 3, 2 * 10 * gates * 4 * 4  # 5 steps of a batch of 2
    forward = first + 3 * other
    # The sequence itself needs no gradient.
    assert expected(lambda: layer(torch.ones(5, 2, 3))[0]) == Expected(forward, first + 2 * 3 * other)


def test_a_triangular_solve_multiplies_each_column_by_half_a_square() -> None:
    matrix, right = torch.eye(4, requires_grad=True), torch.ones(4, 3, requires_grad=True)
    solve = 4 * 4 * 3
    # Backward: the columns' gradient by a solve, the matrix's by its product with the solution.
    counts = expected(lambda: torch.linalg.solve_triangular(matrix, right, upper=False))
    assert counts == Expected(solve, solve + 2 * 4 * 4 * 3)


def test_fused_attention_multiplies_twice_and_repeats_its_scores_in_the_backward() -> None:
    query, key, value = (torch.ones(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    scores = 2 * 2 * 5 * 5 * 8
    counts = expected(lambda: nn.functional.scaled_dot_product_attention(query, key, value))
    assert counts == Expected(2 * scores, 4 * scores, scores)


def test_the_attention_module_is_looked_into() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    projections, scores = 4 * 2 * 5 * 8 * 8, 2 * 2 * 5 * 5 * 4
    forward = projections + 2 * scores
    inputs = torch.ones(1, 5, 8)
    # The input's own gradient is not needed: three of the four projections want the weight's alone.
    backward = projections + projections // 4 + 2 * 2 * scores
    assert expected(lambda: layer(inputs, inputs, inputs)[0]) == Expected(forward, backward)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_calls_again_is_recomputed(reentrant: bool) -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    product = 2 * 7 * 3 * 3
    oracle = CallOracle()
    repeat = oracle.checkpointing(checkpoint)
    with oracle:
        out = repeat(
            lambda x: second(first(x).relu()).relu(), torch.ones(7, 3, requires_grad=True), use_reentrant=reentrant
        )
        with oracle.in_backward():
            out.backward(torch.ones_like(out))
    assert oracle.expected == Expected(2 * product, 4 * product, 2 * product)
