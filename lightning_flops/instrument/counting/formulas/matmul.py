"""Matrix and vector products: dense, packed, quantized and sparse.

A product of an (M, K) and a (K, N) matrix is 2·M·K·N FLOPs; adding a bias or a scaled third matrix is elementwise and
counts nothing. A product of complex numbers is 8·M·K·N: each of its multiply-adds is four real ones. Sparse operands
count their stored non-zeros.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from math import prod
from typing import Any

import torch

from lightning_flops.instrument.counting.formulas.contract import (
    COMPLEX,
    COMPLEX_PRODUCT,
    RESULT,
    Arguments,
    Keywords,
    Rule,
    Unreadable,
    Work,
    host_integers,
)
from lightning_flops.instrument.torch_private.dispatch import out_of_sight
from lightning_flops.instrument.torch_private.tensors import nested_sizes, stored_count, stored_indices

_STRIDED = torch.strided
_PAIR_OF_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)  # not in older torch


def sizes_of(tensor: torch.Tensor) -> list[tuple[int, ...]]:
    """Shapes that a tensor holds: its own, or one for each component of a nested tensor."""
    if not tensor.is_nested:
        return [tuple(tensor.shape)]
    if tensor.layout is torch.jagged:
        return [tuple(component.shape) for component in tensor.unbind()]
    return nested_sizes(tensor)


def non_zeros(tensor: torch.Tensor) -> int:
    """Stored elements of a tensor of any layout: all of a dense one, whole blocks of a blocked one."""
    layout = tensor.layout
    if layout is torch.sparse_coo:
        with out_of_sight():
            stored = stored_count(tensor)
        return stored * prod(tensor.shape[tensor.sparse_dim() :])
    if layout in (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        with out_of_sight():
            return tensor.values().numel()
    return tensor.numel()


def _row_ids(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """For each stored element of a two-dimensional sparse tensor, its index along *dim*."""
    coordinates = tensor if tensor.layout is torch.sparse_coo else tensor.to_sparse()
    return stored_indices(coordinates)[dim]


def _sparse_times_sparse(left: torch.Tensor, right: torch.Tensor) -> int:
    """Two FLOPs for every pair of stored elements that meet: (m, k) of the left one, (k, n) of the right one."""
    inner = left.shape[1]
    with out_of_sight():
        met_left = torch.bincount(_row_ids(left, 1), minlength=inner)
        met_right = torch.bincount(_row_ids(right, 0), minlength=inner)
        met = (met_left * met_right).sum()
    return 2 * sum(host_integers(met))


def _nested_product(left: torch.Tensor, right: torch.Tensor) -> int:
    """Product of which at least one side is nested: component by component, a plain side shared by all."""
    lefts, rights = sizes_of(left), sizes_of(right)
    if left.is_nested and not right.is_nested and right.dim() == 3:
        rights = [tuple(right.shape[1:])] * len(lefts)
    elif len(rights) == 1:
        rights = rights * len(lefts)
    elif len(lefts) == 1:
        lefts = lefts * len(rights)
    return sum(_shape_product(a, b) for a, b in zip(lefts, rights, strict=True))


def _shape_product(left: Sequence[int], right: Sequence[int]) -> int:
    """``matmul`` of two shapes, batch dimensions broadcast, vectors allowed on either side."""
    rows, columns = (left[-2] if len(left) > 1 else 1), (right[-1] if len(right) > 1 else 1)
    # Broadcast batches: trailing sizes meet, the longer shape's leading ones stand alone.
    batches = zip_longest(reversed(left[:-2]), reversed(right[:-2]), fillvalue=1)
    batch = prod(a if b == 1 else b for a, b in batches)
    return 2 * batch * rows * left[-1] * columns


def _irregular_product(left: torch.Tensor, right: torch.Tensor) -> int:
    """Product of two matrices (or stacks of matrices) of which at least one is sparse or nested."""
    if left.is_nested or right.is_nested:
        return _nested_product(left, right)
    if left.layout is _STRIDED and right.layout is _STRIDED:
        return _shape_product(left.shape, right.shape)
    if left.layout is not _STRIDED and right.layout is not _STRIDED:
        return _sparse_times_sparse(left, right)
    if left.layout is _STRIDED:
        return 2 * non_zeros(right) * prod(left.shape[:-1])
    return 2 * non_zeros(left) * (int(right.shape[-1]) if right.dim() > 1 else 1)


def _is_plain(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.layout is _STRIDED and right.layout is _STRIDED and not left.is_nested and not right.is_nested


def _times_complex(tensor: torch.Tensor) -> int:
    return COMPLEX_PRODUCT if tensor.dtype in COMPLEX else 1


# The next four are called for every matrix product of a step: they read their arguments directly, and as few sizes as
# will do, because each size read from a tensor costs a tenth of a microsecond.


def mm(args: Arguments, kwargs: Keywords, out: Any) -> int:
    """``mm(self, mat2)``: 2·M·K·N."""
    left, right = args[0], args[1]
    if left.layout is not _STRIDED or right.layout is not _STRIDED:
        return _times_complex(left) * _irregular_product(left, right)
    flops: int = 2 * left.numel() * right.shape[1]
    return COMPLEX_PRODUCT * flops if left.dtype in COMPLEX else flops


def addmm(args: Arguments, kwargs: Keywords, out: Any) -> int:
    """``addmm(self, mat1, mat2)``: 2·M·K·N."""
    left, right = args[1], args[2]
    if left.layout is not _STRIDED or right.layout is not _STRIDED:
        return _times_complex(left) * _irregular_product(left, right)
    flops: int = 2 * left.numel() * right.shape[1]
    return COMPLEX_PRODUCT * flops if left.dtype in COMPLEX else flops


def bmm(args: Arguments, kwargs: Keywords, out: Any) -> int:
    """``bmm(self, mat2)``: 2·B·M·K·N."""
    left, right = args[0], args[1]
    if left.layout is not _STRIDED or right.layout is not _STRIDED or right.is_nested:
        return _times_complex(left) * _irregular_product(left, right)
    flops: int = 2 * left.numel() * right.shape[2]
    return COMPLEX_PRODUCT * flops if left.dtype in COMPLEX else flops


def baddbmm(args: Arguments, kwargs: Keywords, out: Any) -> int:
    """``baddbmm(self, batch1, batch2)``, and ``addbmm``, which adds the batch up: 2·B·M·K·N."""
    left, right = args[1], args[2]
    if left.layout is not _STRIDED or right.layout is not _STRIDED:
        return _times_complex(left) * _irregular_product(left, right)
    flops: int = 2 * left.numel() * right.shape[2]
    return COMPLEX_PRODUCT * flops if left.dtype in COMPLEX else flops


def product(left: torch.Tensor, right: torch.Tensor) -> int:
    """``matmul`` in all its forms: vectors, matrices, broadcast stacks, nested and sparse operands."""
    if _is_plain(left, right):
        return _shape_product(left.shape, right.shape)
    return _irregular_product(left, right)


def product_backward(grad: torch.Tensor, left: torch.Tensor, right: torch.Tensor, mask: Sequence[bool]) -> int:
    """``matmul_backward``: each gradient asked for is one product as large as the forward."""
    return (bool(mask[0]) + bool(mask[1])) * product(left, right)


def matrix_vector(matrix: torch.Tensor, vector: torch.Tensor) -> int:
    """``mv``: 2·M·N, or two for each stored element of a sparse matrix."""
    return 2 * non_zeros(matrix)


def inner_product(left: torch.Tensor, right: torch.Tensor) -> int:
    """``dot`` and ``vdot``: 2·N."""
    return 2 * left.numel()


def outer_product(left: torch.Tensor, right: torch.Tensor) -> int:
    """``addr``: adds an (M, 1) by (1, N) product, one multiply-add for each of its elements: 2·M·N.

    ``outer`` and ``ger`` have no rule. They multiply and add nothing, and torch runs them as the elementwise product of
    a column and a row, which nothing tells from any other elementwise product that broadcasts. ``linalg.vecdot`` of
    stacked vectors is an elementwise product and a reduction; of two vectors it is ``vdot``.
    """
    return 2 * left.numel() * right.numel()


def linear(values: torch.Tensor, weight: torch.Tensor) -> int:
    """``linear``: every row of *values* (…, in) times a weight (out, in) or (in,)."""
    if values.is_nested:
        rows = sum(prod(shape[:-1]) for shape in sizes_of(values))
        return 2 * rows * weight.numel()
    if weight.layout is not _STRIDED:
        return 2 * prod(values.shape[:-1]) * non_zeros(weight)
    return 2 * prod(values.shape[:-1]) * weight.numel()


def linear_backward(values: torch.Tensor, weight: torch.Tensor, mask: Sequence[bool]) -> int:
    """``linear_backward``: input and weight gradient cost one forward each; the bias's is a reduction."""
    return (bool(mask[0]) + bool(mask[1])) * linear(values, weight)


