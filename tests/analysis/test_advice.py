from __future__ import annotations

from dataclasses import fields, replace

import pytest

from lightning_flops.analysis.advice import Advice, advise
from lightning_flops.analysis.evidence import Evidence, gather_evidence
from lightning_flops.analysis.step_flops import DtypeFlops
from lightning_flops.analysis.step_rates import Rates
from lightning_flops.analysis.timing import build_timing
from lightning_flops.analysis.trace_tables import (
    DeviceMetrics,
    Durations,
    IdleTime,
    KernelRow,
    KernelSummary,
    Overlap,
    StepTime,
    StepTimes,
    TraceReport,
    TransferRow,
)
from lightning_flops.config import AdviceThresholds, ProfilerConfig
from lightning_flops.errors import ConfigError
from lightning_flops.records import (
    ModuleRecord,
    OptimizerFacts,
    PhaseSeconds,
    RunFacts,
    StepRecord,
    StepSignature,
)
from lightning_flops.report.advice_text import advice_lines, render_advice_markdown
from tests.report.windows import A100, CPU, cell

DEFAULTS = AdviceThresholds()


def rules(evidence: Evidence, thresholds: AdviceThresholds = DEFAULTS) -> list[str]:
    return [advice.rule for advice in advise(evidence, thresholds)]


A_LITTLE = 1e-6

# For each rule: evidence at its threshold, where it is silent, and a little beyond, where it speaks.
BORDERS = {
    "data_wait": (Evidence(data_wait_share=0.05), Evidence(data_wait_share=0.05 + A_LITTLE)),
    "exposed_communication": (
        Evidence(exposed_communication_share=0.10),
        Evidence(exposed_communication_share=0.10 + A_LITTLE),
    ),
    "overlap": (
        Evidence(exposed_communication_share=0.2, overlap_ratio=0.5),
        Evidence(exposed_communication_share=0.2, overlap_ratio=0.5 - A_LITTLE),
    ),
    "gpu_utilization": (Evidence(gpu_utilization=0.5), Evidence(gpu_utilization=0.5 - A_LITTLE)),
    "blocks_per_sm": (Evidence(low_blocks_kernel_share=0.1), Evidence(low_blocks_kernel_share=0.1 + A_LITTLE)),
    "occupancy": (Evidence(occupancy=0.15), Evidence(occupancy=0.15 - A_LITTLE)),
    "tensor_core_eligible": (
        Evidence(tensor_core_eligible_ratio=0.05, tensor_core_ratio=0.0, compute_capability=(7, 0)),
        Evidence(tensor_core_eligible_ratio=0.05 + A_LITTLE, tensor_core_ratio=0.0, compute_capability=(7, 0)),
    ),
    "memory_high": (Evidence(peak_memory_share=0.9), Evidence(peak_memory_share=0.9 + A_LITTLE)),
    "memory_low": (
        Evidence(peak_memory_share=0.5, gpu_utilization=0.7),
        Evidence(peak_memory_share=0.5 - A_LITTLE, gpu_utilization=0.7),
    ),
    "float32": (
        Evidence(float32_share=0.05, compute_capability=(8, 0)),
        Evidence(float32_share=0.05 + A_LITTLE, compute_capability=(8, 0)),
    ),
    "misaligned": (Evidence(misaligned_share=0.05), Evidence(misaligned_share=0.05 + A_LITTLE)),
    "optimizer": (
        Evidence(optimizer_share=0.15, single_tensor_optimizers=("Adam",)),
        Evidence(optimizer_share=0.15 + A_LITTLE, single_tensor_optimizers=("Adam",)),
    ),
    "idle": (
        Evidence(idle_share=0.2, host_idle_share=0.15, kernel_gap_share=0.05),
        Evidence(idle_share=0.2 + A_LITTLE, host_idle_share=0.15, kernel_gap_share=0.05),
    ),
    "short_kernels": (
        Evidence(short_kernel_ratio=0.5, idle_share=0.11),
        Evidence(short_kernel_ratio=0.5 + A_LITTLE, idle_share=0.11),
    ),
    "straggler": (
        Evidence(slowest_rank=3, slowest_over_median=1.1),
        Evidence(slowest_rank=3, slowest_over_median=1.1 + A_LITTLE),
    ),
    "data_parallel": (Evidence(data_parallel_devices=1), Evidence(data_parallel_devices=2)),
    "backend": (Evidence(backend="nccl"), Evidence(backend="gloo")),
    "pageable_copies": (Evidence(pageable_copy_share=0.05), Evidence(pageable_copy_share=0.05 + A_LITTLE)),
    "mfu": (Evidence(mfu=0.3), Evidence(mfu=0.3 - A_LITTLE)),
}


@pytest.mark.parametrize("rule", BORDERS)
def test_rule_is_silent_at_its_threshold(rule: str) -> None:
    assert rule not in rules(BORDERS[rule][0])


