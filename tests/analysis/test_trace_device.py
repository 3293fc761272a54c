from __future__ import annotations

from typing import Any

import pytest

from lightning_flops.schema.trace_events import IdleTime
from lightning_flops.schema.trace_steps import DeviceMetrics
from lightning_flops.trace.names import collective_of_kernel, multiplies, own_name, uses_tensor_cores
from lightning_flops.trace.tables import device_metrics, idle_times, kernel_summary, kernel_table
from tests.analysis.trace_events import Event, kernel, launch, operator, step, trace


def sized(correlation: int, start: float, length: float, blocks: float, occupancy: float, **named: Any) -> Event:
    """A kernel with its blocks per SM and occupancy in percent."""
    more: dict[str, Any] = {"blocks per SM": blocks, "est. achieved occupancy %": occupancy}
    return kernel(correlation, start, length, **more, **named)


def test_64_blocks_on_80_sms_are_an_sm_efficiency_of_0_8() -> None:
    properties = [{"id": 0, "name": "V100", "numSms": 80, "totalGlobalMem": 1}]
    loaded = trace(step(1, 0, 10), launch(1, 0), sized(1, 0, 10, 64 / 80, 40), deviceProperties=properties)
    shares = {"utilization": 1.0, "sm_efficiency": 0.8, "occupancy_percent": 40, "blocks_per_sm": 0.8}
    assert device_metrics(loaded) == (DeviceMetrics(device=0, name="V100", sm_count=80, busy_us=10, **shares),)


def test_blocks_of_kernels_that_run_at_once_add_up_to_no_more_than_all_sms() -> None:
    loaded = trace(
        step(1, 0, 100),
        sized(1, 0, 20, 0.5, 10),
        sized(2, 10, 20, 0.75, 20, stream=8),  # 0.5 to 10, both to 20: 1, 0.75 to 30
    )
    assert (device_metrics(loaded) or ())[0].sm_efficiency == (10 * 0.5 + 10 * 1 + 10 * 0.75) / 100
    # Equal lengths: the plain mean.
    assert (device_metrics(loaded) or ())[0].occupancy_percent == 15


def test_figures_that_kernels_do_not_carry_are_none() -> None:
    (device,) = device_metrics(trace(step(1, 0, 10), sized(1, 0, 5, 1, 50), kernel(2, 5, 5))) or ()
    assert device.utilization == 1.0
    assert device.sm_efficiency is None
    assert device.occupancy_percent == 50
    (device,) = device_metrics(trace(step(1, 0, 10), kernel(2, 5, 5))) or ()
    assert device.occupancy_percent is device.blocks_per_sm is None
    assert device.name is None


def test_a_trace_without_a_device_has_no_device_tables() -> None:
    loaded = trace(step(1, 0, 10), operator("aten::mm", 1, 2))
    for table in (device_metrics, kernel_table, kernel_summary, idle_times):
        assert table(loaded) is None


def test_pauses_are_told_apart_by_when_what_ended_them_was_launched() -> None:
    loaded = trace(
        launch(1, 0),
        kernel(1, 10, 10),
        launch(2, 15),
        kernel(2, 49, 1),  # launched in time, 29 later: a kernel gap
        launch(3, 16),
        kernel(3, 80, 20),  # launched in time, 30 later: other
        launch(4, 120),
        kernel(4, 125, 5),  # launched after the pause had begun: the host
        kernel(5, 140, 10),  # nobody knows
    )
    whole = IdleTime(device=0, busy_us=46, host_wait_us=25, kernel_gap_us=29, other_us=30 + 10)
    assert (idle_times(loaded) or ())[0] == whole


def test_a_device_idles_only_when_all_its_streams_do() -> None:
    loaded = trace(
        launch(1, 0),
        kernel(1, 0, 100, stream=7),
        launch(2, 0),
        kernel(2, 10, 10, stream=8),
        launch(3, 50),
        kernel(3, 60, 10, stream=8),
        launch(4, 105),
        kernel(4, 110, 10, stream=8),
    )
    assert [(row.busy_us, row.host_wait_us) for row in idle_times(loaded) or ()] == [(110, 10)]


