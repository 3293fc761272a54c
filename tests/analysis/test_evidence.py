"""What the rules of advice look at; every share is worked out by hand."""

from __future__ import annotations

from dataclasses import fields, replace

from lightning_flops.analysis.advice import advise
from lightning_flops.analysis.device_abilities import DeviceAbilities
from lightning_flops.analysis.evidence import Evidence, gather_evidence
from lightning_flops.analysis.timing import build_timing
from lightning_flops.config import AdviceThresholds
from lightning_flops.records import ModuleRecord, OptimizerFacts, PhaseSeconds, RunFacts, StepRecord, StepSignature
from lightning_flops.schema.communication import Overlap
from lightning_flops.schema.step import DtypeFlops, Rates
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_events import IdleTime, KernelRow, KernelSummary
from lightning_flops.schema.trace_steps import DeviceMetrics, Durations, Row, StepTime, StepTimes
from tests.report.windows import A100, CPU, cell

DEFAULTS = AdviceThresholds()
NO_RATES = Rates(**{field.name: None for field in fields(Rates)})


def durations(total_us: float, *, calls: int = 1, ratio: float | None = None) -> Durations:
    mean = total_us / calls
    return Durations(total_us=total_us, mean_us=mean, min_us=mean, max_us=mean, ratio=ratio)


def trace_report(**changes: object) -> TraceReport:
    """A step of 1,024 us: 640 of kernels, 128 waiting for data, 256 idle."""
    mean = StepTime(
        number=None,
        wall_us=1024.0,
        kernel_us=640.0,
        memcpy_us=0.0,
        memset_us=0.0,
        communication_us=None,
        runtime_us=0.0,
        data_loader_us=128.0,
        cpu_us=0.0,
        other_us=256.0,
    )
    report = TraceReport(
        source="trace",
        rank=0,
        events=1,
        step_times=StepTimes(marked=True, steps=(replace(mean, number=1),), mean=mean),
        modules=None,
        device_metrics=(
            DeviceMetrics(
                device=0,
                name="A100",
                sm_count=108,
                utilization=0.625,
                sm_efficiency=0.5,
                occupancy_percent=25.0,
                blocks_per_sm=2.0,
                busy_us=640.0,
            ),
        ),
        phases=(),
        overlap=None,
        collectives=None,
        kernel_summary=KernelSummary(
            calls=10,
            total_us=640.0,
            tensor_core_ratio=0.5,
            tensor_core_eligible_ratio=0.75,
            short_calls_ratio=0.25,
            short_time_ratio=0.01,
        ),
        kernels=None,
        operators=None,
        memory=None,
        module_memory=None,
        transfers=None,
        user_scopes=None,
        idle=(
            IdleTime(device=0, stream=None, busy_us=640.0, host_wait_us=304.0, kernel_gap_us=32.0, other_us=48.0),
            IdleTime(device=0, stream=7, busy_us=1.0, host_wait_us=1023.0, kernel_gap_us=0.0, other_us=0.0),
        ),
        launches=None,
        notes=(),
    )
    return replace(report, **changes)  # type: ignore[arg-type]


def gather(**changes: object) -> Evidence:
    arguments: dict[str, object] = {
        "rates": NO_RATES,
        "timing": None,
        "dtypes": (),
        "cells": (),
        "modules": (),
        "context": A100,
        "facts": None,
        "trace": None,
        "peak_memory_bytes": None,
        "lower_bound": False,
        "thresholds": DEFAULTS,
    }
    return gather_evidence(**(arguments | changes))  # type: ignore[arg-type]


V100 = replace(A100, device_name="Tesla V100-SXM2-16GB")


def test_window_without_measurements_is_no_evidence() -> None:
    assert advise(gather(), DEFAULTS) == ()


