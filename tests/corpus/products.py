"""Matrix products in every form a program can write them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .case import Example, Expected, Family, Network, forward_without_grad

FAMILY = Family("products")


class Formula(nn.Module):
    """A module whose parameters have the given shapes and whose forward is the given function of them."""

    def __init__(self, function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        """Parameters are handed to *function* first, in order, and the module's inputs after them."""
        super().__init__()
        self.function = function
        self.factors = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def forward(self, *inputs: Tensor) -> Tensor:
        """What the function returns."""
        return self.function(*self.factors, *inputs)


def of_parameters(function: Callable[..., Tensor], *shapes: tuple[int, ...], forward: int, backward: int) -> Network:
    """A formula of parameters alone, so every factor needs its gradient."""
    return Network(
        build=lambda: Example(Formula(function, *shapes)),
        expected=Expected(forward, backward, by_module={"": (forward, backward)}),
    )


@FAMILY.network
def matrix_times_matrix() -> Network:
    """Written with @."""
    rows, inner, columns = 3, 5, 7
    product = 2 * rows * inner * columns
    return of_parameters(lambda a, b: a @ b, (rows, inner), (inner, columns), forward=product, backward=2 * product)


@FAMILY.network
def addmm() -> Network:
    """What is added, and the factors alpha and beta, cost nothing."""
    rows, inner, columns = 3, 5, 7
    product = 2 * rows * inner * columns
    return of_parameters(
        lambda a, b, c: torch.addmm(c, a, b, beta=0.5, alpha=3),
        (rows, inner),
        (inner, columns),
        (columns,),
        forward=product,
        backward=2 * product,
    )


@FAMILY.network
def bmm() -> Network:
    """One product for each member of the batch."""
    batch, rows, inner, columns = 2, 3, 5, 7
    product = 2 * batch * rows * inner * columns
    return of_parameters(
        torch.bmm, (batch, rows, inner), (batch, inner, columns), forward=product, backward=2 * product
    )


@FAMILY.network
def baddbmm() -> Network:
    """The batched product, added to something."""
    batch, rows, inner, columns = 2, 3, 5, 7
    product = 2 * batch * rows * inner * columns
    return of_parameters(
        lambda a, b, c: torch.baddbmm(c, a, b, alpha=0.3),
        (batch, rows, inner),
        (batch, inner, columns),
        (batch, rows, columns),
        forward=product,
        backward=2 * product,
    )


@FAMILY.network
def addbmm() -> Network:
    """Batched products added up are the same products."""
    batch, rows, inner, columns = 2, 3, 5, 7
    product = 2 * batch * rows * inner * columns
    return of_parameters(
        lambda a, b, c: torch.addbmm(c, a, b),
        (batch, rows, inner),
        (batch, inner, columns),
        (rows, columns),
        forward=product,
        backward=2 * product,
    )


@FAMILY.network
def broadcast_matmul() -> Network:
    """A (2, 1) and a (4,) batch broadcast to 2 x 4 products, and so do the gradients before they are summed."""
    outer, heads, rows, inner, columns = 2, 4, 3, 5, 7
    product = 2 * outer * heads * rows * inner * columns
    return of_parameters(
        torch.matmul,
        (outer, 1, rows, inner),
        (heads, inner, columns),
        forward=product,
        backward=2 * product,
    )


@FAMILY.network
def matrix_times_vector() -> Network:
    """The vector's gradient is a product of the same size; the matrix's is an outer product: elementwise, so free."""
    rows, inner = 5, 7
    product = 2 * rows * inner
    return of_parameters(lambda a, v: a @ v, (rows, inner), (inner,), forward=product, backward=product)


@FAMILY.network
def addmv() -> Network:
    """A matrix-vector product, added to a vector."""
    rows, inner = 5, 7
    product = 2 * rows * inner
    return of_parameters(
        lambda a, v, c: torch.addmv(c, a, v), (rows, inner), (inner,), (rows,), forward=product, backward=product
    )


@FAMILY.network
def stack_of_matrices_times_vector() -> Network:
    """A batch of matrices against one vector folds into one matrix-vector product."""
    batch, rows, inner = 3, 5, 7
    product = 2 * batch * rows * inner
    return of_parameters(torch.matmul, (batch, rows, inner), (inner,), forward=product, backward=product)


@FAMILY.network
def dot_product() -> Network:
    """One multiply-add for each element; each gradient is a scaled vector, elementwise."""
    elements = 13
    return of_parameters(torch.dot, (elements,), (elements,), forward=2 * elements, backward=0)


@FAMILY.network
def addr() -> Network:
    """A rank-one update is a multiply-add for each element of the matrix; its gradients are matrix-vector products."""
    rows, columns = 5, 7
    update = 2 * rows * columns
    return of_parameters(
        lambda u, v, c: torch.addr(c, u, v),
        (rows,),
        (columns,),
        (rows, columns),
        forward=update,
        backward=2 * update,
    )


@FAMILY.network
def outer_product() -> Network:
    """A product for each element of the matrix and nothing added: elementwise, forward and backward."""
    return of_parameters(torch.outer, (5,), (7,), forward=0, backward=0)


@FAMILY.network
def functional_linear() -> Network:
    """No module stands for the product, so it belongs to the one that called it."""
    batch, inputs, outputs = 3, 5, 7
    product = 2 * batch * inputs * outputs
    return Network(
        build=lambda: Example(
            Formula(lambda w, x: nn.functional.linear(x, w), (outputs, inputs)),
            torch.randn(batch, inputs, requires_grad=True),
        ),
        expected=Expected(product, 2 * product, by_module={"": (product, 2 * product)}),
    )


