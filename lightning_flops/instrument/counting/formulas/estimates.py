"""Operators whose FLOPs depend on the algorithm inside: the leading terms that textbooks give, marked as estimates.

Matrix decompositions follow Golub and Van Loan, Matrix Computations (4th edition); an m-by-n matrix with m >= n, or its
transpose. Each count is rounded down to a whole number per call. Of complex numbers every term is four times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import log2, prod

import torch

from lightning_flops.instrument.counting.formulas.contract import COMPLEX_PRODUCT, RESULT, Rule

_GOLUB = "leading terms of Golub and Van Loan, Matrix Computations"
_FFT = "5 N log2 N for a complex transform of N points, half of that where one side is real"
_EXPONENTIAL = (
    "five products for a Taylor polynomial of degree 18 (Bader, Blanes and Casas 2019); matrices of small norm take "
    "fewer, and those of large norm squarings, which are left out"
)
_GRID = "one multiply-add for each neighbour of each output element; finding the neighbours is left out"
_DISTANCE = "one multiply-add for each pair of rows and each of their coordinates"

_NEAREST, _BICUBIC = 1, 2  # grid_sample's interpolation_mode


def _batch(matrix: torch.Tensor) -> int:
    return prod(matrix.shape[:-2])


def _tall(matrix: torch.Tensor) -> tuple[int, int]:
    rows, columns = int(matrix.shape[-2]), int(matrix.shape[-1])
    return max(rows, columns), min(rows, columns)


def _per_square(terms: Fraction | int) -> Callable[[torch.Tensor], int]:
    """A decomposition of an n-by-n matrix that takes *terms* × n³."""

    def flops(matrix: torch.Tensor) -> int:
        return int(terms * _batch(matrix) * int(matrix.shape[-1]) ** 3)

    return flops


def _right_sides(factor: torch.Tensor, right: torch.Tensor) -> int:
    """Columns to solve for, the batch included: elements of *right* over the size of a column."""
    return right.numel() // max(int(factor.shape[-1]), 1)


def _triangular_solves(count: int) -> Callable[[torch.Tensor, torch.Tensor], int]:
    """*count* triangular solves, n² for each column of the right side."""

    def flops(factor: torch.Tensor, right: torch.Tensor) -> int:
        size = int(factor.shape[-1])
        columns = max(_right_sides(factor, right), _batch(factor))
        return count * size * size * columns

    return flops


def lu_factor(matrix: torch.Tensor) -> int:
    """m·n² − n³/3: two thirds of n³ for a square matrix."""
    m, n = _tall(matrix)
    return int(_batch(matrix) * (m * n * n - Fraction(n**3, 3)))


def solve(matrix: torch.Tensor, right: torch.Tensor) -> int:
    """LU, then two triangular solves for each column."""
    return lu_factor(matrix) + _triangular_solves(2)(matrix, right)


def householder(matrix: torch.Tensor) -> int:
    """The triangular factor by reflections (``geqrf``): 2·n²·(m − n/3)."""
    m, n = _tall(matrix)
    return int(_batch(matrix) * 2 * n * n * (m - Fraction(n, 3)))


def form_q(reflectors: torch.Tensor, columns: int, count: int) -> int:
    """Q from its *count* reflections, as *columns* columns of m rows: 4·m·c·k − 2·(m + c)·k² + 4·k³/3."""
    m, k = int(reflectors.shape[-2]), count
    terms = 4 * m * columns * k - 2 * (m + columns) * k * k + Fraction(4 * k**3, 3)
    return int(_batch(reflectors) * terms)


def qr(matrix: torch.Tensor, mode: str) -> int:
    """``linalg_qr``: the reflections, and Q unless only R is asked for."""
    m, n = int(matrix.shape[-2]), int(matrix.shape[-1])
    count = min(m, n)
    flops = householder(matrix)
    if mode == "r":
        return flops
    return flops + form_q(matrix, m if mode == "complete" else count, count)


def householder_product(reflectors: torch.Tensor, tau: torch.Tensor) -> int:
    """``orgqr``: as many columns as the reflectors have."""
    return form_q(reflectors, int(reflectors.shape[-1]), int(tau.shape[-1]))


def apply_q(reflectors: torch.Tensor, tau: torch.Tensor, other: torch.Tensor) -> int:
    """``ormqr``: each reflection is 4·m FLOPs a column, less what lies above it: 4·m·c·k − 2·c·k²."""
    m, k = int(reflectors.shape[-2]), int(tau.shape[-1])
    columns = other.numel() // max(m, 1)
    return columns * (4 * m * k - 2 * k * k)


def svd(matrix: torch.Tensor, full: bool, vectors: bool) -> int:
    """Golub-Reinsch: 4mn² − 4n³/3 for values, 14mn² + 8n³ thin, 4m²n + 8mn² + 9n³ full."""
    m, n = _tall(matrix)
    if not vectors:
        terms: Fraction | int = 4 * m * n * n - Fraction(4 * n**3, 3)
    elif full:
        terms = 4 * m * m * n + 8 * m * n * n + 9 * n**3
    else:
        terms = 14 * m * n * n + 8 * n**3
    return int(_batch(matrix) * terms)


def symmetric_eigen(matrix: torch.Tensor, vectors: bool) -> int:
    """Tridiagonal QR: 4n³/3 for values, 9n³ with vectors."""
    return _per_square(9 if vectors else Fraction(4, 3))(matrix)


def least_squares(matrix: torch.Tensor, right: torch.Tensor) -> int:
    """Householder QR, Qᵀ·b (4mn − 2n² a column) and a triangular solve (n² a column)."""
    m, n = _tall(matrix)
    columns = right.numel() // max(int(matrix.shape[-2]), 1)
    return householder(matrix) + columns * (4 * m * n - n * n)


def pseudo_inverse(matrix: torch.Tensor, hermitian: bool) -> int:
    """``pinv``: a thin singular value (or eigenvalue) decomposition, and the product of its factors, 2·m·n·k."""
    m, n = _tall(matrix)
    factors = symmetric_eigen(matrix, True) if hermitian else svd(matrix, False, True)
    return factors + 2 * _batch(matrix) * m * n * n


def matrix_exponential(matrix: torch.Tensor) -> int:
    """The five products of a Taylor polynomial of degree 18: 10·n³."""
    return _per_square(10)(matrix)


def _fft(points: int, transforms: float) -> int:
    return int(5 * points * log2(points) * transforms) if points > 1 else 0


def complex_fft(values: torch.Tensor, dims: Sequence[int]) -> int:
    """``_fft_c2c`` over *dims* together."""
    points = prod(int(values.shape[dim]) for dim in dims)
    return _fft(points, values.numel() / max(points, 1))


def real_to_complex_fft(values: torch.Tensor, dims: Sequence[int]) -> int:
    """``_fft_r2c``: half of a complex transform of the real input's size."""
    points = prod(int(values.shape[dim]) for dim in dims)
    return _fft(points, values.numel() / max(points, 1) / 2)