def linear_input_gradient(grad: torch.Tensor, weight: torch.Tensor) -> int:
    """Gradient of a linear layer's input from *grad* (…, out)."""
    return 2 * prod(grad.shape[:-1]) * weight.numel()


def linear_from_result(values: torch.Tensor, out: torch.Tensor) -> int:
    """A linear layer whose weight is packed out of sight: (…, in) to (…, out)."""
    return 2 * out.numel() * int(values.shape[-1])


def grouped_product(
    left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None, *, times: int = 1
) -> int | Work:
    """``_grouped_mm``: groups that differ in one size; *offsets* holds the cumulative ends of the groups.

    Rows (or columns) behind the last offset belong to no group and are not computed. Where the offsets cannot be read,
    the groups are taken to fill the tensor. The FLOPs are those of so many *times* the product.
    """
    if left.dim() == 3 and right.dim() == 3:
        batch, rows, inner = left.shape
        return times * 2 * batch * rows * inner * int(right.shape[2])
    if left.dim() == 2 and right.dim() == 3:  # rows are grouped: (T, K) by (G, K, N)
        grouped, others = int(left.shape[0]), int(left.shape[1]) * int(right.shape[2])
    elif left.dim() == 3:  # columns are grouped: (G, M, K) by (K, T)
        grouped, others = int(right.shape[1]), int(left.shape[1]) * int(left.shape[2])
    else:  # the inner size is grouped: (M, T) by (T, N), giving (G, M, N)
        grouped, others = int(left.shape[1]), int(left.shape[0]) * int(right.shape[1])
    whole = grouped
    if offsets is not None:
        with suppress(Unreadable):
            grouped = min(grouped, host_integers(offsets)[-1])
    flops = times * 2 * grouped * others
    return flops if grouped == whole else Work(flops, by_values=True)


