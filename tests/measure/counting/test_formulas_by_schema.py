"""Operators that no kernel here can run, or that nothing calls any more: their formulas, argument by argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lightning_flops.measure.torch_private.needed import overloads_named
from tests.measure.counting.recording import meta, work_by_name

# (3, 4) by (4, 5), a stack of 7 of them, (3, 4) by (4,), (3,) by (4,)
LEFT, RIGHT = meta(3, 4), meta(4, 5)
LEFTS, RIGHTS = meta(7, 3, 4), meta(7, 4, 5)
PRODUCT = 2 * 3 * 4 * 5
# A convolution of 4 to 6 channels in 2 groups, 3 × 3, on 2 images of 8 × 8
IMAGES, KERNEL, IMAGES_OUT = meta(2, 4, 8, 8), meta(6, 2, 3, 3), meta(2, 6, 6, 6)
CONVOLUTION = 2 * (2 * 6 * 6 * 6) * 2 * 9
# A transposed one of 4 to 6 channels in 2 groups
TURNED = meta(4, 3, 3, 3)
TRANSPOSED = 2 * (2 * 4 * 8 * 8) * 3 * 9
# The same in three dimensions, of 2 to 6 channels, 2 × 2 × 2, on one volume of 4 × 4 × 4
VOLUME, CUBE, VOLUME_OUT, TURNED_CUBE = (
    meta(1, 2, 4, 4, 4),
    meta(6, 2, 2, 2, 2),
    meta(1, 6, 3, 3, 3),
    meta(2, 6, 2, 2, 2),
)
VOLUME_CONVOLUTION, VOLUME_TRANSPOSED = 2 * (6 * 27) * 2 * 8, 2 * (2 * 64) * 6 * 8
# 2 samples, 4 heads, 5 queries and keys, head size 8
HEADS = meta(2, 4, 5, 8)
SCORES = 2 * 4 * 25
ATTENTION = {"query": HEADS, "key": HEADS, "value": HEADS}
# 4 samples of 5 steps with 8 features, hidden size 6, one layer
STEPS = meta(4, 5, 8)
TOKENS = 4 * 5
# Two layers in both directions: matrices and biases in cuDNN's order
LSTM_WEIGHTS = [meta(*shape) for inputs in (8, 12) for _ in range(2) for shape in ((24, inputs), (24, 6), (24,), (24,))]
LSTM = 2 * TOKENS * 2 * 24 * (8 + 6 + 12 + 6)
PROJECTED = [meta(*shape) for shape in ((24, 8), (24, 3), (24,), (24,), (3, 6))]
# A linear layer of 8 to 16 on 2 × 4 rows
ROWS, WEIGHT, ROWS_OUT = meta(2, 4, 8), meta(16, 8), meta(2, 4, 16)
LINEAR = 2 * 8 * 8 * 16
# Numbers of 8 bits and pairs of numbers of 4
EIGHT, FOUR = torch.float8_e4m3fn, torch.float4_e2m1fn_x2
# A 16 × 64 matrix of which half is stored, by 64 × 8
STORED, STORED_BY = meta(16, 32), 2 * 16 * 32 * 8
N, BATCH = 6, 2
SQUARES, COLUMNS = meta(BATCH, N, N), meta(BATCH, N, 3)
BOTH, WEIGHT_ONLY = [True, True, True], [False, True, True]

CALLS: dict[str, tuple[dict[str, Any], Any, int]] = {
    "aten::addmv_": ({"self": meta(3), "mat": LEFT, "vec": meta(4)}, None, 2 * 12),
    "aten::addr_": ({"self": LEFT, "vec1": meta(3), "vec2": meta(4)}, None, 2 * 12),
    "aten::baddbmm_": ({"batch1": LEFTS, "batch2": RIGHTS}, None, 7 * PRODUCT),
    "aten::addbmm_": ({"batch1": LEFTS, "batch2": RIGHTS}, None, 7 * PRODUCT),
    "aten::_foreach_mm": ({"self": [LEFT, LEFT], "mat2": [RIGHT, RIGHT]}, None, 2 * PRODUCT),
    "aten::_weight_int4pack_mm_with_scales_and_zeros": ({"self": LEFT}, meta(3, 5), PRODUCT),
    "aten::_scaled_grouped_mm_v2": (
        {"self": meta(10, 4), "mat2": meta(2, 4, 5), "offs": torch.tensor([3, 9])},
        None,
        2 * 9 * 4 * 5,
    ),
    "aten::sspaddmm": ({"mat1": torch.eye(6).to_sparse(), "mat2": meta(6, 4)}, None, 2 * 6 * 4),
    "aten::_convolution": ({"input": IMAGES, "weight": KERNEL, "transposed": False}, IMAGES_OUT, CONVOLUTION),
    "aten::convolution_overrideable": (
        {"input": IMAGES, "weight": TURNED, "transposed": True},
        meta(2, 6, 10, 10),
        TRANSPOSED,
    ),
    "aten::conv_depthwise3d": ({"self": VOLUME, "weight": CUBE}, VOLUME_OUT, VOLUME_CONVOLUTION),
    "aten::miopen_convolution_add_relu": ({"self": IMAGES, "weight": KERNEL}, IMAGES_OUT, CONVOLUTION),
    "aten::_mps_convolution": ({"self": IMAGES, "weight": KERNEL}, IMAGES_OUT, CONVOLUTION),
    "aten::_mps_convolution_transpose": ({"self": IMAGES, "weight": TURNED}, None, TRANSPOSED),
    "aten::mps_convolution_backward": (
        {"self": IMAGES, "grad_output": IMAGES_OUT, "weight": KERNEL, "output_mask": WEIGHT_ONLY},
        None,
        CONVOLUTION,
    ),
    "aten::mps_convolution_transpose_backward": (
        {"self": IMAGES, "grad_output": meta(2, 6, 10, 10), "weight": TURNED, "output_mask": [True, True]},
        None,
        2 * TRANSPOSED,
    ),
    "aten::_nnpack_spatial_convolution": ({"input": IMAGES, "weight": KERNEL}, IMAGES_OUT, CONVOLUTION),
    "aten::_slow_conv2d_backward.output_mask": (
        {"grad_output": IMAGES_OUT, "self": IMAGES, "weight": KERNEL, "output_mask": BOTH},
        None,
        2 * CONVOLUTION,
    ),
    "aten::_slow_conv2d_backward.grad_input": ({"grad_output": IMAGES_OUT, "weight": KERNEL}, None, 2 * CONVOLUTION),
    "aten::slow_conv_dilated2d": ({"self": IMAGES, "weight": KERNEL}, IMAGES_OUT, CONVOLUTION),
    "aten::slow_conv_dilated3d": ({"self": VOLUME, "weight": CUBE}, VOLUME_OUT, VOLUME_CONVOLUTION),
    "aten::slow_conv3d_forward": ({"self": VOLUME, "weight": CUBE}, VOLUME_OUT, VOLUME_CONVOLUTION),
    "aten::slow_conv_transpose2d": ({"self": IMAGES, "weight": TURNED}, None, TRANSPOSED),
    "aten::slow_conv_transpose3d": ({"self": VOLUME, "weight": TURNED_CUBE}, None, VOLUME_TRANSPOSED),
    "mkldnn::_convolution_pointwise_.binary": (
        {"X": IMAGES, "W": KERNEL, "other": IMAGES_OUT},
        IMAGES_OUT,
        CONVOLUTION,
    ),
    "aten::_scaled_dot_product_attention_math_for_mps": (ATTENTION, None, 32 * SCORES),
    "aten::_flash_attention_forward_no_dropout_inplace": ({**ATTENTION, "is_causal": False}, None, 32 * 2 * 5 * 16),
    "aten::_lstm_mps": ({"input": STEPS, "params": [meta(24, 8), meta(24, 6), meta(24)]}, None, 2 * TOKENS * 24 * 14),
    "aten::lstm_mps_backward": (
        {"input": STEPS, "params": [meta(24, 8), meta(24, 6), meta(24)]},
        None,
        2 * 2 * TOKENS * 24 * 14,
    ),
    "aten::cudnn_grid_sampler": ({"self": IMAGES}, meta(2, 4, 5, 5), 2 * 4 * 200),
    "aten::cudnn_grid_sampler_backward": ({"self": IMAGES, "grad_output": meta(2, 4, 5, 5)}, None, 3 * 2 * 4 * 200),
    "aten::grid_sampler_3d_backward": (
        {"grad_output": meta(1, 2, 3, 3, 3), "input": VOLUME, "interpolation_mode": 0, "output_mask": [True, True]},
        None,
        (1 + 3) * 2 * 8 * 54,
    ),
    "aten::_grid_sampler_2d_cpu_fallback": ({"input": IMAGES, "interpolation_mode": 0}, meta(2, 4, 5, 5), 2 * 4 * 200),
    "aten::_grid_sampler_2d_cpu_fallback_backward": (
        {"grad_output": meta(2, 4, 5, 5), "input": IMAGES, "interpolation_mode": 0},
        None,
        3 * 2 * 4 * 200,
    ),
    "aten::cholesky": ({"self": SQUARES}, None, BATCH * N**3 // 3),
    "aten::_cholesky_solve_helper": ({"self": COLUMNS, "A": SQUARES}, None, 2 * N * N * 3 * BATCH),
    "aten::triangular_solve": ({"self": COLUMNS, "A": SQUARES}, None, N * N * 3 * BATCH),
    "aten::linalg_lu_solve": ({"LU": SQUARES, "B": COLUMNS}, None, 2 * N * N * 3 * BATCH),
    "aten::linalg_lu": ({"A": SQUARES}, None, BATCH * 2 * N**3 // 3),
    "aten::geqrf": ({"self": meta(9, 6)}, None, 2 * 36 * (9 - 2)),
    "aten::_linalg_eigvals": ({"self": SQUARES}, None, BATCH * 10 * N**3),
    "torch_attn::_varlen_attn_out": (
        {
            **{name: meta(5, 4, 8) for name in ("query", "key", "value")},
            "cu_seq_q": torch.tensor([0, 2, 5]),
            "is_causal": False,
        },
        None,
        32 * 4 * (4 + 9),
    ),
    **{f"aten::{name}_rnn": ({"input": STEPS, "weight": LSTM_WEIGHTS}, None, LSTM) for name in ("_cudnn", "miopen")},
    "aten::_cudnn_rnn,packed": ({"input": meta(11, 8), "weight": LSTM_WEIGHTS}, None, LSTM * 11 // 20),
    "aten::_cudnn_rnn,projected": (
        {"input": STEPS, "weight": PROJECTED},
        None,
        2 * TOKENS * (24 * (8 + 3) + 3 * 6),
    ),
    # A backward walks the sequence, and then makes the weights' gradients, which need that walk too.
    **{
        f"aten::{name}_rnn_backward,{mask}": (
            {"input": STEPS, "weight": LSTM_WEIGHTS, "output_mask": [bool(int(one)) for one in mask]},
            None,
            forwards * LSTM,
        )
        for name in ("_cudnn", "miopen")
        for mask, forwards in (("1111", 2), ("1110", 1), ("0001", 2), ("0000", 0))
    },
    **{
        f"aten::{name}": ({"weight": KERNEL}, IMAGES_OUT, CONVOLUTION)
        for name in (
            "cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution "
            "miopen_depthwise_convolution miopen_convolution_relu _conv_depthwise2d _slow_conv2d_forward"
        ).split()
    },
    "aten::mkldnn_convolution": ({"self": IMAGES, "weight": KERNEL}, IMAGES_OUT, CONVOLUTION),
    "mkldnn::_convolution_pointwise": ({"X": IMAGES, "W": KERNEL}, IMAGES_OUT, CONVOLUTION),
    "mkldnn::_convolution_pointwise.binary": ({"X": IMAGES, "W": KERNEL}, IMAGES_OUT, CONVOLUTION),
    "aten::cudnn_convolution_transpose": ({"self": IMAGES, "weight": TURNED}, None, TRANSPOSED),
    "aten::miopen_convolution_transpose": ({"self": IMAGES, "weight": TURNED}, None, TRANSPOSED),
    "mkldnn::_convolution_transpose_pointwise": ({"X": IMAGES, "W": TURNED}, None, TRANSPOSED),
    "aten::matmul,broadcast": ({"self": meta(2, 1, 3, 4), "other": meta(6, 4, 5)}, None, 2 * 6 * PRODUCT),
    "aten::matmul,a vector": ({"self": meta(4), "other": meta(6, 4, 5)}, None, 6 * 2 * 4 * 5),
    "aten::matmul,by a vector": ({"self": meta(6, 3, 4), "other": meta(4)}, None, 6 * 2 * 3 * 4),
    "aten::addmm_": ({"mat1": LEFT, "mat2": RIGHT}, None, PRODUCT),
    "aten::_addmm_activation": ({"mat1": LEFT, "mat2": RIGHT}, None, PRODUCT),
    "aten::vdot": ({"self": meta(9), "other": meta(9)}, None, 2 * 9),
    "aten::mm.dtype": ({"self": LEFT, "mat2": RIGHT}, None, PRODUCT),
    "aten::mm.out": ({"self": LEFT, "mat2": RIGHT}, None, PRODUCT),
    "aten::bmm.dtype": ({"self": LEFTS, "mat2": RIGHTS}, None, 7 * PRODUCT),
    "aten::matmul_backward": ({"self": LEFT, "other": RIGHT, "mask": [True, True]}, None, 2 * PRODUCT),
    "aten::matmul_backward,one": ({"self": LEFT, "other": RIGHT, "mask": [True, False]}, None, PRODUCT),
    "aten::linear_backward": ({"self": ROWS, "weight": WEIGHT, "output_mask": BOTH}, None, 2 * LINEAR),
    "aten::linear_backward,weight": ({"self": ROWS, "weight": WEIGHT, "output_mask": WEIGHT_ONLY}, None, LINEAR),
    "aten::mkldnn_linear_backward": ({"self": ROWS, "weight": WEIGHT, "output_mask": WEIGHT_ONLY}, None, LINEAR),
    "aten::mkldnn_linear_backward_input": ({"grad_output": ROWS_OUT, "weight": WEIGHT}, None, 2 * 8 * 16 * 8),
    "aten::mkldnn_linear": ({"self": ROWS, "weight": WEIGHT}, None, LINEAR),
    "mkldnn::_linear_pointwise": ({"X": ROWS}, ROWS_OUT, LINEAR),
    "mkl::_mkl_linear": ({"X": ROWS}, ROWS_OUT, LINEAR),
    **{
        f"{name}": ({schema_name: ROWS}, ROWS_OUT, LINEAR)
        for name, schema_name in {
            "aten::_weight_int4pack_mm": "self",
            "aten::_weight_int4pack_mm_for_cpu": "self",
            "quantized::int4mm_packed_weight_cpu": "self",
            "aten::_dyn_quant_matmul_4bit": "inp",
            "aten::_mixed_dtypes_linear": "input",
        }.items()
    },
    "inductor::_mm_plus_mm": (
        {"a": LEFT, "b": RIGHT, "c": meta(3, 6), "d": meta(6, 5)},
        None,
        PRODUCT + 2 * 3 * 6 * 5,
    ),
    **{
        f"aten::{name}": ({"self": meta(16, 32, dtype=EIGHT), "mat2": meta(32, 8, dtype=EIGHT)}, None, 2 * 16 * 32 * 8)
        for name in ("_scaled_mm", "_scaled_mm_v2")
    },
    "aten::_scaled_mm,four bits": (
        {"self": meta(16, 32, dtype=FOUR), "mat2": meta(32, 8, dtype=FOUR)},
        None,
        2 * 16 * 64 * 8,
    ),
    "aten::_scaled_grouped_mm": (
        {"self": meta(16, 32, dtype=EIGHT), "mat2": meta(2, 32, 8, dtype=EIGHT), "offs": torch.tensor([4, 16])},
        None,
        2 * 16 * 32 * 8,
    ),
    "aten::_sparse_semi_structured_mm": ({"mat1": STORED}, meta(16, 8), STORED_BY),
    "aten::_sparse_semi_structured_addmm": ({"mat1": STORED}, meta(16, 8), STORED_BY),
    "aten::_sparse_semi_structured_linear": ({"weight": STORED}, meta(8, 16), STORED_BY),
    "aten::_cslt_sparse_mm": ({"dense_B": meta(64, 8)}, meta(16, 8), STORED_BY),
    "symm_mem::_async_input_mm": ({"a": LEFT, "b": RIGHT}, None, PRODUCT),
}


@pytest.fixture(scope="module", autouse=True)
def torchs_own_packages() -> None:
    """Operators that torch's Python code registers when it is imported."""
    import torch.distributed._symmetric_memory
    import torch.nn.attention.varlen  # noqa: F401


@pytest.mark.parametrize("name", CALLS)
def test_a_formula_reads_its_arguments_where_the_schema_has_them(name: str) -> None:
    if not overloads_named(name.partition(",")[0].partition(".")[0]):
        pytest.skip("this torch has no such operator")
    given, out, expected = CALLS[name]
    assert work_by_name(name, out, given).flops == expected