def test_kernels_are_grouped_by_name_and_weighted_by_time() -> None:
    loaded = trace(
        operator("aten::mm", 0, 10),
        launch(1, 1),
        sized(1, 20, 30, 1, 10, name="ampere_bf16_s16816gemm_bf16_128x128"),
        launch(2, 2),
        sized(2, 60, 10, 3, 50, name="ampere_bf16_s16816gemm_bf16_128x128"),
        operator("aten::relu", 11, 5),
        launch(3, 12),
        kernel(3, 80, 40, name="elementwise"),
        launch(4, 17),
        kernel(4, 130, 20, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", stream=9),
    )
    first, second, third = kernel_table(loaded) or ()
    assert (first.name, first.calls, first.device.ratio) == ("ampere_bf16_s16816gemm_bf16_128x128", 2, 0.4)
    assert (first.blocks_per_sm, first.occupancy_percent) == (1.5, 20)
    assert first.tensor_cores
    assert first.tensor_cores_eligible
    assert (second.name, second.tensor_cores, second.tensor_cores_eligible) == ("elementwise", False, False)
    assert second.blocks_per_sm is None
    assert third.collective
    summary = kernel_summary(loaded)
    assert summary is not None
    # Collectives compute nothing, on tensor cores or off.
    assert (summary.calls, summary.total_us, summary.tensor_core_ratio) == (4, 100, 40 / 80)
    assert summary.tensor_core_eligible_ratio == 40 / 80
    assert (summary.short_calls_ratio, summary.short_time_ratio) == (0, 0)


ON_TENSOR_CORES = (
    "volta_h884gemm_128x64_ldg8_nn",
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nt",
    "ampere_fp16_s16816gemm_fp16_128x128_ldg8_relu_f2f_stages_32x5_nn",
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16_kernel",
    "sm90_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x32",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT",
    "cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_nn_align8",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_nn_align8>",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4> >",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
)
MULTIPLY = (  # on no tensor cores, or of other libraries and vendors, whose names do not say
    "ampere_sgemm_128x64_nn",
    "volta_scudnn_128x64_relu_medium_nn_v1",
    "maxwell_scudnn_winograd_128x128_ldg1_ldg4_tile418n_nt",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0",  # rocBLAS, hipBLASLt
    "void ck::kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle<ck::GridwiseGemmMultipleD_xdl_cshuffle<float> >",
    "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1",
    "attn_fwd.kd",  # AOTriton
    "bwd_kernel_dk_dv.kd",
    "gen_conv_kernel",  # oneDNN on Intel's GPUs
    "micro_sdpa",
    "matmul_kernel",  # Triton's tutorial
    "_chunk_scan_fwd_kernel",  # Mamba 2
    "fused_moe_kernel",
    "triton_tem_fused_mm_0",
)
DO_NOT = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, at::detail::Array<char*> >",
    "void at::native::vectorized_elementwise_kernel<4, at::native::conv_x<float>>(int)",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>",
    "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>",
    "triton_poi_fused_add_relu_0",
    "triton_poi_fused_convert_element_type_0",
    "triton_poi_fused__scaled_dot_product_flash_attention_cat_view_10",
    "triton_red_fused_native_layer_norm_1",
    "triton_red_fused_mm_native_layer_norm_2",
    "triton_per_fused_convolution_1",
    "MIOpenBatchNormFwdTrainSpatial",
    "SubTensorOpWithScalar1d",
    "void moe::align_block_size_kernel<int>",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
)


@pytest.mark.parametrize("name", [*ON_TENSOR_CORES, *MULTIPLY, *DO_NOT])
def test_names_of_kernels_tell_which_multiply_and_on_tensor_cores(name: str) -> None:
    assert (multiplies(name), uses_tensor_cores(name)) == (name not in DO_NOT, name in ON_TENSOR_CORES)


@pytest.mark.parametrize(
    ("name", "own", "is_product"),
    [
        ("void fbgemm_gpu::permute_2D_lengths_kernel<int>(int, int const*)", "permute_2D_lengths_kernel", False),
        ("_ZN10fbgemm_gpu25permute_2D_lengths_kernelIiEEvPi", "permute_2D_lengths_kernel", False),
        ("void cutlass::Kernel2<cutlass_80_tensorop_s16816gemm_bf16>(X)", None, True),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int, float>(P)", None, True),
        ("void gemmSN_TN_kernel<float, 128>(int)", "gemmSN_TN_kernel", True),
        ("ampere_sgemm_128x64_tn", "ampere_sgemm_128x64_tn", True),
    ],
)
def test_a_kernel_is_known_by_its_functions_own_name(name: str, own: str | None, is_product: bool) -> None:
    assert multiplies(name) is is_product
    assert own is None or own_name(name) == own


def named(name: str) -> list[dict[str, Any]]:
    return [{"id": 0, "name": name}]


@pytest.mark.parametrize(
    ("call", "devices", "ratio"),
    [
        ("cudaLaunchKernel", named("NVIDIA A100-SXM4-40GB"), 1.0),
        ("hipLaunchKernel", [], None),
        ("urEnqueueKernelLaunch", [], None),
        ("zeCommandListAppendLaunchKernel", [], None),
        ("cudaLaunchKernel", named("AMD Instinct MI250X"), None),
        ("cudaLaunchKernel", named("Intel(R) Data Center GPU Max 1550"), None),
    ],
)
def test_of_other_vendors_kernels_it_is_not_known_which_ran_on_matrix_cores(
    call: str, devices: list[dict[str, Any]], ratio: float | None
) -> None:
    flash = kernel(1, 5, 10, name="flash_fwd")
    launched = {**launch(1, 2), "name": call}
    found = kernel_summary(trace(operator("aten::mm", 0, 10), launched, flash, deviceProperties=devices))
    assert found is not None and (found.tensor_core_ratio, found.tensor_core_eligible_ratio) == (ratio, ratio)


@pytest.mark.parametrize(
    ("kernel_name", "collective"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)", "allreduce"),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)", "allgather"),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL", "reducescatter"),
        ("ncclAllReduceRingLLKernel_sum_f32(ncclColl)", "allreduce"),
        ("ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)", "sendrecv"),
    ],
)
def test_a_communication_kernels_name_tells_its_collective(kernel_name: str, collective: str) -> None:
    assert collective_of_kernel(kernel_name) == collective