@FAMILY.network
def einsum_of_matrices() -> Network:
    """The output's letters are implied: "ij,jk" is "ij,jk->ik"."""
    rows, inner, columns = 3, 5, 7
    product = 2 * rows * inner * columns
    return of_parameters(
        lambda a, b: torch.einsum("ij,jk", a, b), (rows, inner), (inner, columns), forward=product, backward=2 * product
    )


@FAMILY.network
def einsum_with_ellipsis() -> Network:
    """The dots stand for the batch."""
    outer, batch, rows, inner, columns = 2, 4, 3, 5, 7
    product = 2 * outer * batch * rows * inner * columns
    return of_parameters(
        lambda a, b: torch.einsum("...ij,...jk->...ik", a, b),
        (outer, batch, rows, inner),
        (outer, batch, inner, columns),
        forward=product,
        backward=2 * product,
    )


@FAMILY.network
def einsum_in_sublist_form() -> Network:
    """Operands followed by lists of axes; the second factor is transposed."""
    batch, rows, inner, columns = 2, 3, 5, 7
    product = 2 * batch * rows * inner * columns
    return of_parameters(
        lambda a, b: torch.einsum(a, [0, 1, 2], b, [0, 3, 2], [0, 1, 3]),
        (batch, rows, inner),
        (batch, columns, inner),
        forward=product,
        backward=2 * product,
    )


@FAMILY.network
def einsum_splitting_heads() -> Network:
    """A projection straight into heads: "bsh,hnd->bsnd" contracts over the hidden axis."""
    batch, sequence, hidden, heads, head_dim = 2, 11, 13, 3, 5
    product = 2 * batch * sequence * hidden * heads * head_dim
    return Network(
        build=lambda: Example(
            Formula(lambda w, x: torch.einsum("bsh,hnd->bsnd", x, w), (hidden, heads, head_dim)),
            torch.randn(batch, sequence, hidden),
        ),
        expected=Expected(product, product),
    )


@FAMILY.network
def tensordot_over_two_axes() -> Network:
    """Contracts two axes at once."""
    rows, first, second, columns = 3, 5, 7, 11
    product = 2 * rows * (first * second) * columns
    return of_parameters(
        lambda a, b: torch.tensordot(a, b, dims=2),
        (rows, first, second),
        (first, second, columns),
        forward=product,
        backward=2 * product,
    )


@FAMILY.network
def multi_dot_in_the_cheaper_order() -> Network:
    """(AB)C costs 3*20*4 + 3*4*17 multiply-adds, A(BC) would cost 20*4*17 + 3*20*17: torch takes the first."""
    rows, wide, narrow, columns = 3, 20, 4, 17
    left = 2 * rows * wide * narrow
    right = 2 * rows * narrow * columns
    return of_parameters(
        lambda a, b, c: torch.linalg.multi_dot((a, b, c)),
        (rows, wide),
        (wide, narrow),
        (narrow, columns),
        forward=left + right,
        backward=2 * (left + right),
    )


@FAMILY.network
def sparse_adjacency_times_features() -> Network:
    """A sparse factor costs a multiply-add for each of its non-zeros and each column of the other."""
    nodes, edges, inputs, outputs = 6, 9, 5, 7

    class GraphConvolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(inputs, outputs, bias=False)

        def forward(self, adjacency: Tensor, features: Tensor) -> Tensor:
            return torch.sparse.mm(adjacency, self.lin(features))

    def build() -> Example:
        sources = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5, 5])
        targets = torch.tensor([1, 4, 2, 0, 5, 1, 3, 2, 4])
        adjacency = torch.sparse_coo_tensor(
            torch.stack([sources, targets]), torch.randn(edges), (nodes, nodes), check_invariants=True
        )
        return Example(GraphConvolution(), adjacency.coalesce(), torch.randn(nodes, inputs))

    projection = 2 * nodes * inputs * outputs
    propagation = 2 * edges * outputs
    return Network(
        build=build,
        expected=Expected(
            projection + propagation, projection + propagation, by_module={"lin": (projection, projection)}
        ),
    )


@FAMILY.network
def integer_matrix_product() -> Network:
    """Eight-bit integers multiply and add like any other numbers."""
    rows, inner, columns = 3, 8, 16

    def product(x: Tensor, w: Tensor) -> Tensor:
        return torch._int_mm(x, w)

    return Network(
        build=lambda: Example(
            Formula(product),
            torch.randint(-9, 9, (rows, inner), dtype=torch.int8),
            torch.randint(-9, 9, (inner, columns), dtype=torch.int8),
            step=forward_without_grad,
        ),
        expected=Expected(2 * rows * inner * columns),
    )


@FAMILY.network
def packed_eight_bit_weight() -> Network:
    """Weights stored in eight bits, a scale for each output: a product like any other."""
    rows, inner, columns = 3, 32, 16

    class Packed(nn.Module):
        def forward(self, x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
            return torch._weight_int8pack_mm(x, weight, scales)

    return Network(
        build=lambda: Example(
            Packed(),
            torch.randn(rows, inner, dtype=torch.bfloat16),
            torch.randint(-9, 9, (columns, inner), dtype=torch.int8),
            torch.ones(columns, dtype=torch.bfloat16),
            step=forward_without_grad,
        ),
        expected=Expected(2 * rows * inner * columns),
    )
