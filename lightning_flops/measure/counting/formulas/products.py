"""Matrix products, convolutions, linear and recurrent layers; estimates, where FLOPs depend on the algorithm inside.

A product of an (M, K) and a (K, N) matrix is 2·M·K·N FLOPs; adding a bias or a scaled third matrix is elementwise and
counts nothing. A product of complex numbers is four times as much, and integer kernels count like others. Sparse
operands count their stored elements. A recurrent layer's tokens meet each of its weight matrices once; its gates'
elementwise work counts nothing. ``outer`` has no rule: torch runs it as the elementwise product of a column and a row.

Each output element of a convolution meets C_in/groups × (kernel size) weights; each input element of a transposed one
meets C_out/groups × (kernel size). Taps that fall on padding count like the others, as everywhere in the field. Torch's
own rule for the backward leaves the groups out. A complex convolution is three real ones, which torch runs.

Estimates are the leading terms that textbooks give, marked as such. Matrix decompositions follow Golub and Van Loan,
Matrix Computations (4th edition); an m-by-n matrix with m >= n, or its transpose. Each count is rounded down to a whole
number per call. Of complex numbers every term is four times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from fractions import Fraction
from functools import partial
from itertools import zip_longest
from math import log2, prod
from typing import Any

import torch
from torch import Tensor

from lightning_flops.measure.counting.formulas.contract import RESULT, Rule, Unreadable, Work, host_integers, rules
from lightning_flops.measure.torch_private.needed import PIECES, is_fake, modes_off

_STRIDED = torch.strided
_PAIR_OF_FLOAT4 = getattr(torch, "float4_e2m1fn_x2", None)  # not in older torch


def sizes_of(tensor: Tensor) -> list[tuple[int, ...]]:
    """Shapes that a tensor holds: its own, or one for each component of a nested tensor."""
    return [tuple(one.shape) for one in (tensor.unbind() if tensor.is_nested else (tensor,))]


def rows_of(values: Tensor) -> int:
    """Rows of the last dimension, of all components."""
    return sum(prod(shape[:-1]) for shape in sizes_of(values))


def non_zeros(tensor: Tensor) -> int:
    """Stored elements of a tensor of any layout: all of a dense one, whole blocks of a blocked one.

    Raises:
        Unreadable: it is sparse, and has no values.
    """
    if tensor.layout is not _STRIDED and (tensor.is_meta or is_fake(type(tensor))):
        raise Unreadable("how many elements a sparse tensor stores follows from its values")
    if tensor.layout not in PIECES:
        return tensor.numel()
    with modes_off():
        return int(getattr(tensor, PIECES[tensor.layout][-1])().numel())


def _shape_product(left: Sequence[int], right: Sequence[int]) -> int:
    """``matmul`` of two shapes, batch dimensions broadcast, vectors allowed on either side."""
    batches = [*zip_longest(reversed(left[:-2]), reversed(right[:-2]), fillvalue=1)]
    if left[-1] != right[-2:][0] or any(a != b and 1 not in (a, b) for a, b in batches):
        raise Unreadable("the sizes of its arguments do not fit together")
    rows, columns = (left[-2] if len(left) > 1 else 1), (right[-1] if len(right) > 1 else 1)
    return 2 * prod(a if b == 1 else b for a, b in batches) * rows * left[-1] * columns


def product(left: Tensor, right: Tensor) -> int:
    """Products in all their forms: vectors, matrices, broadcast stacks, nested operands, one sparse operand.

    Nested operands are multiplied component by component; a plain side is shared by all.
    """
    if not (left.is_nested or right.is_nested):
        if _STRIDED not in (left.layout, right.layout):
            raise Unreadable("a product of two sparse matrices has no formula")
        if left.layout is not _STRIDED:
            return 2 * non_zeros(left) * (int(right.shape[-1]) if right.dim() > 1 else 1)
        if right.layout is not _STRIDED:
            return 2 * non_zeros(right) * prod(left.shape[:-1])
        return _shape_product(left.shape, right.shape)
    lefts, rights = sizes_of(left), sizes_of(right)
    if not right.is_nested and right.dim() == 3:
        rights = [tuple(right.shape[1:])]
    if len(rights) == 1:
        rights = rights * len(lefts)
    elif len(lefts) == 1:
        lefts = lefts * len(rights)
    return sum(_shape_product(a, b) for a, b in zip(lefts, rights, strict=True))


def linear(values: Tensor, weight: Tensor) -> int:
    """Every row of *values* (…, in) times a weight (out, in) or (in,)."""
    if sizes_of(values)[0][-1] not in weight.shape:
        raise Unreadable("the sizes of its arguments do not fit together")
    return 2 * rows_of(values) * non_zeros(weight)


def backward_of(forward: Callable[..., int]) -> Callable[..., int]:
    """Each gradient asked for of the first two operands is one product as large as the forward; a bias's is a sum."""
    return lambda left, right, mask: (bool(mask[0]) + bool(mask[1])) * forward(left, right)


