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
TURNED, WIDE_OUT = meta(4, 3, 3, 3), meta(2, 6, 10, 10)
TRANSPOSED = 2 * (2 * 4 * 8 * 8) * 3 * 9
# The same in three dimensions, of 2 to 6 channels, 2 × 2 × 2, on one volume of 4 × 4 × 4
VOLUME, VOLUME_OUT = meta(1, 2, 4, 4, 4), meta(1, 6, 3, 3, 3)
CUBE, TURNED_CUBE = meta(6, 2, 2, 2, 2), meta(2, 6, 2, 2, 2)
VOLUME_CONVOLUTION, VOLUME_TRANSPOSED = 2 * (6 * 27) * 2 * 8, 2 * (2 * 64) * 6 * 8
# Samples of the images at 5 × 5 points, and of the volume at 3 × 3 × 3
POINTS, SAMPLED = meta(2, 4, 5, 5), meta(1, 2, 3, 3, 3)
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


def call(flops: int, /, out: Any = None, **given: Any) -> tuple[int, Any, dict[str, Any]]:
    """What a call with the arguments *given* costs, which returns *out*."""
    return flops, out, given


CALLS: dict[str, tuple[int, Any, dict[str, Any]]] = {
    "aten::addmv_": call(2 * 12, self=meta(3), mat=LEFT, vec=meta(4)),
    "aten::addr_": call(2 * 12, self=LEFT, vec1=meta(3), vec2=meta(4)),
    "aten::baddbmm_": call(7 * PRODUCT, batch1=LEFTS, batch2=RIGHTS),
    "aten::addbmm_": call(7 * PRODUCT, batch1=LEFTS, batch2=RIGHTS),
    "aten::_foreach_mm": call(2 * PRODUCT, self=[LEFT, LEFT], mat2=[RIGHT, RIGHT]),
    "aten::_weight_int4pack_mm_with_scales_and_zeros": call(PRODUCT, out=meta(3, 5), self=LEFT),
    "aten::_scaled_grouped_mm_v2": call(2 * 9 * 4 * 5, self=meta(10, 4), mat2=meta(2, 4, 5), offs=torch.tensor([3, 9])),
    "aten::sspaddmm": call(2 * 6 * 4, mat1=torch.eye(6).to_sparse(), mat2=meta(6, 4)),
    "aten::_convolution": call(CONVOLUTION, out=IMAGES_OUT, input=IMAGES, weight=KERNEL, transposed=False),
    "aten::convolution_overrideable": call(TRANSPOSED, out=WIDE_OUT, input=IMAGES, weight=TURNED, transposed=True),
    "aten::conv_depthwise3d": call(VOLUME_CONVOLUTION, out=VOLUME_OUT, self=VOLUME, weight=CUBE),
    "aten::miopen_convolution_add_relu": call(CONVOLUTION, out=IMAGES_OUT, self=IMAGES, weight=KERNEL),
    "aten::_mps_convolution": call(CONVOLUTION, out=IMAGES_OUT, self=IMAGES, weight=KERNEL),
    "aten::_mps_convolution_transpose": call(TRANSPOSED, self=IMAGES, weight=TURNED),
    "aten::mps_convolution_backward": call(
        CONVOLUTION, self=IMAGES, grad_output=IMAGES_OUT, weight=KERNEL, output_mask=WEIGHT_ONLY
    ),
    "aten::mps_convolution_transpose_backward": call(
        2 * TRANSPOSED, self=IMAGES, grad_output=WIDE_OUT, weight=TURNED, output_mask=[True, True]
    ),
    "aten::_nnpack_spatial_convolution": call(CONVOLUTION, out=IMAGES_OUT, input=IMAGES, weight=KERNEL),
    "aten::_slow_conv2d_backward.output_mask": call(
        2 * CONVOLUTION, grad_output=IMAGES_OUT, self=IMAGES, weight=KERNEL, output_mask=BOTH
    ),
    "aten::_slow_conv2d_backward.grad_input": call(2 * CONVOLUTION, grad_output=IMAGES_OUT, weight=KERNEL),
    "aten::slow_conv_dilated2d": call(CONVOLUTION, out=IMAGES_OUT, self=IMAGES, weight=KERNEL),
    "aten::slow_conv_dilated3d": call(VOLUME_CONVOLUTION, out=VOLUME_OUT, self=VOLUME, weight=CUBE),
    "aten::slow_conv3d_forward": call(VOLUME_CONVOLUTION, out=VOLUME_OUT, self=VOLUME, weight=CUBE),
    "aten::slow_conv_transpose2d": call(TRANSPOSED, self=IMAGES, weight=TURNED),
    "aten::slow_conv_transpose3d": call(VOLUME_TRANSPOSED, self=VOLUME, weight=TURNED_CUBE),
    "mkldnn::_convolution_pointwise_.binary": call(CONVOLUTION, out=IMAGES_OUT, X=IMAGES, W=KERNEL, other=IMAGES_OUT),
    "aten::_scaled_dot_product_attention_math_for_mps": call(32 * SCORES, **ATTENTION),
    "aten::_flash_attention_forward_no_dropout_inplace": call(32 * 2 * 5 * 16, **ATTENTION, is_causal=False),
    "aten::_lstm_mps": call(2 * TOKENS * 24 * 14, input=STEPS, params=[meta(24, 8), meta(24, 6), meta(24)]),
    "aten::lstm_mps_backward": call(2 * 2 * TOKENS * 24 * 14, input=STEPS, params=[meta(24, 8), meta(24, 6), meta(24)]),
    "aten::cudnn_grid_sampler": call(2 * 4 * 200, out=POINTS, self=IMAGES),
    "aten::cudnn_grid_sampler_backward": call(3 * 2 * 4 * 200, self=IMAGES, grad_output=POINTS),
    "aten::grid_sampler_3d_backward": call(
        (1 + 3) * 2 * 8 * 54, grad_output=SAMPLED, input=VOLUME, interpolation_mode=0, output_mask=[True, True]
    ),
    "aten::_grid_sampler_2d_cpu_fallback": call(2 * 4 * 200, out=POINTS, input=IMAGES, interpolation_mode=0),
    "aten::_grid_sampler_2d_cpu_fallback_backward": call(
        3 * 2 * 4 * 200, grad_output=POINTS, input=IMAGES, interpolation_mode=0
    ),
    "aten::cholesky": call(BATCH * N**3 // 3, self=SQUARES),
    "aten::_cholesky_solve_helper": call(2 * N * N * 3 * BATCH, self=COLUMNS, A=SQUARES),
    "aten::triangular_solve": call(N * N * 3 * BATCH, self=COLUMNS, A=SQUARES),
    "aten::linalg_lu_solve": call(2 * N * N * 3 * BATCH, LU=SQUARES, B=COLUMNS),
    "aten::linalg_lu": call(BATCH * 2 * N**3 // 3, A=SQUARES),
    "aten::geqrf": call(2 * 36 * (9 - 2), self=meta(9, 6)),
    "aten::_linalg_eigvals": call(BATCH * 10 * N**3, self=SQUARES),
    "torch_attn::_varlen_attn_out": call(
        32 * 4 * (4 + 9),
        **{name: meta(5, 4, 8) for name in ("query", "key", "value")},
        cu_seq_q=torch.tensor([0, 2, 5]),
        is_causal=False,
    ),
    **{f"aten::{name}_rnn": call(LSTM, input=STEPS, weight=LSTM_WEIGHTS) for name in ("_cudnn", "miopen")},
    "aten::_cudnn_rnn,packed": call(LSTM * 11 // 20, input=meta(11, 8), weight=LSTM_WEIGHTS),
    "aten::_cudnn_rnn,projected": call(2 * TOKENS * (24 * (8 + 3) + 3 * 6), input=STEPS, weight=PROJECTED),
    # A backward walks the sequence, and then makes the weights' gradients, which need that walk too.
    **{
        f"aten::{name}_rnn_backward,{mask}": call(
            forwards * LSTM, input=STEPS, weight=LSTM_WEIGHTS, output_mask=[bool(int(one)) for one in mask]
        )
        for name in ("_cudnn", "miopen")
        for mask, forwards in (("1111", 2), ("1110", 1), ("0001", 2), ("0000", 0))
    },
    **{
        f"aten::{name}": call(CONVOLUTION, out=IMAGES_OUT, weight=KERNEL)
        for name in (
            "cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution "
            "miopen_depthwise_convolution miopen_convolution_relu _conv_depthwise2d _slow_conv2d_forward"
        ).split()
    },
    "aten::mkldnn_convolution": call(CONVOLUTION, out=IMAGES_OUT, self=IMAGES, weight=KERNEL),
    "mkldnn::_convolution_pointwise": call(CONVOLUTION, out=IMAGES_OUT, X=IMAGES, W=KERNEL),
    "mkldnn::_convolution_pointwise.binary": call(CONVOLUTION, out=IMAGES_OUT, X=IMAGES, W=KERNEL),
    "aten::cudnn_convolution_transpose": call(TRANSPOSED, self=IMAGES, weight=TURNED),
    "aten::miopen_convolution_transpose": call(TRANSPOSED, self=IMAGES, weight=TURNED),
    "mkldnn::_convolution_transpose_pointwise": call(TRANSPOSED, X=IMAGES, W=TURNED),
    "aten::matmul,broadcast": call(2 * 6 * PRODUCT, self=meta(2, 1, 3, 4), other=meta(6, 4, 5)),
    "aten::matmul,a vector": call(6 * 2 * 4 * 5, self=meta(4), other=meta(6, 4, 5)),
    "aten::matmul,by a vector": call(6 * 2 * 3 * 4, self=meta(6, 3, 4), other=meta(4)),
    "aten::addmm_": call(PRODUCT, mat1=LEFT, mat2=RIGHT),
    "aten::_addmm_activation": call(PRODUCT, mat1=LEFT, mat2=RIGHT),
    "aten::vdot": call(2 * 9, self=meta(9), other=meta(9)),
    "aten::mm.dtype": call(PRODUCT, self=LEFT, mat2=RIGHT),
    "aten::mm.out": call(PRODUCT, self=LEFT, mat2=RIGHT),
    "aten::bmm.dtype": call(7 * PRODUCT, self=LEFTS, mat2=RIGHTS),
    "aten::matmul_backward": call(2 * PRODUCT, self=LEFT, other=RIGHT, mask=[True, True]),
    "aten::matmul_backward,one": call(PRODUCT, self=LEFT, other=RIGHT, mask=[True, False]),
    "aten::linear_backward": call(2 * LINEAR, self=ROWS, weight=WEIGHT, output_mask=BOTH),
    "aten::linear_backward,weight": call(LINEAR, self=ROWS, weight=WEIGHT, output_mask=WEIGHT_ONLY),
    "aten::mkldnn_linear_backward": call(LINEAR, self=ROWS, weight=WEIGHT, output_mask=WEIGHT_ONLY),
    "aten::mkldnn_linear_backward_input": call(2 * 8 * 16 * 8, grad_output=ROWS_OUT, weight=WEIGHT),
    "aten::mkldnn_linear": call(LINEAR, self=ROWS, weight=WEIGHT),
    "mkldnn::_linear_pointwise": call(LINEAR, out=ROWS_OUT, X=ROWS),
    "mkl::_mkl_linear": call(LINEAR, out=ROWS_OUT, X=ROWS),
    "aten::_weight_int4pack_mm": call(LINEAR, out=ROWS_OUT, self=ROWS),
    "aten::_weight_int4pack_mm_for_cpu": call(LINEAR, out=ROWS_OUT, self=ROWS),
    "quantized::int4mm_packed_weight_cpu": call(LINEAR, out=ROWS_OUT, self=ROWS),
    "aten::_dyn_quant_matmul_4bit": call(LINEAR, out=ROWS_OUT, inp=ROWS),
    "aten::_mixed_dtypes_linear": call(LINEAR, out=ROWS_OUT, input=ROWS),
    "inductor::_mm_plus_mm": call(PRODUCT + 2 * 3 * 6 * 5, a=LEFT, b=RIGHT, c=meta(3, 6), d=meta(6, 5)),
    **{
        f"aten::{name}": call(2 * 16 * 32 * 8, self=meta(16, 32, dtype=EIGHT), mat2=meta(32, 8, dtype=EIGHT))
        for name in ("_scaled_mm", "_scaled_mm_v2")
    },
    "aten::_scaled_mm,four bits": call(2 * 16 * 64 * 8, self=meta(16, 32, dtype=FOUR), mat2=meta(32, 8, dtype=FOUR)),
    "aten::_scaled_grouped_mm": call(
        2 * 16 * 32 * 8, self=meta(16, 32, dtype=EIGHT), mat2=meta(2, 32, 8, dtype=EIGHT), offs=torch.tensor([4, 16])
    ),
    "aten::_sparse_semi_structured_mm": call(STORED_BY, out=meta(16, 8), mat1=STORED),
    "aten::_sparse_semi_structured_addmm": call(STORED_BY, out=meta(16, 8), mat1=STORED),
    "aten::_sparse_semi_structured_linear": call(STORED_BY, out=meta(8, 16), weight=STORED),
    "aten::_cslt_sparse_mm": call(STORED_BY, out=meta(16, 8), dense_B=meta(64, 8)),
    "symm_mem::_async_input_mm": call(PRODUCT, a=LEFT, b=RIGHT),
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
    expected, out, given = CALLS[name]
    assert work_by_name(name, out, given).flops == expected