@pytest.mark.parametrize("rule", BORDERS)
def test_rule_speaks_beyond_its_threshold(rule: str) -> None:
    assert rule in rules(BORDERS[rule][1])


@pytest.mark.parametrize("rule", BORDERS)
def test_no_rule_speaks_when_any_one_of_its_measurements_is_missing(rule: str) -> None:
    beyond = BORDERS[rule][1]
    given = [field.name for field in fields(Evidence) if getattr(beyond, field.name) not in (None, ())]
    for name in given:
        if name == "slowest_rank":
            continue  # it names the rank; the factor is what is measured
        assert rule not in rules(replace(beyond, **{name: None}))  # type: ignore[arg-type]


def test_nothing_measured_is_no_advice() -> None:
    assert advise(Evidence(), DEFAULTS) == ()


def test_healthy_run_is_told_nothing() -> None:
    healthy = Evidence(
        data_wait_share=0.01,
        exposed_communication_share=0.03,
        overlap_ratio=0.8,
        gpu_utilization=0.97,
        low_blocks_kernel_share=0.02,
        kernel_share=0.95,
        occupancy=0.4,
        tensor_core_ratio=0.8,
        tensor_core_eligible_ratio=0.85,
        compute_capability=(9, 0),
        peak_memory_share=0.8,
        float32_share=0.01,
        misaligned_share=0.0,
        optimizer_share=0.04,
        single_tensor_optimizers=(),
        host_idle_share=0.01,
        kernel_gap_share=0.01,
        idle_share=0.02,
        short_kernel_ratio=0.3,
        slowest_rank=1,
        slowest_over_median=1.02,
        mfu=0.45,
        data_parallel_devices=0,
        backend="nccl",
        pageable_copy_share=0.0,
    )
    assert advise(healthy, DEFAULTS) == ()
    # Nothing is left out of what is healthy here, so that a new rule must say what healthy means to it.
    unset = {field.name for field in fields(Evidence) if getattr(healthy, field.name) is None}
    assert unset == {"loader_workers"}


def test_slow_loader_is_told_first() -> None:
    slow = Evidence(
        data_wait_share=0.5, gpu_utilization=0.45, idle_share=0.3, host_idle_share=0.28, kernel_gap_share=0.02, mfu=0.1
    )
    found = rules(slow)
    assert found[0] == "data_wait"
    assert found[-1] == "mfu"


def test_advice_is_in_the_order_of_what_is_at_stake() -> None:
    evidence = Evidence(data_wait_share=0.2, pageable_copy_share=0.3, optimizer_share=0.25, occupancy=0.1)
    evidence = replace(evidence, single_tensor_optimizers=("AdamW",))
    assert rules(evidence) == ["pageable_copies", "optimizer", "data_wait", "occupancy"]


def test_low_mfu_points_at_the_largest_loss() -> None:
    (*_, low) = advise(Evidence(data_wait_share=0.2, mfu=0.1), DEFAULTS)
    assert low == Advice(
        rule="mfu",
        evidence="MFU is 10.00%.",
        threshold="less than 30.00%",
        action="Begin with the first of the above, data_wait.",
        source="this project",
        stake=None,
    )


def test_thresholds_are_settings() -> None:
    config = ProfilerConfig(advice_thresholds={"data_wait": 0.2})
    assert rules(Evidence(data_wait_share=0.15), config.thresholds) == []
    assert rules(Evidence(data_wait_share=0.21), config.thresholds) == ["data_wait"]
    assert config.thresholds.idle == DEFAULTS.idle


@pytest.mark.parametrize("wrong", [{"data_weight": 0.1}, {"idle": -0.1}, {"idle": "much"}, 0.1])
def test_threshold_that_breaks_its_rule_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"flops_profiler\.advice_thresholds must be a mapping from names"):
        ProfilerConfig(advice_thresholds=wrong)  # type: ignore[arg-type]


def test_straggler_at_twice_the_median_puts_half_of_the_step_at_stake() -> None:
    (advice,) = advise(Evidence(slowest_rank=3, slowest_over_median=2.0), DEFAULTS)
    assert advice.stake == 0.5
    assert advice.evidence == "Rank 3 computes 2 times as long as the median rank."


# ---- where the evidence comes from

NO_RATES = Rates(**{field.name: None for field in fields(Rates)})


def durations(total_us: float, *, calls: int = 1, ratio: float | None = None) -> Durations:
    mean = total_us / calls
    return Durations(total_us=total_us, mean_us=mean, min_us=mean, max_us=mean, ratio=ratio)


