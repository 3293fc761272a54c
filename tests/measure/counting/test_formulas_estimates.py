"""Estimates: leading terms of textbooks, and flagged as such."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lightning_flops import count_flops
from tests.measure.counting.recording import forward_and_backward, leaf, meta, total_flops, work_of


def spd(size: int, batch: int = 1) -> torch.Tensor:
    """A batch of symmetric positive definite matrices."""
    return (torch.eye(size) * 4 + 0.1).expand(batch, size, size).contiguous()


def tall(rows: int, columns: int) -> torch.Tensor:
    return torch.eye(rows, columns) + 0.1


N = 6
CALLS: dict[str, tuple[Callable[[], Any], int]] = {
    # 5 N log2 N, N = 8 × 16, two of them; half for real inputs or results
    "fft2": (lambda: torch.fft.fft2(torch.ones(2, 8, 16)), 2 * 5 * 128 * 7),
    "rfft": (lambda: torch.fft.rfft(torch.ones(3, 16)), 3 * 5 * 16 * 4 // 2),
    "irfft": (lambda: torch.fft.irfft(torch.ones(3, 9, dtype=torch.complex64)), 3 * 5 * 16 * 4 // 2),
    "fft of one point": (lambda: torch.fft.fft(torch.ones(3, 1)), 0),
    "cholesky": (lambda: torch.linalg.cholesky(spd(N, 2)), 2 * N**3 // 3),
    "lu": (lambda: torch.linalg.lu_factor(spd(N)), 2 * N**3 // 3),
    "det": (lambda: torch.linalg.det(spd(N)), 2 * N**3 // 3),
    "slogdet": (lambda: torch.linalg.slogdet(spd(N)), 2 * N**3 // 3),
    "inv": (lambda: torch.linalg.inv(spd(N, 2)), 2 * 2 * N**3),
    "solve": (lambda: torch.linalg.solve(spd(N), torch.ones(1, N, 4)), 2 * N**3 // 3 + 2 * N * N * 4),
    "solve a vector": (lambda: torch.linalg.solve(spd(N)[0], torch.ones(N)), 2 * N**3 // 3 + 2 * N * N),
    "triangular": (lambda: torch.linalg.solve_triangular(spd(N)[0], torch.ones(N, 4), upper=True), N * N * 4),
    "cholesky solve": (lambda: torch.cholesky_solve(torch.ones(N, 4), spd(N)[0]), 2 * N * N * 4),
    "cholesky inverse": (lambda: torch.cholesky_inverse(spd(N)[0]), 2 * N**3 // 3),
    # Reflections 2n²(m − n/3), and as much again for n columns of Q
    "qr": (lambda: torch.linalg.qr(tall(9, 6)), 2 * (2 * 36 * (9 - 2))),
    "only r": (lambda: torch.linalg.qr(tall(9, 6), mode="r"), 2 * 36 * (9 - 2)),
    "complete qr": (
        lambda: torch.linalg.qr(tall(9, 6), mode="complete"),
        2 * 36 * 7 + 4 * 81 * 6 - 2 * 18 * 36 + 4 * 216 // 3,
    ),
    "wide qr": (lambda: torch.linalg.qr(tall(6, 9)), 2 * 36 * (9 - 2) + 4 * 6 * 6 * 6 - 2 * 12 * 36 + 4 * 216 // 3),
    "thin svd": (lambda: torch.linalg.svd(tall(9, 6), full_matrices=False), 14 * 9 * 36 + 8 * 216),
    "full svd": (lambda: torch.linalg.svd(tall(9, 6)), 4 * 81 * 6 + 8 * 9 * 36 + 9 * 216),
    "eigh": (lambda: torch.linalg.eigh(spd(N)), 9 * N**3),
    "eig": (lambda: torch.linalg.eig(spd(N)), 25 * N**3),
    "few distances": (lambda: torch.cdist(torch.ones(3, 4), torch.ones(5, 4)), 2 * 3 * 5 * 4),
    "many distances": (lambda: torch.cdist(torch.ones(30, 4), torch.ones(26, 4)), 2 * 30 * 26 * 4),
    "batched distances": (lambda: torch.cdist(torch.ones(2, 3, 4), torch.ones(2, 5, 4), p=1), 2 * 2 * 3 * 5 * 4),
    # Two samples, three channels, 4 × 5 results: 4 neighbours, none, 16 and the 4 rows of them; 8 in three dimensions
    "bilinear grid": (lambda: grid("bilinear"), 2 * 4 * 2 * 3 * 20),
    "nearest grid": (lambda: grid("nearest"), 0),
    "bicubic grid": (lambda: grid("bicubic"), 2 * 20 * 2 * 3 * 20),
    "trilinear grid": (
        lambda: F.grid_sample(torch.ones(1, 3, 2, 2, 2), torch.zeros(1, 2, 4, 5, 3), align_corners=False),
        2 * 8 * 3 * 40,
    ),
}


def grid(mode: str) -> torch.Tensor:
    return F.grid_sample(torch.ones(2, 3, 6, 6), torch.zeros(2, 4, 5, 2), mode=mode, align_corners=False)


@pytest.mark.parametrize("name", CALLS)
def test_estimates_are_the_textbooks_leading_terms_and_say_so(name: str) -> None:
    run, expected = CALLS[name]
    with count_flops() as counts:
        run()
    assert counts.forward == expected
    assert all(any(f"{name} are an estimate" in note for note in counts.notes) for name in counts.by_operator())
    with torch.inference_mode():
        assert total_flops(run) == expected


def test_factors_of_complex_matrices_are_four_times_as_much() -> None:
    """A complex multiply-add is four real ones; a transform's estimate is of complex numbers already."""
    real, right = spd(N), torch.ones(1, N, 4)
    calls: list[Callable[[torch.dtype], Any]] = [
        lambda dtype: torch.linalg.cholesky(real.to(dtype)),
        lambda dtype: torch.linalg.solve(real.to(dtype), right.to(dtype)),
        lambda dtype: torch.linalg.qr(real.to(dtype)),
        lambda dtype: torch.linalg.eigh(real.to(dtype)),
    ]
    for call in calls:
        assert total_flops(partial(call, torch.complex64)) == 4 * total_flops(partial(call, torch.float32))
    points = torch.ones(3, 16, dtype=torch.complex64)
    assert total_flops(lambda: torch.fft.fft(points)) == 3 * 5 * 16 * 4


