"""Operators, copies, scopes, memory, kernels and devices; all values are worked out by hand from the events."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.data import DataLoader, TensorDataset

from lightning_flops.analysis.trace_report import analyze_trace
from lightning_flops.report.trace_document import render_traces
from lightning_flops.schema.tables import DeviceMetrics, IdleTime, MemoryCurve, OperatorRow
from lightning_flops.trace import tables
from lightning_flops.trace.columns import collective_of, multiplies, own_name, uses_tensor_cores
from lightning_flops.trace.read import load_trace
from tests.analysis.in_memory import analyze_traces, known
from tests.analysis.trace_events import (
    Event,
    kernel,
    launch,
    launched,
    memory,
    node,
    on_device,
    operator,
    scope,
    step,
    trace,
)


def rows(*events: Event) -> dict[str, OperatorRow]:
    return {row.name: row for row in tables.operator_table(trace(*events))}


def test_self_time_is_what_called_operators_leave() -> None:
    found = rows(
        operator("aten::linear", 0, 50), operator("aten::t", 5, 10), operator("aten::transpose", 7, 4),
        operator("aten::addmm", 20, 25), operator("aten::linear", 60, 10), operator("aten::relu", 5, 30, thread=2),
    )  # fmt: skip
    linear, t = found["aten::linear"], found["aten::t"]
    assert (linear.calls, linear.host.total_us, linear.host_self.total_us) == (2, 60, 15 + 10)
    assert (linear.host.min_us, linear.host.mean_us, linear.host.max_us) == (10, 30, 50)
    assert (t.host.total_us, t.host_self.total_us) == (10, 6)
    # 50 and 10 of the first thread, 30 of the second: the self times of all.
    assert (linear.host_self.ratio, linear.host.ratio) == (25 / 90, 60 / 90)
    assert sum(row.host_self.ratio or 0 for row in found.values()) == 1
    assert linear.device is linear.device_self is None


def test_device_time_belongs_to_the_operator_that_launched_and_to_its_callers() -> None:
    found = rows(
        operator("aten::linear", 0, 50), operator("aten::addmm", 20, 25), launch(1, 30), kernel(1, 100, 40),
        launch(2, 31), on_device("gpu_memset", 2, 140, 5, name="Memset (Device)"),
        launch(3, 47), kernel(3, 150, 7),
        launch(4, 55), kernel(4, 160, 3),  # outside any operator
    )  # fmt: skip
    times = {name: (row.device, row.device_self) for name, row in found.items()}
    total = {name: [one and one.total_us for one in both] for name, both in times.items()}
    assert total == {"aten::addmm": [45, 45], "aten::linear": [52, 7]}
    assert [one and one.ratio for one in times["aten::linear"]] == [1, 7 / 52]


def test_memory_of_called_operators_is_the_callers_too_but_not_its_own() -> None:
    loaded = trace(
        operator("aten::linear", 0, 50), memory(2, 100),
        operator("aten::addmm", 10, 30), memory(15, 64), memory(20, -40),
        memory(45, -100), memory(60, 8), memory(61, -24), memory(25, 512, device=0),
    )  # fmt: skip
    found = [
        (
            row.name, row.device, row.calls, row.size_increase_bytes, row.self_size_increase_bytes,
            row.allocation_bytes, row.self_allocation_bytes,
        )
        for row in tables.memory_table(loaded) or ()
    ]  # fmt: skip
    assert found == [
        ("aten::addmm", 0, 1, 512, 512, 512, 512),
        ("aten::linear", 0, 1, 512, 0, 512, 0),
        ("aten::linear", -1, 1, 24, 0, 164, 100),
        ("aten::addmm", -1, 1, 24, 24, 64, 64),
        (None, -1, 2, -16, -16, 8, 8),
    ]


def test_a_scope_has_what_any_thread_launched_while_it_was_open() -> None:
    found = trace(
        step(1, 0, 100),
        scope("loss", 10, 20), launch(1, 15), kernel(1, 16, 5),
        scope("my backward", 40, 30), node(1, 45, 10, thread=2), launch(2, 50, thread=2), kernel(2, 51, 7),
        launch(3, 92, thread=3), kernel(3, 95, 11),
        scope("loss", 80, 10),
    )  # fmt: skip
    loss, backward = tables.user_scope_table(found)
    assert (loss.name, loss.calls, known(loss.host).total_us, known(loss.host).ratio) == ("loss", 2, 30, 0.3)
    assert (backward.name, backward.calls, known(backward.host).total_us) == ("my backward", 1, 30)
    assert (known(loss.device).total_us, known(backward.device).total_us) == (5, 7)
    assert known(backward.device).ratio == 7 / 23


def test_scopes_that_torch_opens_are_not_the_users() -> None:
    names = ("ProfilerStep#1", "enumerate(DataLoader)#x.__next__", "Optimizer.step#Adam.step", "gloo:all_reduce")
    assert tables.user_scope_table(trace(*(scope(name, 0, 10) for name in names))) == ()


def test_copies_are_listed_with_their_launches_and_bytes() -> None:
    kind = "Memcpy HtoD (Pageable -> Device)"
    loaded = trace(
        step(1, 0, 100),
        launch(1, 0, 4), on_device("gpu_memcpy", 1, 10, 6, name=kind, bytes=1000),
        launch(2, 20, 6), on_device("gpu_memcpy", 2, 30, 2, name=kind, bytes=24),
        on_device("gpu_memset", 3, 40, 1, name="Memset (Device)"),  # no launch, no bytes
        launch(4, 41), kernel(4, 50, 11),
    )  # fmt: skip
    copy, memset = tables.transfer_table(loaded) or ()
    assert copy.device is not None and copy.host is not None
    assert (copy.calls, copy.bytes, copy.device.total_us, copy.device.ratio) == (2, 1024, 8, 8 / 20)
    assert (copy.host.total_us, copy.host.mean_us, copy.host.ratio) == (10, 5, 0.1)
    assert (memset.calls, memset.bytes, memset.host) == (1, None, None)


def test_an_operator_that_calls_only_itself_is_one_call() -> None:
    # 10 us with 6 of itself inside, of which 4 are a product's; a second call of 5 by another operator.
    found = rows(
        operator("aten::sum", 0, 10), operator("aten::sum", 2, 6), operator("aten::mm", 3, 4),
        operator("aten::mean", 20, 9), operator("aten::sum", 22, 5), operator("aten::sum", 23, 3),
        operator("aten::sum", 23, 2),
    )  # fmt: skip
    one = found["aten::sum"]
    assert (one.calls, one.host.total_us, one.host.max_us, one.host.min_us) == (2, 15, 10, 5)
    # 10 - 6 + (6 - 4), and all of the 5.
    assert (one.host_self.total_us, one.host_self.max_us, one.host_self.min_us) == (11, 6, 5)
    mean = found["aten::mean"]
    assert (mean.calls, mean.host.total_us, mean.host_self.total_us) == (1, 9, 4)
    assert sum(row.host_self.total_us for row in found.values()) == 10 + 9


def test_a_live_cpu_trace_is_analysed_and_rendered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KINETO_LOG_LEVEL", "5")
    target, steps, batch = tmp_path / "trace.json.gz", 3, 16
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = TensorDataset(torch.randn((steps + 1) * batch, 64), torch.zeros((steps + 1) * batch, dtype=torch.long))
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        profile_memory=True,
        acc_events=True,
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(target)),
    ) as profiler:
        for inputs, labels in DataLoader(data, batch_size=batch):
            with record_function("loss of a batch"):
                loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    live = load_trace(target)
    report = analyze_trace(live)
    assert report.step_times.marked
    assert [one.number for one in report.step_times.steps] == [1, 2, 3]
    for found in report.step_times.steps:
        parts = (found.data_loader_us, found.cpu_us, found.other_us)
        assert all(part is not None and part > 0 for part in parts)
        assert sum(round(1000 * (part or 0)) for part in parts) == round(found.wall_us * 1000)
    phases = {row.name: row.calls for row in report.phases or ()}
    assert phases == dict.fromkeys(
        ("step", "data loader", "forward (by operators)", "backward (by operators)", "optimizer", "others"), steps
    )
    operators = {row.name: row.calls for row in report.operators or ()}
    # Two linear layers forward; backward a product for each weight, and one for the second layer's input.
    assert (operators["aten::addmm"], operators["aten::mm"], operators["aten::relu"]) == (2 * steps, 3 * steps, steps)
    (scope,) = report.user_scopes or ()
    assert (scope.name, scope.calls) == ("loss of a batch", steps)
    memory = {row.name: row for row in report.memory or ()}
    # A layer's output: 16 rows of 128 and of 10 floats.
    assert memory["aten::addmm"].self_allocation_bytes == steps * batch * (128 + 10) * 4
    for table in (report.device_metrics, report.kernels, report.idle, report.collectives, report.overlap):
        assert table is None
    text = render_traces(analyze_traces([live]))
    assert "n/a: GPU utilization, SM efficiency, occupancy: no device events." in text


def sized(correlation: int, start: float, length: float, blocks: float, occupancy: float, **named: Any) -> Event:
    """A kernel with its blocks per SM and occupancy in percent."""
    more: dict[str, Any] = {"blocks per SM": blocks, "est. achieved occupancy %": occupancy}
    return kernel(correlation, start, length, **more, **named)


def test_64_blocks_on_80_sms_are_an_sm_efficiency_of_0_8() -> None:
    properties = [{"id": 0, "name": "V100", "numSms": 80, "totalGlobalMem": 1}]
    loaded = trace(step(1, 0, 10), launch(1, 0), sized(1, 0, 10, 64 / 80, 40), deviceProperties=properties)
    shares = {"utilization": 1.0, "sm_efficiency": 0.8, "occupancy_percent": 40, "blocks_per_sm": 0.8}
    assert tables.device_metrics(loaded) == (DeviceMetrics(device=0, name="V100", sm_count=80, **shares),)


def test_blocks_of_kernels_that_run_at_once_add_up_to_no_more_than_all_sms() -> None:
    loaded = trace(
        step(1, 0, 100),
        sized(1, 0, 20, 0.5, 10),
        sized(2, 10, 20, 0.75, 20, stream=8),  # 0.5 to 10, both to 20: 1, 0.75 to 30
    )
    assert (tables.device_metrics(loaded) or ())[0].sm_efficiency == (10 * 0.5 + 10 * 1 + 10 * 0.75) / 100
    # Equal lengths: the plain mean.
    assert (tables.device_metrics(loaded) or ())[0].occupancy_percent == 15


def test_figures_that_kernels_do_not_carry_are_none() -> None:
    (device,) = tables.device_metrics(trace(step(1, 0, 10), sized(1, 0, 5, 1, 50), kernel(2, 5, 5))) or ()
    assert device.utilization == 1.0
    assert device.sm_efficiency is None
    assert device.occupancy_percent == 50
    (device,) = tables.device_metrics(trace(step(1, 0, 10), kernel(2, 5, 5))) or ()
    assert device.occupancy_percent is device.blocks_per_sm is None
    assert device.name is None


def test_pauses_are_told_apart_by_when_what_ended_them_was_launched() -> None:
    loaded = trace(
        *launched(1, 0, 10, 10),
        *launched(2, 15, 49, 1),  # launched in time, 29 later: a kernel gap
        *launched(3, 16, 80, 20),  # launched in time, 30 later: other
        *launched(4, 120, 125, 5),  # launched after the pause had begun: the host
        kernel(5, 140, 10),  # nobody knows
    )
    whole = IdleTime(device=0, busy_us=46, host_wait_us=25, kernel_gap_us=29, other_us=30 + 10)
    assert (tables.idle_times(loaded) or ())[0] == whole


def test_a_device_idles_only_when_all_its_streams_do() -> None:
    loaded = trace(
        *launched(1, 0, 0, 100, stream=7), *launched(2, 0, 10, 10, stream=8),
        *launched(3, 50, 60, 10, stream=8), *launched(4, 105, 110, 10, stream=8),
    )  # fmt: skip
    assert [(row.busy_us, row.host_wait_us) for row in tables.idle_times(loaded) or ()] == [(110, 10)]


def test_kernels_are_grouped_by_name_and_weighted_by_time() -> None:
    gemm = "ampere_bf16_s16816gemm_bf16_128x128"
    loaded = trace(
        operator("aten::mm", 0, 10),
        launch(1, 1), sized(1, 20, 30, 1, 10, name=gemm), launch(2, 2), sized(2, 60, 10, 3, 50, name=gemm),
        operator("aten::relu", 11, 5), *launched(3, 12, 80, 18, name="elementwise"),
        operator("aten::add", 16, 5), *launched(5, 17, 100, 12, name="elementwise"),
        *launched(6, 19, 115, 10, name="elementwise"),
        *launched(4, 22, 130, 20, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL", stream=9),
    )  # fmt: skip
    first, second, third = known(tables.kernel_tables(loaded)[0])
    assert [row.operator for row in (first, second, third)] == ["aten::mm", "aten::add", ""]
    assert (first.name, first.calls, first.device.ratio) == (gemm, 2, 0.4)
    assert (first.blocks_per_sm, first.occupancy_percent) == (1.5, 20)
    assert (first.tensor_cores, first.tensor_cores_eligible) == (True, True)
    assert (second.name, second.tensor_cores, second.tensor_cores_eligible) == ("elementwise", False, False)
    assert second.blocks_per_sm is None
    assert third.collective
    summary = known(tables.kernel_tables(loaded)[1])
    # Collectives compute nothing, on tensor cores or off.
    assert (summary.calls, summary.total_us, summary.tensor_core_ratio) == (6, 100, 40 / 80)
    assert summary.tensor_core_eligible_ratio == 40 / 80
    assert (summary.short_calls_ratio, summary.short_time_ratio) == (0, 0)


ON_TENSOR_CORES = (
    "turing_fp16_s1688gemm_fp16_128x128_ldg8_f2f_nt",
    "ampere_fp16_s16816gemm_fp16_128x128_ldg8_relu_f2f_stages_32x5_nn",
    "sm80_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x32_stage4_warpsize2x2x1_tensor16x8x16_kernel",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_f16_s161616gemm_f16_32x32_128x2_nn_align8>",
    "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4> >",
    "fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0",
)
MULTIPLY = (  # on no tensor cores, or of other libraries and vendors, whose names do not say
    "ampere_sgemm_128x64_nn",
    "sm80_xmma_gemm_f32f32_f32f32_f32_nn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4_alignc4_execute_kernel__5x_cublas",
    "maxwell_scudnn_winograd_128x128_ldg1_ldg4_tile418n_nt",
    "fmha_cutlassF_f32_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)",
    "Cijk_Ailk_Bljk_HHS_BH_MT128x128x32_MI32x32x8x1_SN_1LDSB0",  # rocBLAS, hipBLASLt
    "void ck::kernel_grouped_conv_fwd_multiple_abd_xdl_cshuffle<ck::GridwiseGemmMultipleD_xdl_cshuffle<float> >",
    "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f2x3_stride1",
    "attn_fwd.kd",  # AOTriton
    "bwd_kernel_dk_dv.kd",
    "gen_conv_kernel",  # oneDNN on Intel's GPUs
    "matmul_kernel",  # Triton's tutorial
    "fused_moe_kernel",
    "kernel_unified_attention_2d",
    "void paged_attention_ll4mi_QKV_mfma16_kernel<__hip_bfloat16>",
    "_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1",
    "bmm_Bfloat16_MxE2m1MxE4m3_Fp32_t128x16x256u2_s3",
    "igemm_fwd_gtcx3_nhwc_bf16_bx0_ex1_bt128x128x32",
    "triton_tem_fused_mm_0",
)
DO_NOT = (
    "void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>, at::detail::Array<char*> >",
    "void at::native::vectorized_elementwise_kernel<4, at::native::conv_x<float>>(int)",
    "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda>",
    "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 512, true, 1>",
    "triton_poi_fused_convert_element_type_0",
    "triton_poi_fused__scaled_dot_product_flash_attention_cat_view_10",
    "triton_red_fused_mm_native_layer_norm_2",
    "MIOpenBatchNormFwdTrainSpatial",
    "SubTensorOpWithScalar1d",
    "SubTensorOpWithCastTensor1d",
    "void vllm::reshape_and_cache_flash_kernel<__hip_bfloat16, __hip_bfloat16, (vllm::Fp8KVCacheDataType)0>",
    "create_flashinfer_kv_indices_triton",
    "void cudnn::cnn::computeWgradBOffsetsKernel(int)",
    "_finalize_matmul_scatter_bf16",
    "convert_to_bfloat16_kernel",
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


@pytest.mark.parametrize(
    ("call", "device", "ratio"),
    [
        ("cudaLaunchKernel", "NVIDIA A100-SXM4-40GB", 1.0),
        *((call, "", None) for call in ("hipLaunchKernel", "urEnqueueKernelLaunch", "zeCommandListAppendLaunchKernel")),
        *(
            ("cudaLaunchKernel", device, None)
            for device in ("AMD Instinct MI250X", "Intel(R) Data Center GPU Max 1550")
        ),
    ],
)
def test_other_vendors_kernels_may_have_run_on_matrix_cores_or_not(call: str, device: str, ratio: float | None) -> None:
    events = (operator("aten::mm", 0, 10), {**launch(1, 2), "name": call}, kernel(1, 5, 10, name="flash_fwd"))
    found = known(tables.kernel_tables(trace(*events, deviceProperties=[{"id": 0, "name": device}]))[1])
    assert (found.tensor_core_ratio, found.tensor_core_eligible_ratio) == (ratio, ratio)


def test_a_communication_kernels_name_tells_its_collective() -> None:
    found = {
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)": "allreduce",
        "ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)": "allgather",
        "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL": "reducescatter",
        "ncclAllReduceRingLLKernel_sum_f32(ncclColl)": "allreduce",
        "ncclDevKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)": "sendrecv",
    }
    assert {name: collective_of(name) for name in found} == found


at = partial(memory, device=0)  # as torch has written it since 2.0


def test_curve_has_the_highest_point_of_each_stretch_and_the_peak() -> None:
    loaded = trace(
        step(4, 10, 50), step(5, 60, 60), at(22, 100, total=1100), at(25, 50, total=1150), at(72, -50, total=1100),
        at(74, 700, total=1800), at(90, 30, total=1830), at(100, -700, total=1130),
    )  # fmt: skip
    points = ((12, 1100), (15, 1150), (62, 1100), (64, 1800), (80, 1830), (90, 1130))
    curve = MemoryCurve(device=0, absolute=True, peak_bytes=1830, peak_us=90 - 10, points=points)
    assert tables.memory_curves(loaded) == (curve,)
    # An old trace, without totals, shows the change.
    (old,) = known(tables.memory_curves(trace(operator("aten::mm", 0, 5), memory(1, 100), memory(3, 50))))
    assert (old.absolute, old.peak_bytes, old.device) == (False, 150, -1)