def _packed_elements(tensor: torch.Tensor) -> int:
    """Numbers in one element of *tensor*: two where a byte holds a pair of 4-bit floats."""
    return 2 if tensor.dtype is _PAIR_OF_FLOAT4 else 1


def scaled_product(left: torch.Tensor, right: torch.Tensor) -> int:
    """``_scaled_mm``: 2·M·K·N, where 4-bit operands hold two of K in each element."""
    return _packed_elements(left) * product(left, right)


def scaled_grouped_product(left: torch.Tensor, right: torch.Tensor, offsets: torch.Tensor | None) -> int | Work:
    """``_scaled_grouped_mm``: ``_grouped_mm`` with 8- or 4-bit operands."""
    return grouped_product(left, right, offsets, times=_packed_elements(left))


def list_product(lefts: Sequence[torch.Tensor], rights: Sequence[torch.Tensor]) -> int:
    """``_foreach_mm``: the products of two lists, pair by pair."""
    return sum(product(left, right) for left, right in zip(lefts, rights, strict=True))


def chain_product(matrices: Sequence[torch.Tensor]) -> int:
    """``linalg_multi_dot`` and ``chain_matmul``, in the cheapest order, which is the one torch picks."""
    sizes = [int(matrix.shape[0]) if matrix.dim() > 1 else 1 for matrix in matrices[:1]]
    for matrix in matrices:
        sizes.append(int(matrix.shape[-1]) if matrix.dim() > 1 or matrix is matrices[0] else 1)
    count = len(matrices)
    cheapest = [[0] * count for _ in range(count)]
    for length in range(1, count):
        for start in range(count - length):
            stop = start + length
            cheapest[start][stop] = min(
                cheapest[start][split]
                + cheapest[split + 1][stop]
                + 2 * sizes[start] * sizes[split + 1] * sizes[stop + 1]
                for split in range(start, stop)
            )
    return cheapest[0][count - 1]


