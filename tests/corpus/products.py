"""Matrix products in every form a program can write them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .case import Example, Family, Parts, forward_without_grad

FAMILY = Family("products")


class Formula(nn.Module):
    """A module whose parameters have the given shapes and whose forward is the given function of them."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.function = function
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.function(*self.factors, *inputs)


MATRIX = 2 * 3 * 5 * 7  # of 3 x 5 by 5 x 7
LEFT, RIGHT, STACK, RIGHTS = (3, 5), (5, 7), (2, 3, 5), (2, 5, 7)
VECTOR = 2 * 5 * 7  # of 5 x 7 by 7

OF_PARAMETERS: tuple[tuple[str, Callable[..., Tensor], tuple[tuple[int, ...], ...], int, int], ...] = (
    ("matrix_times_matrix", lambda a, b: a @ b, (LEFT, RIGHT), MATRIX, 2 * MATRIX),
    # What is added, and the factors alpha and beta, cost nothing.
    ("addmm", lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=3), (LEFT, RIGHT, (7,)), MATRIX, 2 * MATRIX),
    # The output's letters are implied: "ij,jk" is "ij,jk->ik".
    ("einsum_of_matrices", lambda a, b: torch.einsum("ij,jk", a, b), (LEFT, RIGHT), MATRIX, 2 * MATRIX),
    ("bmm", torch.bmm, (STACK, RIGHTS), 2 * MATRIX, 4 * MATRIX),
    ("baddbmm", lambda a, b, c: torch.baddbmm(c, a, b, alpha=0.3), (STACK, RIGHTS, (2, 3, 7)), 2 * MATRIX, 4 * MATRIX),
    # Batched products added up are the same products.
    ("addbmm", lambda a, b, c: torch.addbmm(c, a, b), (STACK, RIGHTS, (3, 7)), 2 * MATRIX, 4 * MATRIX),
    # Operands followed by lists of axes; the second factor is transposed.
    (
        "einsum_in_sublist_form",
        lambda a, b: torch.einsum(a, [0, 1, 2], b, [0, 3, 2], [0, 1, 3]),
        (STACK, (2, 7, 5)),
        2 * MATRIX,
        4 * MATRIX,
    ),
    # A (2, 1) and a (4,) batch broadcast to 2 x 4 products, and so do the gradients before they are summed.
    ("broadcast_matmul", torch.matmul, ((2, 1, 3, 5), (4, 5, 7)), 8 * MATRIX, 16 * MATRIX),
    (
        "einsum_with_ellipsis",
        lambda a, b: torch.einsum("...ij,...jk->...ik", a, b),
        ((2, 4, 3, 5), (2, 4, 5, 7)),
        8 * MATRIX,
        16 * MATRIX,
    ),
    # The vector's gradient is a product of the same size; the matrix's is an outer product: elementwise, so free.
    ("matrix_times_vector", lambda a, v: a @ v, ((5, 7), (7,)), VECTOR, VECTOR),
    ("addmv", lambda a, v, c: torch.addmv(c, a, v), ((5, 7), (7,), (5,)), VECTOR, VECTOR),
    # A batch of matrices against one vector folds into one matrix-vector product.
    ("stack_of_matrices_times_vector", torch.matmul, ((3, 5, 7), (7,)), 3 * VECTOR, 3 * VECTOR),
    # One multiply-add for each element; each gradient is a scaled vector, elementwise.
    ("dot_product", torch.dot, ((13,), (13,)), 2 * 13, 0),
    # A rank-one update is a multiply-add for each element of the matrix; its gradients are matrix-vector products.
    ("addr", lambda u, v, c: torch.addr(c, u, v), ((5,), (7,), (5, 7)), VECTOR, 2 * VECTOR),
    # A product for each element of the matrix and nothing added: elementwise, forward and backward.
    ("outer_product", torch.outer, ((5,), (7,)), 0, 0),
    # Contracts two axes at once.
    (
        "tensordot_over_two_axes",
        lambda a, b: torch.tensordot(a, b, dims=2),
        ((3, 5, 7), (5, 7, 11)),
        2 * 3 * (5 * 7) * 11,
        4 * 3 * (5 * 7) * 11,
    ),
    # (AB)C costs 3*20*4 + 3*4*17 multiply-adds, A(BC) would cost 20*4*17 + 3*20*17: torch takes the first.
    (
        "multi_dot_in_the_cheaper_order",
        lambda a, b, c: torch.linalg.multi_dot((a, b, c)),
        ((3, 20), (20, 4), (4, 17)),
        2 * (3 * 20 * 4 + 3 * 4 * 17),
        4 * (3 * 20 * 4 + 3 * 4 * 17),
    ),
)
"""Formulas of parameters alone, so every factor needs its gradient: name, function, shapes, forward, backward."""


