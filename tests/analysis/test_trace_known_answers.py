"""The two data sets whose answers are known; tests/data/traces/README.md says what they are."""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from lightning_flops.measure.counting.recorded_calls import recorded_work
from lightning_flops.schema.trace import TraceReport, TracesReport
from lightning_flops.schema.trace_steps import DeviceMetrics
from lightning_flops.trace import analyze_trace, load_trace
from lightning_flops.trace.columns import Trace
from tests.analysis.in_memory import analyze_traces

TRACES = Path(__file__).parents[1] / "data" / "traces"
RESNET = TRACES / "resnet50_num_workers_0.pt.trace.json.gz"


@lru_cache(maxsize=1)
def resnet() -> tuple[Trace, TraceReport]:
    trace = load_trace(RESNET)
    return trace, analyze_trace(trace, formulas=recorded_work)


@lru_cache(maxsize=1)
def resnet_events() -> list[dict[str, Any]]:
    """The same file as plain dicts, for sums that take no code of ours."""
    with gzip.open(RESNET, "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


@lru_cache(maxsize=1)
def two_ranks() -> TracesReport:
    # Rank 1 first: the order on the command line must not matter.
    return analyze_traces([load_trace(TRACES / f"two_ranks_known_answers.rank{rank}.pt.trace.json") for rank in (1, 0)])


def only_device(report: TraceReport) -> DeviceMetrics:
    assert report.device_metrics is not None
    (device,) = report.device_metrics
    return device


def test_resnet_has_the_figures_that_are_known_of_it() -> None:
    report = resnet()[1]
    device, mean, summary = only_device(report), report.step_times.mean, report.kernel_summary
    assert (device.name, device.sm_count) == ("Tesla V100-DGXS-32GB", 80)
    shares = (device.utilization, device.sm_efficiency or 0, (device.occupancy_percent or 0) / 100)
    assert [round(share, 4) for share in shares] == [0.5551, 0.5468, 0.4913]
    assert (round(mean.wall_us), round(100 * (mean.data_loader_us or 0) / mean.wall_us, 2)) == (177_592, 33.37)
    (idle,) = report.idle or ()
    assert (idle.host_wait_us, idle.kernel_gap_us, idle.other_us) == (382_676, 10_243, 0)
    assert summary is not None
    assert (round(summary.short_calls_ratio or 0, 2), round(summary.short_time_ratio or 0, 3)) == (0.62, 0.014)
    # What the plugin of TensorBoard prints.
    (row,) = (row for row in report.memory or () if (row.name, row.device) == ("aten::div", 0))
    assert row.allocation_bytes == 75_264 * 1024


def test_tables_of_resnet_hold_every_event_once() -> None:
    _, report = resnet()
    assert report.kernels is not None
    assert report.operators is not None
    assert report.transfers is not None
    assert report.memory is not None
    events = resnet_events()
    kernels = [event for event in events if event["cat"] == "Kernel"]
    assert sum(row.calls for row in report.kernels) == len(kernels) == 8772
    assert sum(row.device.total_us for row in report.kernels) == sum(event["dur"] for event in kernels)
    by_name = {row.name: row for row in report.operators}
    for name in ("aten::conv2d", "aten::cudnn_convolution_backward_weight", "aten::add_"):
        lengths = [event["dur"] for event in events if event["name"] == name]
        row = by_name[name]
        assert (row.calls, row.host.total_us) == (len(lengths), sum(lengths))
        assert (row.host.min_us, row.host.max_us) == (min(lengths), max(lengths))
    # All device work was launched in operators.
    device_self = sum(row.device_self.total_us for row in report.operators if row.device_self is not None)
    device_all = sum(event["dur"] for event in events if event["cat"] in ("Kernel", "Memcpy", "Memset"))
    assert device_self == device_all
    with gzip.open(RESNET, "rt") as file:
        sizes = [event["args"]["Bytes"] for event in json.load(file)["traceEvents"] if event["name"] == "[memory]"]
    assert sum(row.self_size_increase_bytes for row in report.memory) == sum(sizes)
    assert sum(row.self_allocation_bytes for row in report.memory) == sum(size for size in sizes if size > 0)


@pytest.mark.parametrize(
    ("rank", "computation", "communication", "overlap", "other"),
    [(0, 5000, 4000, 2000, 2990), (1, 5500, 2000, 500, 2990)],
)
def test_ranks_compute_communicate_and_overlap_as_they_were_made(
    rank: int, computation: int, communication: int, overlap: int, other: int
) -> None:
    ranks = two_ranks().ranks
    assert ranks is not None
    row = ranks.ranks[rank]
    assert (row.rank, row.steps) == (rank, 3)
    assert row.overlap.wall_us == 3 * 9990
    assert row.overlap.computation_us == 3 * computation
    assert row.overlap.communication_us == 3 * communication
    assert row.overlap.overlap_us == 3 * overlap
    assert row.overlap.other_us == 3 * other
    assert row.overlap.overlap_ratio == overlap / communication


def test_half_of_rank_0s_collective_is_waiting_for_rank_1_the_straggler() -> None:
    ranks = two_ranks().ranks
    assert ranks is not None
    first, second = ranks.ranks
    assert (first.transfer_us, first.wait_us) == (3 * 2000, 3 * 2000)
    assert (second.transfer_us, second.wait_us) == (3 * 2000, 0)
    assert first.compute_over_median == 5000 / 5250
    assert second.compute_over_median == 5500 / 5250
    # 1,048,576 floats of 4 bytes, three times.
    (collective,) = first.collectives
    assert (collective.name, collective.calls, collective.bytes) == ("allreduce", 3, 3 * 1048576 * 4)
    assert ranks.notes == ()


def test_device_figures_of_rank_0_follow_from_its_three_kernels() -> None:
    device, other = map(only_device, two_ranks().traces)
    assert (device.occupancy_percent, round(other.occupancy_percent or 0, 3)) == (22.0, 26.533)
    # 1,000 to 8,000 without a pause, of 9,990.
    assert device.utilization == 7000 / 9990
    # A GEMM on half the SMs, 1,000 to 5,000; with 0.1 of communication from 4,000; all SMs to 6,000; 0.1 to 8,000.
    assert device.sm_efficiency is not None
    assert round(device.sm_efficiency * 9990, 6) == 3000 * 0.5 + 1000 * 0.6 + 1000 * 1 + 2000 * 0.1
    assert device.blocks_per_sm is not None
    assert round(device.blocks_per_sm, 12) == round((4000 * 0.5 + 1000 * 4 + 4000 * 0.1) / 9000, 12)


def test_step_of_rank_0_is_broken_down_by_priority() -> None:
    for step in two_ranks().traces[0].step_times.steps:
        assert step.wall_us == 9990
        assert step.kernel_us == 5000
        assert step.memcpy_us == 200
        assert step.memset_us == 0
        # From 6,000, where computation ends, to 8,000.
        assert step.communication_us == 2000
        # 1,300 of cudaDeviceSynchronize and four launches of 20, all before the first kernel or after the last.
        assert step.runtime_us == 1300 + 4 * 20
        assert step.data_loader_us == 300
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
    flops = resnet()[1].flops
    assert flops is not None
    assert [step.step for step in flops.steps] == [5, 6, 7, 8, 9, 10]
    for step in flops.steps:
        assert step.forward == 2 * products
        # Gradients of inputs and of weights, but for the image's.
        assert step.backward == 2 * 2 * products - 2 * first
        assert (step.recompute, step.optimizer, step.skipped) == (0, 0, 0)
        assert not step.lower_bound
    assert flops.uncounted == ()
    assert sum(row.forward + row.backward for row in flops.operators) == 6 * (6 * products - 2 * first)


def test_mfu_of_resnet_steps_is_theirs_on_a_v100_in_float32() -> None:
    flops = resnet()[1].flops
    assert flops is not None
    assert (flops.device, flops.devices, flops.peaks) == ("Tesla V100-DGXS-32GB", 1, {"float32": 15.7e12})
    products, first = resnet50_products(batch=32)
    for step, times in zip(flops.steps, resnet()[1].step_times.steps, strict=True):
        assert step.wall_us == times.wall_us
        assert step.mfu is not None
        assert abs(step.mfu - (6 * products - 2 * first) / 15.7e12 / (times.wall_us / 1e6)) < 1e-12
        assert step.hfu == step.mfu


def test_rates_of_resnet_operators_are_over_the_kernels_that_they_launched() -> None:
    """By plain sums over the file: a kernel's external id is its operator's, innermost."""
    flops = resnet()[1].flops
    assert flops is not None
    events = resnet_events()
    ids = {event["args"]["External id"] for event in events if event["name"] == "aten::cudnn_convolution"}
    kernels = [event for event in events if event["cat"] in ("Kernel", "Memcpy", "Memset")]
    time_us = sum(event["dur"] for event in kernels if event["args"]["external id"] in ids)
    (row,) = (row for row in flops.operators if row.name == "aten.cudnn_convolution")
    products = resnet50_products(batch=32)[0] - 32 * 2048 * 1000
    assert row.calls == 6 * 53
    assert row.forward == 6 * 2 * products
    assert row.time_us == time_us
    assert row.flops_per_sec is not None
    assert abs(row.flops_per_sec - 6 * 2 * products / (time_us / 1e6)) < 1
    assert row.peak_share == row.flops_per_sec / 15.7e12
    assert flops.kernels is not None
    executed = sum(one.flops for one in flops.kernels)
    # Divided among kernels and rounded once for each name.
    assert abs(executed - sum(one.forward + one.backward for one in flops.operators)) <= len(flops.kernels)


def test_flops_of_a_resnets_shapes_are_those_of_its_layers() -> None:
    flops = resnet()[1].flops
    assert flops is not None
    rows = {(row.name, row.inputs): row for row in flops.shapes}
    # The last convolution of the third stage's blocks, 1 x 1 from 256 to 1024 channels, in 6 blocks of 6 steps.
    row = rows["aten::cudnn_convolution", "[32, 256, 14, 14], [1024, 256, 1, 1]"]
    assert (row.calls, row.forward, row.backward) == (36, 36 * 2 * 32 * 14 * 14 * 256 * 1024, 0)
    for part in ("forward", "backward", "recompute", "optimizer", "calls"):
        assert sum(getattr(one, part) for one in flops.shapes) == sum(getattr(one, part) for one in flops.operators)
