"""The two data sets whose answers are known; tests/data/traces/README.md says what they are."""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from typing import Any

import pytest

from lightning_flops.analysis.trace_report import analyze_trace
from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.schema.tables import DeviceMetrics
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.trace.read import load_trace
from tests.analysis.in_memory import analyze_traces, known
from tests.analysis.trace_events import RANKS, RESNET


@lru_cache(maxsize=1)
def resnet() -> TraceReport:
    return analyze_trace(load_trace(RESNET), formulas=recorded_work)


@lru_cache(maxsize=1)
def resnet_events() -> list[dict[str, Any]]:
    """The same file as plain dicts, for sums that take no code of ours."""
    with gzip.open(RESNET, "rt") as file:
        return list(json.load(file)["traceEvents"])


@lru_cache(maxsize=1)
def two_ranks() -> TracesReport:
    # Rank 1 first: the order on the command line must not matter.
    return analyze_traces([load_trace(file) for file in RANKS[::-1]])


def only_device(report: TraceReport) -> DeviceMetrics:
    (device,) = known(report.device_metrics)
    return device


def test_resnet_has_the_figures_that_are_known_of_it() -> None:
    report = resnet()
    device, mean, summary = only_device(report), report.step_times.mean, known(report.kernel_summary)
    assert (device.name, device.sm_count) == ("Tesla V100-DGXS-32GB", 80)
    shares = (device.utilization, known(device.sm_efficiency), known(device.occupancy_percent) / 100)
    assert [round(share, 4) for share in shares] == [0.5551, 0.5468, 0.4913]
    assert (round(mean.wall_us), round(100 * known(mean.data_loader_us) / mean.wall_us, 2)) == (177_592, 33.37)
    (idle,) = known(report.idle)
    assert (idle.host_wait_us, idle.kernel_gap_us, idle.other_us) == (382_676, 10_243, 0)
    short = (known(summary.short_calls_ratio), known(summary.short_time_ratio))
    assert (round(short[0], 2), round(short[1], 3)) == (0.62, 0.014)
    # What the plugin of TensorBoard prints.
    (row,) = (row for row in known(report.memory) if (row.name, row.device) == ("aten::div", 0))
    assert row.allocation_bytes == 75_264 * 1024


def test_tables_of_resnet_hold_every_event_once() -> None:
    kernels, memory = known(resnet().kernels), known(resnet().memory)
    operators = {row.name: row for row in known(resnet().operators)}
    events = [event for event in resnet_events() if event["ph"] == "X"]
    lengths = [event["dur"] for event in events if event["cat"] == "Kernel"]
    assert sum(row.calls for row in kernels) == len(lengths) == 8772
    assert sum(row.device.total_us for row in kernels) == sum(lengths)
    for name in ("aten::conv2d", "aten::cudnn_convolution_backward_weight", "aten::add_"):
        lengths, row = [event["dur"] for event in events if event["name"] == name], operators[name]
        assert (row.calls, row.host.total_us) == (len(lengths), sum(lengths))
        assert (row.host.min_us, row.host.max_us) == (min(lengths), max(lengths))
    # All device work was launched in operators.
    device_self = sum(row.device_self.total_us for row in operators.values() if row.device_self is not None)
    assert device_self == sum(event["dur"] for event in events if event["cat"] in ("Kernel", "Memcpy", "Memset"))
    sizes = [event["args"]["Bytes"] for event in resnet_events() if event["name"] == "[memory]"]
    assert sum(row.self_size_increase_bytes for row in memory) == sum(sizes)
    assert sum(row.self_allocation_bytes for row in memory) == sum(size for size in sizes if size > 0)


@pytest.mark.parametrize(
    ("rank", "computation", "communication", "overlap", "other"),
    [(0, 5000, 4000, 2000, 2990), (1, 5500, 2000, 500, 2990)],
)
def test_ranks_compute_communicate_and_overlap_as_they_were_made(
    rank: int, computation: int, communication: int, overlap: int, other: int
) -> None:
    row = known(two_ranks().ranks).ranks[rank]
    assert (row.rank, row.steps, row.overlap.wall_us) == (rank, 3, 3 * 9990)
    assert (row.overlap.computation_us, row.overlap.communication_us) == (3 * computation, 3 * communication)
    assert (row.overlap.overlap_us, row.overlap.other_us) == (3 * overlap, 3 * other)
    assert row.overlap.overlap_ratio == overlap / communication


def test_half_of_rank_0s_collective_is_waiting_for_rank_1_the_straggler() -> None:
    ranks = known(two_ranks().ranks)
    first, second = ranks.ranks
    assert (first.transfer_us, first.wait_us) == (3 * 2000, 3 * 2000)
    assert (second.transfer_us, second.wait_us) == (3 * 2000, 0)
    assert ranks.notes == ()
    # 1,048,576 floats of 4 bytes, three times.
    (collective,) = first.collectives
    assert (collective.name, collective.calls, collective.bytes) == ("allreduce", 3, 3 * 1048576 * 4)


def test_device_figures_of_rank_0_follow_from_its_three_kernels() -> None:
    device, other = map(only_device, two_ranks().traces)
    assert (device.occupancy_percent, round(known(other.occupancy_percent), 3)) == (22.0, 26.533)
    # 1,000 to 8,000 without a pause, of 9,990.
    assert device.utilization == 7000 / 9990
    # A GEMM on half the SMs, 1,000 to 5,000; with 0.1 of communication from 4,000; all SMs to 6,000; 0.1 to 8,000.
    assert round(known(device.sm_efficiency) * 9990, 6) == 3000 * 0.5 + 1000 * 0.6 + 1000 * 1 + 2000 * 0.1
    assert round(known(device.blocks_per_sm), 12) == round((4000 * 0.5 + 1000 * 4 + 4000 * 0.1) / 9000, 12)


