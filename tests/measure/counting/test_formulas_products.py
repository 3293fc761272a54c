"""Matrix products and convolutions: every form against its multiply-adds written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lightning_flops.measure.counting.formulas.registry import lookup
from tests.measure.counting.recording import (
    flops_by_operator,
    forward_and_backward,
    leaf,
    meta,
    operator,
    total_flops,
    work_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR) tensor support is in beta")

GROUPED = {
    "rows": ((10, 16), (2, 16, 8), [4, 10], 2 * 10 * 16 * 8),
    "rows behind the last offset": ((10, 16), (2, 16, 8), [4, 7], 2 * 7 * 16 * 8),
    "columns": ((2, 8, 16), (16, 10), [4, 10], 2 * 8 * 16 * 10),
    "inner size": ((8, 16), (16, 24), [8, 16], 2 * 8 * 16 * 24),
    "no groups": ((2, 8, 16), (2, 16, 8), None, 2 * 2 * 8 * 16 * 8),
}


@pytest.mark.parametrize("name", GROUPED)
def test_grouped_products_count_the_rows_that_groups_own(name: str) -> None:
    left, right, ends, expected = GROUPED[name]
    offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    work = work_of("aten::_grouped_mm", torch.empty(left), torch.empty(right), offsets)
    assert work.flops == expected
    # Where groups fill the tensor, its shape tells as much.
    grouped = {(2, 3): left[0], (3, 2): right[-1], (2, 2): left[-1]}.get((len(left), len(right)))
    assert work.by_values is (ends is not None and ends[-1] != grouped)


def test_grouped_products_fill_the_tensor_where_offsets_have_no_values() -> None:
    call = ("aten::_grouped_mm", meta(10, 16), meta(2, 16, 8), meta(2, dtype=torch.int32))
    assert work_of(*call).flops == 2 * 10 * 16 * 8


def test_a_grouped_product_costs_its_forward_twice_in_the_backward() -> None:
    rows, weights = leaf(16, 16, dtype=torch.bfloat16), leaf(2, 16, 8, dtype=torch.bfloat16)
    offsets = torch.tensor([8, 16], dtype=torch.int32)
    forward = 2 * 16 * 16 * 8
    assert forward_and_backward(lambda: F.grouped_mm(rows, weights, offs=offsets)) == (forward, 2 * forward)


def coordinates() -> torch.Tensor:
    return torch.eye(6).to_sparse()


def rows() -> torch.Tensor:
    return torch.eye(6).to_sparse_csr()


def blocks() -> torch.Tensor:
    return torch.eye(6).to_sparse_bsr((2, 2))


SPARSE: dict[str, tuple[Callable[[], Any], int]] = {
    "coordinates by dense": (lambda: torch.sparse.mm(coordinates(), torch.ones(6, 4)), 2 * 6 * 4),
    "coordinates by vector": (lambda: torch.mv(coordinates(), torch.ones(6)), 2 * 6),
    "rows by dense": (lambda: rows() @ torch.ones(6, 4), 2 * 6 * 4),
    "dense by rows": (lambda: torch.ones(4, 6) @ rows(), 2 * 4 * 6),
    "rows by vector": (lambda: rows() @ torch.ones(6), 2 * 6),
    "rows as a layer's weight": (lambda: F.linear(torch.ones(3, 6), rows()), 2 * 3 * 6),
    # Three 2x2 blocks are stored, zeros inside them included.
    "blocks by dense": (lambda: blocks() @ torch.ones(6, 4), 2 * 12 * 4),
    "added product": (lambda: torch.sparse.addmm(torch.ones(6, 4), rows(), torch.ones(6, 4)), 2 * 6 * 4),
    "sampled product": (lambda: torch.sparse.sampled_addmm(rows(), torch.ones(6, 3), torch.ones(3, 6)), 2 * 6 * 3),
    "reduced product": (lambda: torch.sparse.mm(rows(), torch.ones(6, 4), "mean"), 2 * 6 * 4),
    "hybrid result": (lambda: torch.hspmm(coordinates(), torch.ones(6, 4)), 2 * 6 * 4),
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_products_cost_two_flops_per_stored_element_and_column(name: str) -> None:
    run, expected = SPARSE[name]
    assert total_flops(run) == expected
    with torch.inference_mode():
        assert total_flops(run) == expected


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_linear_layer_counts_the_rows_there_are() -> None:
    rows = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    weight = leaf(4, 8)
    out: list[torch.Tensor] = []
    forward = total_flops(lambda: out.append(F.linear(rows, weight)))
    assert forward == 2 * (2 + 3) * 8 * 4
    # Only the weight wants a gradient.
    assert total_flops(out[0].to_padded_tensor(0.0).sum().backward) == forward


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_batches_multiply_sample_by_sample() -> None:
    rows = torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)])
    assert total_flops(lambda: torch.bmm(rows, rows.transpose(1, 2))) == 2 * 8 * (2 * 2 + 3 * 3)


def test_elementwise_spellings_of_products_are_free() -> None:
    for run in (lambda: torch.outer(leaf(3), leaf(4)), lambda: torch.linalg.vecdot(leaf(2, 3), leaf(2, 3))):
        assert flops_by_operator(run) == {}
        with torch.inference_mode():
            assert flops_by_operator(run) == {}


def some(*shape: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.ones(*shape, dtype=dtype)


COMPLEX_CALLS: dict[str, tuple[Callable[[], Any], int]] = {
    # Multiply-adds of complex numbers
    "mm": (lambda: some(3, 4) @ some(4, 5), 3 * 4 * 5),
    "in double precision": (lambda: some(3, 4, dtype=torch.complex128) @ some(4, 5, dtype=torch.complex128), 3 * 4 * 5),
    "addmm": (lambda: torch.addmm(some(5), some(3, 4), some(4, 5)), 3 * 4 * 5),
    "bmm": (lambda: torch.bmm(some(2, 3, 4), some(2, 4, 5)), 2 * 3 * 4 * 5),
    "baddbmm": (lambda: torch.baddbmm(some(5), some(2, 3, 4), some(2, 4, 5)), 2 * 3 * 4 * 5),
    "linear": (lambda: F.linear(some(2, 3, 4), some(5, 4)), 2 * 3 * 4 * 5),
    "einsum": (lambda: torch.einsum("bik,bkj->bij", some(2, 3, 4), some(2, 4, 5)), 2 * 3 * 4 * 5),
    "mv": (lambda: some(3, 4) @ some(4), 3 * 4),
    "dot": (lambda: torch.dot(some(4), some(4)), 4),
    "vdot": (lambda: torch.vdot(some(4), some(4)), 4),
    "addr": (lambda: torch.addr(some(3, 4), some(3), some(4)), 3 * 4),
    "multi_dot": (lambda: torch.linalg.multi_dot([some(2, 3), some(3, 4), some(4, 5)]), 2 * 3 * 4 + 2 * 4 * 5),
    "sparse": (lambda: torch.sparse.mm(some(3, 4).to_sparse(), some(4, 5)), 3 * 4 * 5),
    "conjugated": (lambda: some(3, 4) @ some(5, 4).mH, 3 * 4 * 5),
}


@pytest.mark.parametrize("name", COMPLEX_CALLS)
def test_a_complex_multiply_add_is_eight_flops(name: str) -> None:
    """(a + bi)(c + di) is four products, and each of them is added to something."""
    run, products = COMPLEX_CALLS[name]
    assert total_flops(run) == 8 * products
    with torch.inference_mode():
        assert total_flops(run) == 8 * products


def test_parts_of_complex_numbers_multiply_like_real_ones() -> None:
    """Who splits a complex product into three or four real ones runs those."""
    left, right = some(3, 4), some(4, 5)
    assert total_flops(lambda: torch.view_as_real(left)[..., 0] @ right.imag) == 2 * 3 * 4 * 5
    # A real matrix meets complex numbers after it was made complex
    assert total_flops(lambda: torch.ones(3, 4).to(left.dtype) @ right) == 8 * 3 * 4 * 5


def test_the_backward_of_a_complex_product_is_two_complex_products() -> None:
    left, right = some(3, 4).requires_grad_(), some(4, 5).requires_grad_()
    assert total_flops(lambda: torch.autograd.backward((left @ right).abs().sum())) == 3 * 8 * 3 * 4 * 5


def test_products_report_the_dtype_of_their_factors() -> None:
    half = torch.bfloat16
    left, right = meta(3, 4, dtype=half), meta(4, 5, dtype=half)
    assert lookup(operator("aten::addmm")).dtype_of((meta(5), left, right), {}, meta(3, 5)) is half
    assert lookup(operator("aten::_foreach_mm")).dtype_of(([left], [right]), {}, None) is half
    assert lookup(operator("aten::mm")).dtype_of((some(3, 4), some(4, 5)), {}, None) is torch.float32


def test_a_gradient_penalty_through_a_convolution_counts_every_product() -> None:
    layer, inputs = nn.Conv2d(4, 6, 3, bias=False), leaf(2, 4, 8, 8)
    one = 2 * (2 * 6 * 6 * 6) * 4 * 9
    (gradient,) = torch.autograd.grad(layer(inputs).sum(), inputs, create_graph=True)
    # torch makes the gradients of both factors the gradient was made from, the weight and the incoming gradient.
    assert total_flops(gradient.square().sum().backward) == 2 * one


@pytest.mark.parametrize(
    ("mask", "products"),
    [([True, True, True], 2), ([False, True, True], 1), ([True, False, True], 1), ([False] * 3, 0)],
)
def test_a_convolutions_backward_counts_the_gradients_asked_for(mask: list[bool], products: int) -> None:
    grad, values, weight = meta(2, 6, 6, 6), meta(2, 4, 8, 8), meta(6, 2, 3, 3)
    one = 2 * grad.numel() * 2 * 9
    plain = (grad, values, weight, [6], [1, 1], [0, 0], [1, 1], False, [0, 0], 2, mask)
    assert work_of("aten::convolution_backward", *plain).flops == products * one
    overrideable = (grad, values, weight, [1, 1], [0, 0], [1, 1], False, [0, 0], 2, mask)
    assert work_of("aten::convolution_backward_overrideable", *overrideable).flops == products * one


@pytest.mark.parametrize(("make", "padding"), [(nn.Conv2d, 1), (nn.Conv2d, "same"), (nn.ConvTranspose2d, 1)])
def test_a_complex_convolution_is_three_real_ones(make: Callable[..., nn.Module], padding: int | str) -> None:
    """Torch makes three of it: of the real parts, of the imaginary parts, and of the sums of both."""
    layer = make(4, 4, 3, padding=padding, dtype=torch.complex64)
    values = torch.ones(2, 4, 8, 8, dtype=torch.complex64).requires_grad_()
    one = 2 * (2 * 4 * 8 * 8) * 4 * 9
    assert total_flops(lambda: layer(values)) == 3 * one
    with torch.inference_mode():
        assert total_flops(lambda: layer(values)) == 3 * one
    assert total_flops(lambda: layer(values).abs().sum().backward()) == 3 * 3 * one


@pytest.mark.parametrize(("mask", "products"), [([True, True], 2), ([True, False], 1), ([False, True], 1)])
def test_a_backward_makes_only_the_gradients_that_are_asked_for(mask: list[bool], products: int) -> None:
    given = meta(3, 4), meta(4, 5)
    assert work_of("aten::matmul_backward", meta(3, 5), *given, mask).flops == products * 2 * 3 * 4 * 5