def complex_to_real_fft(out: torch.Tensor, dims: Sequence[int]) -> int:
    """``_fft_c2r``: half of a complex transform of the real result's size."""
    return real_to_complex_fft(out, dims)


def _neighbours(dims: int, mode: int) -> int:
    if mode == _NEAREST:
        return 0
    # Two-dimensional bicubic: four rows of four neighbours, then the four rows.
    return 20 if mode == _BICUBIC else int(2**dims)


def grid_sample(values: torch.Tensor, mode: int, out: torch.Tensor) -> int:
    """Bilinear meets 4 neighbours (8 in 3-D), bicubic 16 and then 4 rows, nearest none."""
    return 2 * _neighbours(values.dim() - 2, mode) * out.numel()


def grid_sample_backward(grad: torch.Tensor, values: torch.Tensor, mode: int, mask: Sequence[bool]) -> int:
    """One forward's work for the input's gradient, one for each coordinate of the grid's gradient."""
    dims = values.dim() - 2
    return (bool(mask[0]) + dims * bool(mask[1])) * 2 * _neighbours(dims, mode) * grad.numel()


def pair_distances(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor) -> int:
    """``cdist``: 2·B·P·R·M for P and R rows of M coordinates; *out* is (…, P, R)."""
    return 2 * out.numel() * int(first.shape[-1])


def pair_distances_backward(grad: torch.Tensor, first: torch.Tensor) -> int:
    """``_cdist_backward``: the gradient of one side, as much as the forward."""
    return 2 * grad.numel() * int(first.shape[-1])


def own_distances(values: torch.Tensor) -> int:
    """``pdist``: every pair of the n rows once."""
    rows, size = values.shape
    return rows * (rows - 1) * int(size)


def _golub(flops: Callable[..., int], *arguments: str) -> Rule:
    return Rule(flops, arguments, arguments[0], _GOLUB, COMPLEX_PRODUCT)


def _grid(arguments: tuple[str, ...], flops: Callable[..., int] = grid_sample) -> Rule:
    return Rule(flops, arguments, arguments[0], _GRID)


_GRID_BACKWARD = ("grad_output", "input", "interpolation_mode", "output_mask")
_BOTH = (True, True)