def test_data_wait_is_taken_out_of_what_the_device_is_idle_for() -> None:
    evidence = gather(trace=trace_report())
    # Of 1,024 us, 128 wait for data. Kernels: 640 of the other 896. Idle: 384 less 128; the host's: 304 less 128.
    assert evidence.gpu_utilization == 640 / 896
    assert evidence.idle_share == 256 / 1024
    assert evidence.host_idle_share == 176 / 1024
    assert evidence.kernel_gap_share == 32 / 1024
    assert evidence.kernel_share == 640 / 1024
    assert evidence.occupancy == 0.25
    assert (evidence.tensor_core_ratio, evidence.tensor_core_eligible_ratio) == (0.5, 0.75)


def test_a_device_that_waits_before_its_first_event_or_after_its_last_is_idle_in_the_step() -> None:
    # One kernel of 640 us has no pause, though 256 of the step's 1,024 us are neither its nor a wait for data.
    pauses = (IdleTime(device=0, stream=None, busy_us=640.0, host_wait_us=0.0, kernel_gap_us=0.0, other_us=0.0),)
    evidence = gather(trace=trace_report(idle=pauses))
    assert evidence.idle_share == 256 / 1024
    assert evidence.host_idle_share == 256 / 1024
    assert evidence.kernel_gap_share == 0.0


def test_small_kernels_hold_their_share_of_what_computes() -> None:
    def kernel(name: str, total_us: float, blocks: float | None, *, collective: bool = False) -> KernelRow:
        return KernelRow(
            name=name,
            calls=1,
            device=durations(total_us),
            tensor_cores=False,
            tensor_cores_eligible=False,
            collective=collective,
            blocks_per_sm=blocks,
            occupancy_percent=None,
        )

    kernels = (
        kernel("large", 300.0, 1.0),
        kernel("small", 100.0, 0.99),
        kernel("ncclAllReduce", 500.0, 0.1, collective=True),
    )
    assert gather(trace=trace_report(kernels=kernels)).low_blocks_kernel_share == 0.25


def test_communication_counts_as_far_as_nothing_hides_it() -> None:
    overlap = Overlap(
        wall_us=1000.0,
        computation_us=600.0,
        communication_us=400.0,
        overlap_us=100.0,
        other_us=100.0,
        overlap_ratio=0.25,
    )
    evidence = gather(trace=trace_report(overlap=overlap))
    assert (evidence.exposed_communication_share, evidence.overlap_ratio) == (0.3, 0.25)


def test_only_copies_from_pageable_memory_to_the_device_count() -> None:
    def copy(name: str, total_us: float) -> Row:
        return Row(name=name, calls=1, device=durations(total_us))

    transfers = (
        copy("Memcpy HtoD (Pageable -> Device)", 64.0),
        copy("Memcpy HtoD (Pinned -> Device)", 40.0),
        copy("Memcpy DtoH (Device -> Pageable)", 20.0),
    )
    assert gather(trace=trace_report(transfers=transfers)).pageable_copy_share == 64 / 1024


def test_padding_is_advised_by_the_flops_of_16_bit_products_in_odd_modules() -> None:
    modules = (
        ModuleRecord(name="", type_name="Model"),
        ModuleRecord(name="hidden", type_name="Linear", weight_sizes=(64, 64)),
        ModuleRecord(name="head", type_name="Linear", weight_sizes=(50257, 64)),
        ModuleRecord(name="scale", type_name="Linear", weight_sizes=(3, 64)),
    )
    cells = (
        cell("hidden", "forward", 700, dtype="bfloat16"),
        cell("head", "forward", 100, dtype="bfloat16"),
        cell("head", "backward", 150, dtype="bfloat16"),
        cell("scale", "forward", 50, dtype="float32"),
    )
    facts = RunFacts(compute_capability=(8, 0))
    evidence = gather(cells=cells, modules=modules, facts=facts)
    assert evidence.misaligned_share == 0.25  # 250 of 1,000; float32 needs no such alignment
    assert evidence.misaligned_modules == ("head (50257)",)
    assert gather(cells=cells, modules=modules, context=CPU).misaligned_share is None
    # Nobody knows of this device that it has tensor cores; those of Volta take no bfloat16.
    assert gather(cells=cells, modules=modules).misaligned_share is None
    volta = gather(cells=cells, modules=modules, facts=RunFacts(compute_capability=(7, 0)), context=V100)
    assert (volta.misaligned_share, volta.misaligned_modules) == (0.0, ())


