"""Operators whose FLOPs depend on the algorithm inside: the leading terms that textbooks give, marked as estimates.

Matrix decompositions follow Golub and Van Loan, Matrix Computations (4th edition); an m-by-n matrix with m >= n, or its
transpose. Each count is rounded down to a whole number per call. Of complex numbers every term is four times as much.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from math import log2, prod

from torch import Tensor

from lightning_flops.measure.counting.formulas.contract import RESULT, Rule, Unreadable, Work, rules

_GOLUB = "leading terms of Golub and Van Loan, Matrix Computations"
_FFT = "5 N log2 N for a complex transform of N points, half of that where one side is real"
_GRID = "one multiply-add for each neighbour of each output element; finding the neighbours is left out"
_POOLED = "a multiply-add for each of the four neighbours of each sampled point"
_DISTANCE = "one multiply-add for each pair of rows and each of their coordinates"

_BILINEAR, _NEAREST, _BICUBIC = 0, 1, 2  # grid_sample's interpolation_mode
_BOTH = (True, True)


def _sizes(matrix: Tensor) -> tuple[int, int, int]:
    """How many matrices there are, and the longer and the shorter side of each."""
    rows, columns = map(int, matrix.shape[-2:])
    return prod(matrix.shape[:-2]), max(rows, columns), min(rows, columns)


def per_square(terms: Fraction | int, matrix: Tensor) -> int:
    """A decomposition of an n-by-n matrix that takes *terms* × n³."""
    return int(terms * prod(matrix.shape[:-2]) * int(matrix.shape[-1]) ** 3)


def triangular_solves(count: int, factor: Tensor, right: Tensor) -> int:
    """*count* triangular solves, n² for each column of the right side."""
    size = int(factor.shape[-1])
    return count * size * size * max(right.numel() // max(size, 1), prod(factor.shape[:-2]))


def lu_factor(matrix: Tensor) -> int:
    """m·n² − n³/3: two thirds of n³ for a square matrix."""
    batch, m, n = _sizes(matrix)
    return int(batch * (m * n * n - Fraction(n**3, 3)))


def solve(matrix: Tensor, right: Tensor) -> int:
    """LU, then two triangular solves for each column."""
    return lu_factor(matrix) + triangular_solves(2, matrix, right)


def householder(matrix: Tensor) -> int:
    """The triangular factor by reflections (``geqrf``): 2·n²·(m − n/3)."""
    batch, m, n = _sizes(matrix)
    return int(batch * 2 * n * n * (m - Fraction(n, 3)))


def qr(matrix: Tensor, mode: str) -> int:
    """``linalg_qr``: k reflections, and Q of c columns, unless only R is asked for: 4·m·c·k − 2·(m + c)·k² + 4·k³/3."""
    m, k = int(matrix.shape[-2]), min(matrix.shape[-2:])
    columns = m if mode == "complete" else k
    terms = 4 * m * columns * k - 2 * (m + columns) * k * k + Fraction(4 * k**3, 3)
    return householder(matrix) + (0 if mode == "r" else int(prod(matrix.shape[:-2]) * terms))


def svd(matrix: Tensor, full: bool, vectors: bool = True) -> int:
    """Golub-Reinsch: 4mn² − 4n³/3 for values, 14mn² + 8n³ thin, 4m²n + 8mn² + 9n³ full."""
    batch, m, n = _sizes(matrix)
    if not vectors:
        return int(batch * (4 * m * n * n - Fraction(4 * n**3, 3)))
    return batch * (4 * m * m * n + 8 * m * n * n + 9 * n**3 if full else 14 * m * n * n + 8 * n**3)


def fourier(share: int, values: Tensor, dims: Sequence[int]) -> Work:
    """A transform over *dims* together; half of it where one side, whose size this is, is real."""
    points = prod(int(values.shape[dim]) for dim in dims)
    return Work(int(5 * points * log2(points) * (values.numel() / points / share)) if points > 1 else 0)


def _neighbours(dims: int, mode: int) -> int:
    # Two-dimensional bicubic: four rows of four neighbours, then the four rows.
    return {_NEAREST: 0, _BICUBIC: 20}.get(mode, 4 if dims == 2 else 8)


def grid_sample(values: Tensor, mode: int, out: Tensor) -> int:
    """Bilinear meets 4 neighbours (8 in 3-D), bicubic 16 and then 4 rows, nearest none."""
    return 2 * _neighbours(values.dim() - 2, mode) * out.numel()


def grid_sample_backward(grad: Tensor, values: Tensor, mode: int, mask: Sequence[bool]) -> int:
    """One forward's work for the input's gradient, one for each coordinate of the grid's gradient."""
    dims = values.dim() - 2
    return (bool(mask[0]) + dims * bool(mask[1])) * 2 * _neighbours(dims, mode) * grad.numel()


def pooled_samples(pooled: Tensor, sampling_ratio: int) -> int:
    """``roi_align`` of *pooled* bins, or its backward: each averages ratio² points, each of four neighbours."""
    if sampling_ratio <= 0:
        raise Unreadable("how many points it samples in a bin follows from the boxes' sizes")
    return 2 * _neighbours(2, _BILINEAR) * sampling_ratio**2 * pooled.numel()


def pair_distances(first: Tensor, out: Tensor) -> int:
    """``cdist``: 2·B·P·R·M for P and R rows of M coordinates; *out* is (…, P, R). A side's gradient is as much."""
    return 2 * out.numel() * int(first.shape[-1])


def _golub(names: str, flops: Callable[..., int], arguments: str = "self|A") -> dict[str, Rule]:
    return rules(names, flops, arguments, estimate=_GOLUB)


def _cubes(names: str, terms: Fraction | int) -> dict[str, Rule]:
    return _golub(names, partial(per_square, terms))


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
        lambda grad, values, mode, mask: grid_sample_backward(grad, values, mode or _BILINEAR, mask or _BOTH),
        "grad_output input|self interpolation_mode? output_mask?",
        estimate=_GRID,
    ),
    **rules("torchvision::roi_align", pooled_samples, f"{RESULT} sampling_ratio", estimate=_POOLED),
    **rules("torchvision::_roi_align_backward", pooled_samples, "grad sampling_ratio", estimate=_POOLED),
    **rules("_cdist_forward _euclidean_dist", pair_distances, f"x1 {RESULT}", estimate=_DISTANCE),
    **rules("_cdist_backward", pair_distances, "x1 grad|grad_output", estimate=_DISTANCE),
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
    **_golub("linalg_lu linalg_lu_factor_ex _linalg_det _linalg_slogdet", lu_factor),
    **_golub("_linalg_solve_ex", solve, "A B"),
    **_golub("geqrf", householder),
    **_golub("linalg_qr", qr, "A mode"),
    **_golub("_linalg_svd", svd, "A full_matrices compute_uv"),
    # Tridiagonal QR
    **_golub(
        "_linalg_eigh", lambda matrix, vectors: per_square(9 if vectors else Fraction(4, 3), matrix), "A compute_v"
    ),
}