def test_step_of_rank_0_is_broken_down_by_priority() -> None:
    for step in two_ranks().traces[0].step_times.steps:
        assert (step.wall_us, step.kernel_us, step.memcpy_us, step.memset_us) == (9990, 5000, 200, 0)
        # From 6,000, where computation ends, to 8,000.
        assert (step.communication_us, step.data_loader_us) == (2000, 300)
        # 1,300 of cudaDeviceSynchronize and four launches of 20, all before the first kernel or after the last.
        assert step.runtime_us == 1300 + 4 * 20
        # Three operators of 60, each 20 of them in a launch; the collective's scope is none.
        assert step.cpu_us == 3 * 40


def resnet50_products(batch: int) -> tuple[int, int]:
    """Multiply-adds of ResNet-50's forward on images of 224 x 224, and of its first convolution, by its layers."""
    first = batch * 112 * 112 * 64 * 3 * 7 * 7
    total = first
    width_in, side = 64, 56
    for blocks, width in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            stride = 2 if block == 0 and width > 64 else 1
            out = side // stride
            total += batch * side**2 * width * width_in  # 1 x 1, before the stride
            total += batch * out**2 * width * width * 3 * 3
            total += batch * out**2 * 4 * width * width  # 1 x 1
            if block == 0:
                total += batch * out**2 * 4 * width * width_in  # the shortcut
            width_in, side = 4 * width, out
    return total + batch * 2048 * 1000, first


def test_flops_of_a_resnet_step_are_those_of_its_layers_and_batch() -> None:
    # The batch is in the shapes: the first convolution's input is [32, 3, 224, 224].
    products, first = resnet50_products(batch=32)
    assert products == 32 * 4_089_184_256
    flops = known(resnet().flops)
    assert [step.step for step in flops.steps] == [5, 6, 7, 8, 9, 10]
    for step in flops.steps:
        # Gradients of inputs and of weights, but for the image's.
        assert (step.forward, step.backward) == (2 * products, 2 * 2 * products - 2 * first)
        assert (step.recompute, step.optimizer, step.skipped, step.lower_bound) == (0, 0, 0, False)
    assert flops.uncounted == ()
    assert sum(row.forward + row.backward for row in flops.operators) == 6 * (6 * products - 2 * first)


def test_mfu_of_resnet_steps_is_theirs_on_a_v100_in_float32() -> None:
    flops = known(resnet().flops)
    assert (flops.device, flops.devices, flops.peaks) == ("Tesla V100-DGXS-32GB", 1, {"float32": 15.7e12})
    products, first = resnet50_products(batch=32)
    for step, times in zip(flops.steps, resnet().step_times.steps, strict=True):
        assert (step.wall_us, step.hfu) == (times.wall_us, step.mfu)
        assert abs(known(step.mfu) - (6 * products - 2 * first) / 15.7e12 / (times.wall_us / 1e6)) < 1e-12


def test_rates_of_resnet_operators_are_over_the_kernels_that_they_launched() -> None:
    """By plain sums over the file: a kernel's external id is its operator's, innermost."""
    events = [event for event in resnet_events() if event["ph"] == "X"]
    ids = {event["args"]["External id"] for event in events if event["name"] == "aten::cudnn_convolution"}
    kernels = [event for event in events if event["cat"] in ("Kernel", "Memcpy", "Memset")]
    time_us = sum(event["dur"] for event in kernels if event["args"]["external id"] in ids)
    operators = known(resnet().flops).operators
    (row,) = (row for row in operators if row.name == "aten.cudnn_convolution")
    products = resnet50_products(batch=32)[0] - 32 * 2048 * 1000
    assert (row.calls, row.forward, row.time_us) == (6 * 53, 6 * 2 * products, time_us)
    assert abs(known(row.flops_per_sec) - 6 * 2 * products / (time_us / 1e6)) < 1
    assert row.of_peak == known(row.flops_per_sec) / 15.7e12
    multiplied = [one.flops.total for one in known(resnet().kernels) if one.flops is not None]
    # Divided among kernels and rounded once for each name.
    assert abs(sum(multiplied) - sum(one.forward + one.backward for one in operators)) <= len(multiplied)


def test_flops_of_a_resnets_shapes_are_those_of_its_layers() -> None:
    rows = {(row.name, row.inputs): row for row in known(resnet().operators_by_shape)}
    # The last convolution of the third stage's blocks, 1 x 1 from 256 to 1024 channels, in 6 blocks of 6 steps.
    row = rows["aten::cudnn_convolution", "[32, 256, 14, 14], [1024, 256, 1, 1]"]
    flops = known(row.flops)
    assert (row.calls, flops.forward, flops.backward) == (36, 36 * 2 * 32 * 14 * 14 * 256 * 1024, 0)
    counted, operators = [row.flops for row in rows.values() if row.flops is not None], known(resnet().flops).operators
    for part in ("forward", "backward", "recompute", "optimizer"):
        assert sum(getattr(one, part) for one in counted) == sum(getattr(one, part) for one in operators)