def test_float32_counts_where_tf32_could_replace_it() -> None:
    dtypes = (
        DtypeFlops(dtype="float32", model=30, hardware=30, peak_flops_per_sec=None),
        DtypeFlops(dtype="tf32", model=70, hardware=70, peak_flops_per_sec=None),
    )
    assert gather(dtypes=dtypes).float32_share == 0.3
    assert gather(dtypes=dtypes, context=CPU).float32_share is None


def test_facts_of_the_run_are_evidence() -> None:
    facts = RunFacts(
        compute_capability=(9, 0),
        device_memory_bytes=1000,
        data_parallel_devices=4,
        process_group_backend="gloo",
        optimizers=(
            OptimizerFacts(
                type_name="Adam", implementation="single-tensor", faster_with=("fused=True", "foreach=True")
            ),
            OptimizerFacts(type_name="RMSprop", implementation="single-tensor", faster_with=("foreach=True",)),
            OptimizerFacts(type_name="SGD", implementation="fused", faster_with=("fused=True",)),
        ),
        loader_workers=2,
    )
    evidence = gather(facts=facts, peak_memory_bytes=950, context=replace(A100, world_size=2))
    assert evidence == Evidence(
        device=DeviceAbilities(
            tensor_core_dtypes=("bfloat16", "float16"), tf32=True, cuda_graphs=True, pins_memory=True
        ),
        misaligned_share=evidence.misaligned_share,
        peak_memory_share=0.95,
        single_tensor_optimizers=("Adam", "RMSprop"),
        optimizer_arguments=("foreach=True",),
        data_parallel_devices=4,
        backend="gloo",
        loader_workers=2,
    )


def test_backend_is_no_matter_of_one_rank_or_of_the_cpu() -> None:
    facts = RunFacts(process_group_backend="gloo")
    assert gather(facts=facts).backend is None
    assert gather(facts=facts, context=replace(A100, world_size=2)).backend == "gloo"
    # Torch for Windows has no NCCL.
    assert gather(facts=replace(facts, nccl=False), context=replace(A100, world_size=2)).backend is None
    assert gather(facts=facts, context=replace(CPU, world_size=2)).backend is None


def test_mfu_that_is_only_a_lower_bound_is_no_evidence() -> None:
    rates = replace(NO_RATES, mfu=0.1)
    assert gather(rates=rates).mfu == 0.1
    assert gather(rates=rates, lower_bound=True).mfu is None


def test_optimizer_share_is_of_the_whole_step() -> None:
    step = StepRecord(
        index=0,
        signature=StepSignature(batches=("4",), forwards=1, backwards=1, updates=1),
        micro_steps=1,
        samples=4,
        seconds=PhaseSeconds(data_wait=0.25, forward=0.25, backward=0.25, optimizer=0.25),
    )
    assert gather(timing=build_timing([step], mixed_phases=())).optimizer_share == 0.25


def test_copies_count_as_far_as_neither_kernels_nor_communication_hide_them() -> None:
    mean = trace_report().step_times.mean
    # Of 1,024 us 128 are exposed communication, of which 32 run beside copies: the breakdown calls those copies.
    step = replace(mean, memcpy_us=64.0, communication_us=96.0, other_us=96.0)
    times = StepTimes(marked=True, steps=(replace(step, number=1),), mean=step)
    overlap = Overlap(
        wall_us=1024.0,
        computation_us=640.0,
        communication_us=256.0,
        overlap_us=128.0,
        other_us=256.0,
        overlap_ratio=0.5,
    )
    evidence = gather(trace=trace_report(step_times=times, overlap=overlap))
    assert evidence.exposed_communication_share == 128 / 1024
    assert evidence.exposed_copy_share == 32 / 1024