def of_parameters(name: str, function: Any, shapes: tuple[tuple[int, ...], ...], forward: int, backward: int) -> None:
    """Adds one of them."""
    costs = {"": (forward, backward)}
    FAMILY.put(name, lambda: Example(Formula(function, *shapes)).costs(forward, backward, by_module=costs))


for _row in OF_PARAMETERS:
    of_parameters(*_row)
# No module stands for the product, so it belongs to the one that called it.
FAMILY.put(
    "functional_linear",
    lambda: Example(
        Formula(lambda w, x: nn.functional.linear(x, w), (7, 5)), torch.randn(3, 5, requires_grad=True)
    ).costs(MATRIX, 2 * MATRIX, by_module={"": (MATRIX, 2 * MATRIX)}),
)
# A projection straight into 3 heads of 5: "bsh,hnd->bsnd" contracts over the hidden axis of 13.
FAMILY.put(
    "einsum_splitting_heads",
    lambda: Example(
        Formula(lambda w, x: torch.einsum("bsh,hnd->bsnd", x, w), (13, 3, 5)), torch.randn(2, 11, 13)
    ).costs(2 * 2 * 11 * 13 * 3 * 5, 2 * 2 * 11 * 13 * 3 * 5),
)
# Eight-bit integers multiply and add like any other numbers.
FAMILY.put(
    "integer_matrix_product",
    lambda: Example(
        Formula(lambda x, w: torch._int_mm(x, w)),
        torch.randint(-9, 9, (3, 8), dtype=torch.int8),
        torch.randint(-9, 9, (8, 16), dtype=torch.int8),
        step=forward_without_grad,
    ).costs(2 * 3 * 8 * 16),
)
# Weights stored in eight bits, a scale for each output: a product like any other.
FAMILY.put(
    "packed_eight_bit_weight",
    lambda: Example(
        Formula(lambda x, weight, scales: torch._weight_int8pack_mm(x, weight, scales)),
        torch.randn(3, 32, dtype=torch.bfloat16),
        torch.randint(-9, 9, (16, 32), dtype=torch.int8),
        torch.ones(16, dtype=torch.bfloat16),
        step=forward_without_grad,
    ).costs(2 * 3 * 32 * 16),
)


@FAMILY.network
def sparse_adjacency_times_features() -> Example:
    """A sparse factor costs a multiply-add for each of its non-zeros and each column of the other."""
    nodes, edges, inputs, outputs = 6, 9, 5, 7

    def forward(self: Any, adjacency: Tensor, features: Tensor) -> Tensor:
        return torch.sparse.mm(adjacency, self.lin(features))

    projection = 2 * nodes * inputs * outputs
    propagation = 2 * edges * outputs
    sources = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5, 5])
    targets = torch.tensor([1, 4, 2, 0, 5, 1, 3, 2, 4])
    adjacency = torch.sparse_coo_tensor(
        torch.stack([sources, targets]), torch.randn(edges), (nodes, nodes), check_invariants=True
    )
    return Example(
        Parts(forward, lin=nn.Linear(inputs, outputs, bias=False)), adjacency.coalesce(), torch.randn(nodes, inputs)
    ).costs(projection + propagation, projection + propagation, by_module={"lin": (projection, projection)})
