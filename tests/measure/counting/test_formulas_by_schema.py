"""Operators that no kernel here can run, or that nothing calls any more: their formulas, argument by argument."""

from __future__ import annotations

import pytest
import torch

from lightning_flops.measure.torch_private.needed import overloads_named
from tests.measure.counting.recording import Call, meta, work_by_name

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

CALLS = {
    "aten::addmv_": Call(2 * 12, self=meta(3), mat=LEFT, vec=meta(4)),
    "aten::addr_": Call(2 * 12, self=LEFT, vec1=meta(3), vec2=meta(4)),
    "aten::baddbmm_": Call(7 * PRODUCT, batch1=LEFTS, batch2=RIGHTS),
    "aten::addbmm_": Call(7 * PRODUCT, batch1=LEFTS, batch2=RIGHTS),
    "aten::_foreach_mm": Call(2 * PRODUCT, self=[LEFT, LEFT], mat2=[RIGHT, RIGHT]),
    "aten::_weight_int4pack_mm_with_scales_and_zeros": Call(PRODUCT, out=meta(3, 5), self=LEFT),
    "aten::_scaled_grouped_mm_v2": Call(2 * 9 * 4 * 5, self=meta(10, 4), mat2=meta(2, 4, 5), offs=torch.tensor([3, 9])),
    "aten::sspaddmm": Call(2 * 6 * 4, mat1=torch.eye(6).to_sparse(), mat2=meta(6, 4)),
    "aten::_convolution": Call(CONVOLUTION, out=IMAGES_OUT, input=IMAGES, weight=KERNEL, transposed=False),
    "aten::convolution_overrideable": Call(TRANSPOSED, out=WIDE_OUT, input=IMAGES, weight=TURNED, transposed=True),
    "aten::conv_depthwise3d": Call(VOLUME_CONVOLUTION, out=VOLUME_OUT, self=VOLUME, weight=CUBE),
    "aten::miopen_convolution_add_relu": Call(CONVOLUTION, out=IMAGES_OUT, self=IMAGES, weight=KERNEL),
    "aten::_mps_convolution": Call(CONVOLUTION, out=IMAGES_OUT, self=IMAGES, weight=KERNEL),
    "aten::_mps_convolution_transpose": Call(TRANSPOSED, self=IMAGES, weight=TURNED),
    "aten::mps_convolution_backward": Call(
        CONVOLUTION, self=IMAGES, grad_output=IMAGES_OUT, weight=KERNEL, output_mask=WEIGHT_ONLY
    ),
    "aten::mps_convolution_transpose_backward": Call(
        2 * TRANSPOSED, self=IMAGES, grad_output=WIDE_OUT, weight=TURNED, output_mask=[True, True]
    ),
    "aten::_nnpack_spatial_convolution": Call(CONVOLUTION, out=IMAGES_OUT, input=IMAGES, weight=KERNEL),
    "aten::_slow_conv2d_backward.output_mask": Call(
        2 * CONVOLUTION, grad_output=IMAGES_OUT, self=IMAGES, weight=KERNEL, output_mask=BOTH
    ),
    "aten::_slow_conv2d_backward.grad_input": Call(2 * CONVOLUTION, grad_output=IMAGES_OUT, weight=KERNEL),
    "aten::slow_conv_dilated2d": Call(CONVOLUTION, out=IMAGES_OUT, self=IMAGES, weight=KERNEL),
    "aten::slow_conv_dilated3d": Call(VOLUME_CONVOLUTION, out=VOLUME_OUT, self=VOLUME, weight=CUBE),
    "aten::slow_conv3d_forward": Call(VOLUME_CONVOLUTION, out=VOLUME_OUT, self=VOLUME, weight=CUBE),
    "aten::slow_conv_transpose2d": Call(TRANSPOSED, self=IMAGES, weight=TURNED),
    "aten::slow_conv_transpose3d": Call(VOLUME_TRANSPOSED, self=VOLUME, weight=TURNED_CUBE),
    "mkldnn::_convolution_pointwise_.binary": Call(CONVOLUTION, out=IMAGES_OUT, X=IMAGES, W=KERNEL, other=IMAGES_OUT),
    "aten::_scaled_dot_product_attention_math_for_mps": Call(32 * SCORES, **ATTENTION),
    "aten::_flash_attention_forward_no_dropout_inplace": Call(32 * 2 * 5 * 16, **ATTENTION, is_causal=False),
    "aten::_lstm_mps": Call(2 * TOKENS * 24 * 14, input=STEPS, params=[meta(24, 8), meta(24, 6), meta(24)]),
    "aten::lstm_mps_backward": Call(2 * 2 * TOKENS * 24 * 14, input=STEPS, params=[meta(24, 8), meta(24, 6), meta(24)]),
    "aten::cudnn_grid_sampler": Call(2 * 4 * 200, out=POINTS, self=IMAGES),
    "aten::cudnn_grid_sampler_backward": Call(3 * 2 * 4 * 200, self=IMAGES, grad_output=POINTS),
    "aten::grid_sampler_3d_backward": Call(
        (1 + 3) * 2 * 8 * 54, grad_output=SAMPLED, input=VOLUME, interpolation_mode=0, output_mask=[True, True]
    ),
    "aten::_grid_sampler_2d_cpu_fallback": Call(2 * 4 * 200, out=POINTS, input=IMAGES, interpolation_mode=0),
    "aten::_grid_sampler_2d_cpu_fallback_backward": Call(
        3 * 2 * 4 * 200, grad_output=POINTS, input=IMAGES, interpolation_mode=0
    ),
    "aten::cholesky": Call(BATCH * N**3 // 3, self=SQUARES),
    "aten::_cholesky_solve_helper": Call(2 * N * N * 3 * BATCH, self=COLUMNS, A=SQUARES),
    "aten::triangular_solve": Call(N * N * 3 * BATCH, self=COLUMNS, A=SQUARES),
    "aten::linalg_lu_solve": Call(2 * N * N * 3 * BATCH, LU=SQUARES, B=COLUMNS),
    "aten::linalg_lu": Call(BATCH * 2 * N**3 // 3, A=SQUARES),
    "aten::geqrf": Call(2 * 36 * (9 - 2), self=meta(9, 6)),
    "aten::_linalg_eigvals": Call(BATCH * 10 * N**3, self=SQUARES),
    "torch_attn::_varlen_attn_out": Call(
        32 * 4 * (4 + 9),
        **{name: meta(5, 4, 8) for name in ("query", "key", "value")},
        cu_seq_q=torch.tensor([0, 2, 5]),
        is_causal=False,
    ),
    **{f"aten::{name}_rnn": Call(LSTM, input=STEPS, weight=LSTM_WEIGHTS) for name in ("_cudnn", "miopen")},
    "aten::_cudnn_rnn,packed": Call(LSTM * 11 // 20, input=meta(11, 8), weight=LSTM_WEIGHTS),
    "aten::_cudnn_rnn,projected": Call(2 * TOKENS * (24 * (8 + 3) + 3 * 6), input=STEPS, weight=PROJECTED),
    # A backward walks the sequence, and then makes the weights' gradients, which need that walk too.
    **{
        f"aten::{name}_rnn_backward,{mask}": Call(
            forwards * LSTM, input=STEPS, weight=LSTM_WEIGHTS, output_mask=[bool(int(one)) for one in mask]
        )
        for name in ("_cudnn", "miopen")
        for mask, forwards in (("1111", 2), ("1110", 1), ("0001", 2), ("0000", 0))
    },
    **{
        f"aten::{name}": Call(CONVOLUTION, out=IMAGES_OUT, weight=KERNEL)
        for name in (
            "cudnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution "
            "miopen_depthwise_convolution miopen_convolution_relu _conv_depthwise2d _slow_conv2d_forward"
        ).split()
    },
    "aten::mkldnn_convolution": Call(CONVOLUTION, out=IMAGES_OUT, self=IMAGES, weight=KERNEL),
    "mkldnn::_convolution_pointwise": Call(CONVOLUTION, out=IMAGES_OUT, X=IMAGES, W=KERNEL),
    "mkldnn::_convolution_pointwise.binary": Call(CONVOLUTION, out=IMAGES_OUT, X=IMAGES, W=KERNEL),
    "aten::cudnn_convolution_transpose": Call(TRANSPOSED, self=IMAGES, weight=TURNED),
    "aten::miopen_convolution_transpose": Call(TRANSPOSED, self=IMAGES, weight=TURNED),
    "mkldnn::_convolution_transpose_pointwise": Call(TRANSPOSED, X=IMAGES, W=TURNED),
    "aten::matmul,broadcast": Call(2 * 6 * PRODUCT, self=meta(2, 1, 3, 4), other=meta(6, 4, 5)),
    "aten::matmul,a vector": Call(6 * 2 * 4 * 5, self=meta(4), other=meta(6, 4, 5)),
    "aten::matmul,by a vector": Call(6 * 2 * 3 * 4, self=meta(6, 3, 4), other=meta(4)),
    "aten::addmm_": Call(PRODUCT, mat1=LEFT, mat2=RIGHT),
    "aten::_addmm_activation": Call(PRODUCT, mat1=LEFT, mat2=RIGHT),
    "aten::vdot": Call(2 * 9, self=meta(9), other=meta(9)),
    "aten::mm.dtype": Call(PRODUCT, self=LEFT, mat2=RIGHT),
    "aten::mm.out": Call(PRODUCT, self=LEFT, mat2=RIGHT),
    "aten::bmm.dtype": Call(7 * PRODUCT, self=LEFTS, mat2=RIGHTS),
    "aten::matmul_backward": Call(2 * PRODUCT, self=LEFT, other=RIGHT, mask=[True, True]),
    "aten::matmul_backward,one": Call(PRODUCT, self=LEFT, other=RIGHT, mask=[True, False]),
    "aten::linear_backward": Call(2 * LINEAR, self=ROWS, weight=WEIGHT, output_mask=BOTH),
    "aten::linear_backward,weight": Call(LINEAR, self=ROWS, weight=WEIGHT, output_mask=WEIGHT_ONLY),
    "aten::mkldnn_linear_backward": Call(LINEAR, self=ROWS, weight=WEIGHT, output_mask=WEIGHT_ONLY),
    "aten::mkldnn_linear_backward_input": Call(2 * 8 * 16 * 8, grad_output=ROWS_OUT, weight=WEIGHT),
    "aten::mkldnn_linear": Call(LINEAR, self=ROWS, weight=WEIGHT),
    "mkldnn::_linear_pointwise": Call(LINEAR, out=ROWS_OUT, X=ROWS),
    "mkl::_mkl_linear": Call(LINEAR, out=ROWS_OUT, X=ROWS),
    "aten::_weight_int4pack_mm": Call(LINEAR, out=ROWS_OUT, self=ROWS),
    "aten::_weight_int4pack_mm_for_cpu": Call(LINEAR, out=ROWS_OUT, self=ROWS),
    "quantized::int4mm_packed_weight_cpu": Call(LINEAR, out=ROWS_OUT, self=ROWS),
    "aten::_dyn_quant_matmul_4bit": Call(LINEAR, out=ROWS_OUT, inp=ROWS),
    "aten::_mixed_dtypes_linear": Call(LINEAR, out=ROWS_OUT, input=ROWS),
    "inductor::_mm_plus_mm": Call(PRODUCT + 2 * 3 * 6 * 5, a=LEFT, b=RIGHT, c=meta(3, 6), d=meta(6, 5)),
    **{
        f"aten::{name}": Call(2 * 16 * 32 * 8, self=meta(16, 32, dtype=EIGHT), mat2=meta(32, 8, dtype=EIGHT))
        for name in ("_scaled_mm", "_scaled_mm_v2")
    },
    "aten::_scaled_mm,four bits": Call(2 * 16 * 64 * 8, self=meta(16, 32, dtype=FOUR), mat2=meta(32, 8, dtype=FOUR)),
    "aten::_scaled_grouped_mm": Call(
        2 * 16 * 32 * 8, self=meta(16, 32, dtype=EIGHT), mat2=meta(2, 32, 8, dtype=EIGHT), offs=torch.tensor([4, 16])
    ),
    "aten::_sparse_semi_structured_mm": Call(STORED_BY, out=meta(16, 8), mat1=STORED),
    "aten::_sparse_semi_structured_addmm": Call(STORED_BY, out=meta(16, 8), mat1=STORED),
    "aten::_sparse_semi_structured_linear": Call(STORED_BY, out=meta(8, 16), weight=STORED),
    "aten::_cslt_sparse_mm": Call(STORED_BY, out=meta(16, 8), dense_B=meta(64, 8)),
    "symm_mem::_async_input_mm": Call(PRODUCT, a=LEFT, b=RIGHT),
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
    assert work_by_name(name, CALLS[name]).flops == CALLS[name].cost