ESTIMATE_RULES: dict[str, Rule] = {
    "aten::_fft_c2c": Rule(complex_fft, ("self", "dim"), "self", _FFT),
    "aten::_fft_r2c": Rule(real_to_complex_fft, ("self", "dim"), "self", _FFT),
    "aten::_fft_c2r": Rule(complex_to_real_fft, (RESULT, "dim"), "self", _FFT),
    "prims::fft_c2c": Rule(complex_fft, ("self", "dim"), "self", _FFT),
    "prims::fft_r2c": Rule(real_to_complex_fft, ("self", "dim"), "self", _FFT),
    "prims::fft_c2r": Rule(complex_to_real_fft, (RESULT, "dim"), "self", _FFT),
    "aten::grid_sampler": _grid(("input", "interpolation_mode", RESULT)),
    "aten::grid_sampler_2d": _grid(("input", "interpolation_mode", RESULT)),
    "aten::grid_sampler_3d": _grid(("input", "interpolation_mode", RESULT)),
    "aten::_grid_sampler_2d_cpu_fallback": _grid(("input", "interpolation_mode", RESULT)),
    "aten::cudnn_grid_sampler": _grid(("self", RESULT), lambda values, out: grid_sample(values, 0, out)),
    "aten::grid_sampler_2d_backward": _grid(_GRID_BACKWARD, grid_sample_backward),
    "aten::grid_sampler_3d_backward": _grid(_GRID_BACKWARD, grid_sample_backward),
    "aten::_grid_sampler_2d_cpu_fallback_backward": _grid(
        _GRID_BACKWARD[:3], lambda grad, values, mode: grid_sample_backward(grad, values, mode, _BOTH)
    ),
    "aten::cudnn_grid_sampler_backward": _grid(
        ("grad_output", "self"), lambda grad, values: grid_sample_backward(grad, values, 0, _BOTH)
    ),
    "aten::_cdist_forward": Rule(pair_distances, ("x1", "x2", RESULT), "x1", _DISTANCE),
    "aten::_cdist_backward": Rule(pair_distances_backward, ("grad", "x1"), "x1", _DISTANCE),
    "aten::_euclidean_dist": Rule(pair_distances, ("x1", "x2", RESULT), "x1", _DISTANCE),
    "aten::_pdist_forward": Rule(own_distances, ("self",), "self", _DISTANCE),
    "aten::_pdist_backward": Rule(own_distances, ("self",), "self", _DISTANCE),
    "aten::cholesky": _golub(_per_square(Fraction(1, 3)), "self"),
    "aten::linalg_cholesky_ex": _golub(_per_square(Fraction(1, 3)), "self"),
    "aten::cholesky_inverse": _golub(_per_square(Fraction(2, 3)), "self"),
    "aten::cholesky_solve": _golub(_triangular_solves(2), "input2", "self"),
    "aten::_cholesky_solve_helper": _golub(_triangular_solves(2), "A", "self"),
    "aten::linalg_solve_triangular": _golub(_triangular_solves(1), "self", "B"),
    "aten::triangular_solve": _golub(_triangular_solves(1), "A", "self"),
    "aten::lu_solve": _golub(_triangular_solves(2), "LU_data", "self"),
    "aten::linalg_lu_solve": _golub(_triangular_solves(2), "LU", "B"),
    "aten::linalg_ldl_solve": _golub(_triangular_solves(2), "LD", "B"),
    "aten::linalg_lu": _golub(lu_factor, "A"),
    "aten::linalg_lu_factor": _golub(lu_factor, "A"),
    "aten::linalg_lu_factor_ex": _golub(lu_factor, "A"),
    "aten::_lu_with_info": _golub(lu_factor, "self"),
    "aten::_linalg_det": _golub(lu_factor, "A"),
    "aten::_linalg_slogdet": _golub(lu_factor, "A"),
    "aten::linalg_ldl_factor_ex": _golub(_per_square(Fraction(1, 3)), "self"),
    "aten::_linalg_solve_ex": _golub(solve, "A", "B"),
    "aten::linalg_inv_ex": _golub(_per_square(2), "A"),
    "aten::linalg_lstsq": _golub(least_squares, "self", "b"),
    "aten::linalg_pinv": _golub(pseudo_inverse, "self", "hermitian"),
    "aten::geqrf": _golub(householder, "self"),
    "aten::linalg_qr": _golub(qr, "A", "mode"),
    "aten::linalg_householder_product": _golub(householder_product, "input", "tau"),
    "aten::orgqr": _golub(householder_product, "self", "input2"),
    "aten::ormqr": _golub(apply_q, "self", "input2", "input3"),
    "aten::_linalg_svd": _golub(svd, "A", "full_matrices", "compute_uv"),
    "prims::svd": _golub(lambda matrix, full: svd(matrix, full, True), "A", "full_matrices"),
    "aten::_linalg_eigh": _golub(symmetric_eigen, "A", "compute_v"),
    "aten::linalg_matrix_exp": Rule(matrix_exponential, ("self",), "self", _EXPONENTIAL, COMPLEX_PRODUCT),
    "aten::linalg_eig": _golub(_per_square(25), "self"),
    "aten::linalg_eigvals": _golub(_per_square(10), "self"),
    "aten::_linalg_eigvals": _golub(_per_square(10), "self"),
}