def packed_columns(values: torch.Tensor, out: torch.Tensor) -> int:
    """A product (M, K) by (K, N) whose right side is packed (int4, int8), from its left side and its result."""
    return 2 * out.numel() * int(values.shape[-1])


def two_of_four(compressed: torch.Tensor, out: torch.Tensor) -> int:
    """A product with a 2:4 sparse matrix whose stored half has K/2 columns: two FLOPs for each stored element used."""
    return 2 * out.numel() * int(compressed.shape[1])


def two_of_four_by_dense(dense: torch.Tensor, out: torch.Tensor) -> int:
    """A product by cuSPARSELt: its compressed side is opaque, the dense side is (K, N); half of K is stored."""
    return out.numel() * int(dense.shape[0])


def sampled_product(pattern: torch.Tensor, left: torch.Tensor) -> int:
    """``sparse_sampled_addmm``: an inner product of length K for each stored element of the pattern."""
    return 2 * non_zeros(pattern) * int(left.shape[-1])


def sparse_reduce_backward(pattern: torch.Tensor, grad: torch.Tensor, mask: Sequence[bool]) -> int:
    """Backward of ``torch.sparse.mm(…, reduce)``: a multiply-add per stored element and column for each gradient."""
    return (bool(mask[0]) + bool(mask[1])) * 2 * non_zeros(pattern) * int(grad.shape[-1])


def add_two_products(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, d: torch.Tensor) -> int:
    """``a @ b + c @ d`` in one operator."""
    return product(a, b) + product(c, d)