def from_result(values: Tensor, out: Tensor) -> int:
    """Each element of *out* meets a row of *values*, (…, in): a right side that is packed, a grid, ``cdist``."""
    return 2 * out.numel() * int(values.shape[-1])


def _packed_elements(tensor: Tensor) -> int:
    """Numbers in one element of *tensor*: two where a byte holds a pair of 4-bit floats."""
    return 2 if tensor.dtype is _PAIR_OF_FLOAT4 else 1


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor | None, *, times: int = 1) -> int | Work:
    """``_grouped_mm``: groups that differ in one size; *offsets* holds the cumulative ends of the groups.

    Rows (or columns) behind the last offset belong to no group and are not computed. Where the offsets cannot be read,
    the groups are taken to fill the tensor.
    """
    times *= 2 * _packed_elements(left)
    dims = left.dim(), right.dim()
    # (G, M, K) by (G, K, N); rows are grouped, (T, K) by (G, K, N); columns, (G, M, K) by (K, T); or the inner size,
    # (M, T) by (T, N) giving (G, M, N). Where the left side alone has groups, each of its matrices meets some columns.
    whole = prod(left.shape[1:] if dims == (3, 2) else left.shape) * int(right.shape[-1])
    grouped = int({(2, 3): left.shape[0], (3, 2): right.shape[1], (2, 2): left.shape[1]}.get(dims, 0))
    if grouped and offsets is not None:
        with suppress(Unreadable):
            own = min(grouped, host_integers(offsets)[-1])
            return times * whole if own == grouped else Work(times * whole // grouped * own, by_values=True)
    return times * whole


def trilinear(first: Tensor, second: Tensor, third: Tensor, *dims: Any) -> int:
    """``_trilinear``: two pairwise products; sums the third factor has no part in are done by the first of them.

    *dims* are the dimensions that each factor lacks, those summed, and the one that is a loop.
    """
    *lacking, summed, unrolled = dims
    held = [[dim for dim in range(first.dim() + len(lacking[0])) if dim not in lacks] for lacks in lacking]
    size = {
        dim: length
        for dims, one in zip(held, (first, second, third), strict=True)
        for dim, length in zip(dims, one.shape, strict=True)
    }
    a, b, c = map(set, held)
    early = {dim for dim in summed if dim not in c and dim != unrolled}

    def product_of(left: set[int], right: set[int], over: set[int]) -> int:
        alone = over & (left ^ right)  # one side's own sums are done before it
        return 2 * prod(size[dim] for dim in (left | right | {unrolled}) - alone) if over else 0

    return product_of(a, b, early) + product_of((a | b) - early, c, {*summed} - early - {unrolled})


def layers(values: Tensor, weights: Sequence[Tensor]) -> int:
    """All layers and directions of a recurrent layer at once: *weights* lists their matrices and biases."""
    return 2 * rows_of(values) * sum(weight.numel() for weight in weights if weight.dim() == 2)


def layers_backward(values: Tensor, weights: Sequence[Tensor], mask: Sequence[bool]) -> int:
    """One forward's work down the sequence, one more for the weights if they are asked for.

    *mask* is (input, hidden, cell, weights): the backend walks the whole sequence for any of the first three, and the
    weights' gradients need that walk too.
    """
    return (1 + bool(mask[3])) * layers(values, weights) if any(mask) else 0


_FROM_RESULT = f"self|input|inp|X|x {RESULT}"

PRODUCT_RULES: dict[str, Rule] = {
    **rules(
        "mm bmm addmm addmm_ baddbmm baddbmm_ addbmm addbmm_ _addmm_activation _int_mm mv addmv addmv_ dot vdot matmul "
        "_sparse_mm _sparse_addmm _sparse_mm_reduce_impl hspmm sspaddmm "
        "symm_mem::_async_input_mm",
        product,
        "mat1|batch1|mat|sparse|self|a mat2|batch2|vec|tensor|other|dense|b",
    ),
    **rules("_scaled_mm _scaled_mm_v2", lambda left, right: _packed_elements(left) * product(left, right), "self mat2"),
    **rules("addr addr_", lambda left, right: 2 * left.numel() * right.numel(), "vec1 vec2"),
    **rules("matmul_backward", backward_of(product), "self other mask"),
    **rules(
        "linear mkldnn_linear mkldnn_linear_backward_input mkldnn_linear_backward_weights "
        "bitsandbytes::int8_linear_matmul bitsandbytes::int8_scaled_mm bitsandbytes::int8_mixed_scaled_mm",
        linear,
        "input|self|A|grad_output weight|B|CB",
    ),
    **rules("bitsandbytes::gemv_4bit", lambda values, shape: 2 * values.numel() * shape[0], "A shapeB"),
    **rules("linear_backward mkldnn_linear_backward", backward_of(linear), "self weight output_mask"),
    **rules("_foreach_mm", lambda lefts, rights: sum(map(product, lefts, rights)), "self mat2"),
    **rules(
        "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 transformers::grouped_mm_fallback",
        grouped_product,
        "self|input mat2|weight offs",
    ),
    **rules("transformers::grouped_mm_fallback_backward", partial(grouped_product, times=2), "input weight offs"),
    **rules("_trilinear", trilinear, "i1 i2 i3 expand1 expand2 expand3 sumdim unroll_dim"),
    # A grid of homogeneous points (…, 3 or 4 coordinates) times each sample's matrix, (d, d + 1)
    **rules("affine_grid_generator cudnn_affine_grid_generator", from_result, f"theta {RESULT}"),
    **rules("cudnn_affine_grid_generator_backward", from_result, f"{RESULT} grad"),
    # Weights packed as int4 or int8: activations and accumulation stay in the activations' dtype.
    **rules(
        "_weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int4pack_mm_with_scales_and_zeros _weight_int8pack_mm "
        "_dyn_quant_matmul_4bit _mixed_dtypes_linear quantized::int4mm_packed_weight_cpu mkldnn::_linear_pointwise "
        "mkl::_mkl_linear",
        from_result,
        _FROM_RESULT,
    ),
    # Sparse
    **rules("sparse_sampled_addmm", lambda left, pattern: 2 * non_zeros(pattern) * int(left.shape[-1]), "mat1 self"),
    **rules(
        "_sparse_semi_structured_linear _sparse_semi_structured_mm _sparse_semi_structured_addmm",
        lambda stored_half, out: 2 * out.numel() * int(stored_half.shape[1]),
        f"weight|mat1 {RESULT}",
    ),
    # Its compressed side is opaque, the dense side is (K, N); half of K is stored.
    **rules("_cslt_sparse_mm", lambda dense, out: out.numel() * int(dense.shape[0]), f"dense_B {RESULT}"),
    **rules("inductor::_mm_plus_mm", lambda a, b, c, d: product(a, b) + product(c, d), "a b c d"),
    # Recurrent layers
    **rules("mkldnn_rnn_layer", lambda x, *weights: layers(x, weights), "input weight0 weight1"),
    **rules("mkldnn_rnn_layer_backward", lambda x, *weights: 2 * layers(x, weights), "input weight1 weight2"),
    **rules("_cudnn_rnn miopen_rnn _lstm_mps", layers, "input weight|params"),
    **rules("_cudnn_rnn_backward miopen_rnn_backward", layers_backward, "input weight output_mask"),
    **rules("lstm_mps_backward", lambda x, weights: 2 * layers(x, weights), "input params"),
}


def plain(weight: Tensor, out: Tensor) -> int:
    """A convolution with weight (C_out, C_in/groups, …kernel) that makes *out*; also from a gradient of that shape."""
    return 2 * out.numel() * prod(weight.shape[1:])


def plain_backward(grad: Tensor, weight: Tensor, mask: Sequence[bool] | None) -> int:
    """Input and weight gradient cost one forward each, whatever the groups; *grad* is the input of a transposed one."""
    wanted = (True, True) if mask is None else mask[:2]
    return sum(map(bool, wanted)) * plain(weight, grad)


def reordered(values: Tensor, weight: Tensor, out: Tensor) -> int:
    """A convolution whose weight may have been laid out anew: only its number of elements is trusted.

    *out* is (N, C_out, …); the weight has C_out × C_in/groups × (kernel size) elements in any layout.
    """
    return 2 * (out.numel() // int(out.shape[1])) * weight.numel()


_DEFORMED = "the convolution's products; sampling the input at the offsets is left out"

CONVOLUTION_RULES: dict[str, Rule] = {
    **rules(
        "convolution _convolution convolution_overrideable",
        lambda values, weight, turned, out: plain(weight, values if turned else out),
        f"input weight transposed? {RESULT}",
    ),
    **rules(
        "convolution_backward convolution_backward_overrideable",
        lambda grad, values, weight, turned, mask: plain_backward(values if turned else grad, weight, mask),
        "grad_output input weight transposed output_mask",
    ),
    **rules(
        "conv_depthwise3d _conv_depthwise2d cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu "
        "miopen_convolution miopen_depthwise_convolution miopen_convolution_relu miopen_convolution_add_relu "
        "_mps_convolution _nnpack_spatial_convolution _slow_conv2d_forward slow_conv_dilated2d slow_conv_dilated3d "
        "slow_conv3d_forward",
        plain,
        f"weight {RESULT}",
    ),
    **rules(
        "cudnn_convolution_transpose miopen_convolution_transpose _mps_convolution_transpose slow_conv_transpose2d "
        "slow_conv_transpose3d",
        plain,
        "weight self",
    ),
    **rules("_slow_conv2d_backward mps_convolution_backward", plain_backward, "grad_output weight output_mask?"),
    **rules("mps_convolution_transpose_backward", plain_backward, "self weight output_mask"),
    # The compiler's CPU code
    **rules("mkldnn_convolution", reordered, f"self weight {RESULT}"),
    **rules("mkldnn::_convolution_pointwise mkldnn::_convolution_pointwise_", reordered, f"X W {RESULT}"),
    **rules("mkldnn::_convolution_transpose_pointwise", lambda x, w: reordered(x, w, x), "X W"),
    **rules("torchvision::deform_conv2d", plain, f"weight {RESULT}", estimate=_DEFORMED),
    **rules(
        "torchvision::_deform_conv2d_backward",
        lambda grad, weight: 2 * plain(weight, grad),
        "grad weight",
        estimate=_DEFORMED,
    ),
}


_FFT = "5 N log2 N for a complex transform of N points, half of that where one side is real"
_GRID = "one multiply-add for each neighbour of each output element; finding the neighbours is left out"
_POOLED = "a multiply-add for each of the four neighbours of each sampled point"
_DISTANCE = "one multiply-add for each pair of rows and each of their coordinates"

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2  # grid_sample's interpolation_mode


#: A decomposition's terms: a number, and the powers of the longer and of the shorter side that it is times.
Terms = Sequence[tuple[Fraction | int, int, int]]

_LU: Terms = [(1, 1, 2), (Fraction(-1, 3), 0, 3)]  # two thirds of n³ for a square matrix
_REFLECTIONS: Terms = [(2, 1, 2), (Fraction(-2, 3), 0, 3)]  # the triangular factor alone, as of ``geqrf``
#: Golub-Reinsch: the values alone, thin and full factors.
_SVD: Sequence[Terms] = (
    [(4, 1, 2), (Fraction(-4, 3), 0, 3)],
    [(14, 1, 2), (8, 0, 3)],
    [(4, 2, 1), (8, 1, 2), (9, 0, 3)],
)


def decomposition(terms: Terms, matrix: Tensor) -> int:
    """A decomposition of a matrix, or of several, by its leading *terms*."""
    shorter, longer = sorted(map(int, matrix.shape[-2:]))
    return int(prod(matrix.shape[:-2]) * sum(number * longer**m * shorter**n for number, m, n in terms))


def triangular_solves(count: int, factor: Tensor, right: Tensor) -> int:
    """*count* triangular solves, n² for each column of the right side."""
    size = int(factor.shape[-1])
    return count * size * size * max(right.numel() // max(size, 1), prod(factor.shape[:-2]))


def qr(matrix: Tensor, mode: str) -> int:
    """``linalg_qr``: k reflections, and Q of c columns, unless only R is asked for: 4·m·c·k − 2·(m + c)·k² + 4·k³/3."""
    m, k = int(matrix.shape[-2]), min(matrix.shape[-2:])
    columns = m if mode == "complete" else k
    terms = 4 * m * columns * k - 2 * (m + columns) * k * k + Fraction(4 * k**3, 3)
    return decomposition(_REFLECTIONS, matrix) + (0 if mode == "r" else int(prod(matrix.shape[:-2]) * terms))


def fourier(share: int, values: Tensor, dims: Sequence[int]) -> Work:
    """A transform over *dims* together; half of it where one side, whose size this is, is real."""
    points = prod(int(values.shape[dim]) for dim in dims)
    return Work(int(5 * points * log2(points) * (values.numel() / points / share)) if points > 1 else 0)


def grid_sample(values: Tensor, mode: int, out: Tensor) -> int:
    """FLOPs of sampling *values*, (batch, channels, …), at a grid, with the result *out*.

    A bilinear element of *out* meets 4 neighbours (8 in 3-D), a bicubic one 16 and then 4 rows, a nearest one none.
    """
    return 2 * {_NEAREST: 0, _BICUBIC: 20}.get(mode, 4 if values.dim() == 4 else 8) * out.numel()


def grid_sample_backward(grad: Tensor, values: Tensor, mode: int, mask: Sequence[bool]) -> int:
    """One forward's work for the input's gradient, one for each coordinate of the grid's gradient."""
    return (bool(mask[0]) + (values.dim() - 2) * bool(mask[1])) * grid_sample(values, mode, grad)


def pooled_samples(pooled: Tensor, sampling_ratio: int) -> int:
    """``roi_align`` of *pooled* bins, or its backward: each averages ratio² points, each of four neighbours."""
    if sampling_ratio <= 0:
        raise Unreadable("how many points it samples in a bin follows from the boxes' sizes")
    return 2 * 4 * sampling_ratio**2 * pooled.numel()


def _golub(names: str, flops: Callable[..., int], arguments: str = "self|A") -> dict[str, Rule]:
    return rules(names, flops, arguments, estimate="leading terms of Golub and Van Loan, Matrix Computations")


def _cubes(names: str, terms: Fraction | int) -> dict[str, Rule]:
    return _golub(names, partial(decomposition, [(terms, 0, 3)]))


ESTIMATE_RULES: dict[str, Rule] = {
    # The estimate is of complex numbers already.
    **rules("_fft_c2c", partial(fourier, 1), "self dim", _FFT),
    **rules("_fft_r2c", partial(fourier, 2), "self dim", _FFT),
    **rules("_fft_c2r", partial(fourier, 2), f"{RESULT} dim", _FFT),
    **rules(
        "grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback cudnn_grid_sampler",
        lambda values, mode, out: grid_sample(values, mode or _BILINEAR, out),
        f"input|self interpolation_mode? {RESULT}",
        estimate=_GRID,
    ),
    **rules(
        "grid_sampler_2d_backward grid_sampler_3d_backward _grid_sampler_2d_cpu_fallback_backward "
        "cudnn_grid_sampler_backward",
        lambda grad, values, mode, mask: grid_sample_backward(grad, values, mode or _BILINEAR, mask or (True, True)),
        "grad_output input|self interpolation_mode? output_mask?",
        estimate=_GRID,
    ),
    **rules("torchvision::roi_align", pooled_samples, f"{RESULT} sampling_ratio", estimate=_POOLED),
    **rules("torchvision::_roi_align_backward", pooled_samples, "grad sampling_ratio", estimate=_POOLED),
    # Of P and R rows of M coordinates 2·B·P·R·M; a side's gradient is as much.
    **rules("_cdist_forward _euclidean_dist", from_result, f"x1 {RESULT}", estimate=_DISTANCE),
    **rules("_cdist_backward", from_result, "x1 grad|grad_output", estimate=_DISTANCE),
    **_cubes("cholesky linalg_cholesky_ex", Fraction(1, 3)),
    **_cubes("cholesky_inverse", Fraction(2, 3)),
    **_cubes("linalg_inv_ex", 2),
    **_cubes("linalg_eig", 25),
    **_cubes("linalg_eigvals _linalg_eigvals", 10),
    **_golub("linalg_solve_triangular", partial(triangular_solves, 1), "self B"),
    **_golub("triangular_solve", partial(triangular_solves, 1), "A self"),
    **_golub("cholesky_solve", partial(triangular_solves, 2), "input2 self"),
    **_golub("_cholesky_solve_helper", partial(triangular_solves, 2), "A self"),
    **_golub("linalg_lu_solve", partial(triangular_solves, 2), "LU B"),
    **_golub("linalg_lu linalg_lu_factor_ex _linalg_det _linalg_slogdet", partial(decomposition, _LU)),
    **_golub(
        "_linalg_solve_ex",
        lambda matrix, right: decomposition(_LU, matrix) + triangular_solves(2, matrix, right),
        "A B",
    ),
    **_golub("geqrf", partial(decomposition, _REFLECTIONS)),
    **_golub("linalg_qr", qr, "A mode"),
    **_golub(
        "_linalg_svd",
        lambda matrix, full, vectors: decomposition(_SVD[vectors * (1 + full)], matrix),
        "A full_matrices compute_uv",
    ),
    # Tridiagonal QR
    **_golub(
        "_linalg_eigh",
        lambda matrix, vectors: decomposition([(9 if vectors else Fraction(4, 3), 0, 3)], matrix),
        "A compute_v",
    ),
}