def test_a_grid_sample_backward_counts_both_gradients() -> None:
    values, points = leaf(2, 3, 6, 6), torch.zeros(2, 4, 5, 2).requires_grad_()
    one = 2 * 4 * 2 * 3 * 20
    # The input's gradient once, the grid's once for each of its two coordinates.
    sample = lambda: F.grid_sample(values, points, align_corners=False)  # noqa: E731
    assert forward_and_backward(sample) == (one, 3 * one)
    values.requires_grad_(False)
    assert forward_and_backward(sample) == (one, 2 * one)


def test_distances_cost_their_forward_for_each_sides_gradient() -> None:
    one = 2 * 3 * 5 * 4
    first, second = leaf(3, 4), leaf(5, 4)
    assert forward_and_backward(lambda: torch.cdist(first, second)) == (one, 2 * one)


def test_values_alone_are_cheaper_than_vectors() -> None:
    # Called directly: under any dispatch mode torch's eigvalsh and svdvals make the vectors too.
    assert work_of("aten::_linalg_svd", meta(6, 9), False, False).flops == 4 * 9 * 36 - 4 * 216 // 3
    assert work_of("aten::_linalg_eigh", meta(N, N), "L", False).flops == 4 * N**3 // 3
    assert work_of("aten::linalg_eigvals", meta(N, N)).flops == 10 * N**3