def bilinear(first: torch.Tensor, second: torch.Tensor, weight: torch.Tensor) -> int:
    """``x1 · W · x2``: the first input meets the weight (out, in1, in2), what comes out meets the second input."""
    outputs, first_size, second_size = weight.shape
    return 2 * (first.numel() // first_size) * outputs * second_size * (first_size + 1)


def trilinear(
    first: torch.Tensor,
    second: torch.Tensor,
    third: torch.Tensor,
    expand_first: Sequence[int],
    expand_second: Sequence[int],
    expand_third: Sequence[int],
    summed: Sequence[int],
    unrolled: int,
) -> int:
    """``_trilinear``: two pairwise products; sums the third factor has no part in are done by the first of them."""
    rank = first.dim() + len(expand_first)

    def placed(tensor: torch.Tensor, expanded: Sequence[int]) -> list[int]:
        shape = iter(tensor.shape)
        return [1 if dim in expanded else int(next(shape)) for dim in range(rank)]

    a, b, c = placed(first, expand_first), placed(second, expand_second), placed(third, expand_third)
    turns = max(a[unrolled], b[unrolled], c[unrolled])
    a[unrolled] = b[unrolled] = c[unrolled] = 1
    early = {dim for dim in summed if dim in expand_third and dim != unrolled}
    pair = _contraction(a, b, early)
    left = [1 if dim in early else max(a[dim], b[dim]) for dim in range(rank)]
    return turns * (pair + _contraction(left, c, set(summed) - early - {unrolled}))


def _contraction(left: Sequence[int], right: Sequence[int], summed: Collection[int]) -> int:
    """FLOPs of one pairwise product: elementwise, so none, unless it sums; one side's own sums are done before it."""
    if not summed:
        return 0
    sizes = zip(left, right, strict=True)
    return 2 * prod(1 if dim in summed and min(pair) == 1 else max(pair) for dim, pair in enumerate(sizes))


def affine_grid(theta: torch.Tensor, grid: torch.Tensor) -> int:
    """``affine_grid``: a (d, d + 1) matrix times the homogeneous coordinates of every point of the grid (N, …, d)."""
    return 2 * grid.numel() * int(theta.shape[2])


def linear_combination(values: torch.Tensor, coefficients: torch.Tensor) -> int:
    """Sums of the *values* (n, …) with coefficients (m, n): an (m, n) by (n, …) product."""
    return 2 * int(coefficients.shape[0]) * values.numel()


def _pair(left: str, right: str, *, dtype: str | None = None) -> Rule:
    return Rule(product, (left, right), dtype or left)


_READING_DIRECTLY = (mm, addmm, bmm, baddbmm)
"""They look for complex numbers themselves."""

_REAL_RULES: dict[str, Rule] = {
    "aten::mm": Rule(mm, dtype="self"),
    "aten::addmm": Rule(addmm, dtype="mat1"),
    "aten::bmm": Rule(bmm, dtype="self"),
    "aten::baddbmm": Rule(baddbmm, dtype="batch1"),
    "aten::addbmm": Rule(baddbmm, dtype="batch1"),
    "aten::_addmm_activation": Rule(addmm, dtype="mat1"),
    "aten::_int_mm": _pair("self", "mat2"),
    "aten::_scaled_mm": Rule(scaled_product, ("self", "mat2"), "self"),
    "aten::_scaled_mm_v2": Rule(scaled_product, ("self", "mat2"), "self"),
    "aten::mv": Rule(matrix_vector, ("self", "vec"), "self"),
    "aten::addmv": Rule(matrix_vector, ("mat", "vec"), "mat"),
    "aten::addmv_": Rule(matrix_vector, ("mat", "vec"), "mat"),
    "aten::dot": Rule(inner_product, ("self", "tensor"), "self"),
    "aten::vdot": Rule(inner_product, ("self", "other"), "self"),
    "aten::addr": Rule(outer_product, ("vec1", "vec2"), "vec1"),
    "aten::addr_": Rule(outer_product, ("vec1", "vec2"), "vec1"),
    "aten::addmm_": Rule(addmm, dtype="mat1"),
    "aten::baddbmm_": Rule(baddbmm, dtype="batch1"),
    "aten::addbmm_": Rule(baddbmm, dtype="batch1"),
    "aten::matmul": _pair("self", "other"),
    "aten::linalg_matmul": _pair("self", "other"),
    "aten::matmul_backward": Rule(product_backward, ("grad", "self", "other", "mask"), "grad"),
    "aten::inner": Rule(
        lambda a, b: 2 * a.numel() * (b.numel() // max(int(b.shape[-1]), 1)), ("self", "other"), "self"
    ),
    "aten::linear": Rule(linear, ("input", "weight"), "input"),
    "aten::linear_backward": Rule(linear_backward, ("self", "weight", "output_mask"), "grad_output"),
    # Deprecated int8 and float16 layers of FBGEMM, which have no kernel per device
    "aten::fbgemm_linear_int8_weight": Rule(linear_from_result, ("input", RESULT), torch.int8),
    "aten::fbgemm_linear_int8_weight_fp32_activation": Rule(linear_from_result, ("input", RESULT), torch.int8),
    "aten::fbgemm_linear_fp16_weight": Rule(linear_from_result, ("input", RESULT), "input"),
    "aten::fbgemm_linear_fp16_weight_fp32_activation": Rule(linear_from_result, ("input", RESULT), "input"),
    "aten::mkldnn_linear": Rule(linear, ("self", "weight"), "self"),
    "aten::mkldnn_linear_backward": Rule(linear_backward, ("self", "weight", "output_mask"), "grad_output"),
    "aten::mkldnn_linear_backward_input": Rule(linear_input_gradient, ("grad_output", "weight"), "grad_output"),
    "aten::mkldnn_linear_backward_weights": Rule(linear, ("input", "weight"), "grad_output"),
    "aten::_grouped_mm": Rule(grouped_product, ("self", "mat2", "offs"), "self"),
    "aten::_scaled_grouped_mm": Rule(scaled_grouped_product, ("self", "mat2", "offs"), "self"),
    "aten::_scaled_grouped_mm_v2": Rule(scaled_grouped_product, ("self", "mat2", "offs"), "self"),
    "aten::_foreach_mm": Rule(list_product, ("self", "mat2"), "self"),
    "aten::chain_matmul": Rule(chain_product, ("matrices",), "matrices"),
    "aten::linalg_multi_dot": Rule(chain_product, ("tensors",), "tensors"),
    "aten::bilinear": Rule(bilinear, ("input1", "input2", "weight"), "input1"),
    # A grid of homogeneous points (…, 3 or 4 coordinates) times each sample's matrix
    "aten::affine_grid_generator": Rule(affine_grid, ("theta", RESULT), "theta"),
    "aten::cudnn_affine_grid_generator": Rule(affine_grid, ("theta", RESULT), "theta"),
    "aten::cudnn_affine_grid_generator_backward": Rule(affine_grid, (RESULT, "grad"), "grad"),
    "aten::_compute_linear_combination": Rule(linear_combination, ("input", "coefficients"), "input"),
    "aten::_trilinear": Rule(
        trilinear, ("i1", "i2", "i3", "expand1", "expand2", "expand3", "sumdim", "unroll_dim"), "i1"
    ),
    # Weights packed as int4 or int8: activations and accumulation stay in the activations' dtype.
    "aten::_weight_int4pack_mm": Rule(packed_columns, ("self", RESULT), "self"),
    "aten::_weight_int4pack_mm_for_cpu": Rule(packed_columns, ("self", RESULT), "self"),
    "aten::_weight_int4pack_mm_with_scales_and_zeros": Rule(packed_columns, ("self", RESULT), "self"),
    "aten::_weight_int8pack_mm": Rule(packed_columns, ("self", RESULT), "self"),
    "aten::_dyn_quant_matmul_4bit": Rule(packed_columns, ("inp", RESULT), "inp"),
    "quantized::int4mm_packed_weight_cpu": Rule(packed_columns, ("self", RESULT), "self"),
    "aten::_mixed_dtypes_linear": Rule(linear_from_result, ("input", RESULT), "input"),
    # Sparse
    "aten::_sparse_mm": _pair("sparse", "dense", dtype="dense"),
    "aten::_sparse_addmm": _pair("mat1", "mat2"),
    "aten::_sparse_sparse_matmul": _pair("self", "other"),
    "aten::hspmm": _pair("mat1", "mat2"),
    "aten::smm": _pair("self", "mat2"),
    "aten::sspaddmm": _pair("mat1", "mat2"),
    "aten::sparse_sampled_addmm": Rule(sampled_product, ("self", "mat1"), "mat1"),
    "aten::_sparse_mm_reduce_impl": _pair("self", "other"),
    "aten::_sparse_mm_reduce_impl_backward": Rule(
        sparse_reduce_backward, ("self", "grad_out", "output_mask"), "grad_out"
    ),
    "aten::_sparse_semi_structured_linear": Rule(two_of_four, ("weight", RESULT), "input"),
    "aten::_sparse_semi_structured_mm": Rule(two_of_four, ("mat1", RESULT), "mat1"),
    "aten::_sparse_semi_structured_addmm": Rule(two_of_four, ("mat1", RESULT), "mat1"),
    "aten::_cslt_sparse_mm": Rule(two_of_four_by_dense, ("dense_B", RESULT), "dense_B"),
    # Called by the compiler's CPU and CUDA code
    "inductor::_mm_plus_mm": Rule(add_two_products, ("a", "b", "c", "d"), "a"),
    "mkldnn::_linear_pointwise": Rule(linear_from_result, ("X", RESULT), "X"),
    "mkl::_mkl_linear": Rule(linear_from_result, ("X", RESULT), "X"),
    "onednn::linear_dynamic_fp16": Rule(linear_from_result, ("x", RESULT), "x"),
    "onednn::linear_relu_dynamic_fp16": Rule(linear_from_result, ("x", RESULT), "x"),
}

MATMUL_RULES: dict[str, Rule] = {
    name: rule if rule.flops in _READING_DIRECTLY else replace(rule, complex_factor=COMPLEX_PRODUCT)
    for name, rule in _REAL_RULES.items()
}