def trace_report(**changes: object) -> TraceReport:
    """A step of 1,000 us: 600 of kernels, 100 waiting for data, 300 idle."""
    mean = StepTime(
        number=None,
        wall_us=1000.0,
        kernel_us=600.0,
        memcpy_us=0.0,
        memset_us=0.0,
        communication_us=None,
        runtime_us=0.0,
        data_loader_us=100.0,
        cpu_us=0.0,
        other_us=300.0,
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
                utilization=0.6,
                sm_efficiency=0.5,
                occupancy_percent=25.0,
                blocks_per_sm=2.0,
            ),
        ),
        device_summary=None,  # type: ignore[arg-type]  # no rule looks at it
        overview=(),
        model_summary=None,  # type: ignore[arg-type]  # nor at this
        overlap=None,
        collectives=None,
        kernel_summary=KernelSummary(
            calls=10,
            total_us=600.0,
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
            IdleTime(device=0, stream=None, busy_us=600.0, host_wait_us=300.0, kernel_gap_us=40.0, other_us=60.0),
            IdleTime(device=0, stream=7, busy_us=1.0, host_wait_us=999.0, kernel_gap_us=0.0, other_us=0.0),
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


def test_window_without_measurements_is_no_evidence() -> None:
    assert advise(gather(), DEFAULTS) == ()


def test_data_wait_is_taken_out_of_what_the_device_is_idle_for() -> None:
    evidence = gather(trace=trace_report())
    # Of 1,000 us, 100 wait for data. Kernels: 600 of the other 900. Idle: 400 less 100; the host's: 300 less 100.
    assert evidence.gpu_utilization == pytest.approx(600 / 900)
    assert evidence.idle_share == pytest.approx(0.3)
    assert evidence.host_idle_share == pytest.approx(0.2)
    assert evidence.kernel_gap_share == pytest.approx(0.04)
    assert evidence.kernel_share == 0.6
    assert evidence.occupancy == 0.25
    assert (evidence.tensor_core_ratio, evidence.tensor_core_eligible_ratio) == (0.5, 0.75)


def test_a_device_that_waits_before_its_first_event_or_after_its_last_is_idle_in_the_step() -> None:
    # One kernel of 600 us has no pause, though 300 of the step's 1,000 us are neither its nor a wait for data.
    pauses = (IdleTime(device=0, stream=None, busy_us=600.0, host_wait_us=0.0, kernel_gap_us=0.0, other_us=0.0),)
    evidence = gather(trace=trace_report(idle=pauses))
    assert evidence.idle_share == pytest.approx(0.3)
    assert evidence.host_idle_share == pytest.approx(0.3)
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
    def copy(name: str, total_us: float) -> TransferRow:
        return TransferRow(name=name, calls=1, bytes=None, host=None, device=durations(total_us))

    transfers = (
        copy("Memcpy HtoD (Pageable -> Device)", 80.0),
        copy("Memcpy HtoD (Pinned -> Device)", 40.0),
        copy("Memcpy DtoH (Device -> Pageable)", 20.0),
    )
    assert gather(trace=trace_report(transfers=transfers)).pageable_copy_share == 0.08


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
    evidence = gather(cells=cells, modules=modules)
    assert evidence.misaligned_share == 0.25  # 250 of 1,000; float32 needs no such alignment
    assert evidence.misaligned_modules == ("head (50257)",)
    assert gather(cells=cells, modules=modules, context=CPU).misaligned_share is None


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
            OptimizerFacts(type_name="Adam", implementation="single-tensor"),
            OptimizerFacts(type_name="SGD", implementation="fused"),
        ),
        loader_workers=2,
    )
    evidence = gather(facts=facts, peak_memory_bytes=950, context=replace(A100, world_size=2))
    assert evidence == Evidence(
        compute_capability=(9, 0),
        peak_memory_share=0.95,
        single_tensor_optimizers=("Adam",),
        data_parallel_devices=4,
        backend="gloo",
        loader_workers=2,
    )


def test_backend_is_no_matter_of_one_rank_or_of_the_cpu() -> None:
    facts = RunFacts(process_group_backend="gloo")
    assert gather(facts=facts).backend is None
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


# ---- as text


def test_advice_reads_evidence_then_stake_then_what_to_do() -> None:
    advice = advise(Evidence(data_wait_share=0.412, loader_workers=0, mfu=0.1), DEFAULTS)
    assert advice_lines(advice)[1:] == [
        "1. The step waits for data for 41.20% of its time. At stake: 41.20% of the step. "
        "Raise the DataLoader's num_workers (now",
        "   0), and set pin_memory and persistent_workers.",
        "   (Rule data_wait: more than 5.00%; PyTorch Profiler's recommendations.)",
        "2. MFU is 10.00%. Begin with the first of the above, data_wait.",
        "   (Rule mfu: less than 30.00%; this project.)",
    ]
    assert render_advice_markdown(advice).splitlines()[1] == (
        "2. MFU is 10.00%. **Begin with the first of the above, data_wait.** "
        "*(Rule mfu: less than 30.00%; this project.)*"
    )


def test_no_advice_says_so() -> None:
    assert advice_lines(())[1:] == ["Nothing that was measured is above its threshold."]
