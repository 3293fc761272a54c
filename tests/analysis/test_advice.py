from __future__ import annotations

from dataclasses import fields, replace

import pytest

from lightning_flops.analysis.advice import Advice, advise
from lightning_flops.analysis.evidence import Evidence
from lightning_flops.config import AdviceThresholds, ProfilerConfig
from lightning_flops.errors import ConfigError
from lightning_flops.report.advice_text import advice_lines, render_advice_markdown

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
        Evidence(slowest_rank=3, slowest_over_median=1.1, slowest_longer_sec=0.002),
        Evidence(slowest_rank=3, slowest_over_median=1.1 + A_LITTLE, slowest_longer_sec=0.002),
    ),
    "waiting": (Evidence(waiting_share=0.1), Evidence(waiting_share=0.1 + A_LITTLE)),
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
        waiting_share=0.02,
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
        slowest_longer_sec=0.002,
        slowest_longer_share=0.01,
        mfu=0.45,
        data_parallel_devices=0,
        backend="nccl",
        pageable_copy_share=0.0,
    )
    assert advise(healthy, DEFAULTS) == ()
    # Nothing is left out of what is healthy here, so that a new rule must say what healthy means to it.
    unset = {field.name for field in fields(Evidence) if getattr(healthy, field.name) is None}
    assert unset == {"loader_workers", "straggler"}  # a healthy job has none


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


def test_what_a_straggler_computes_longer_is_at_stake() -> None:
    slow = Evidence(slowest_rank=3, slowest_over_median=2.0, slowest_longer_sec=0.004, slowest_longer_share=0.4)
    (advice,) = advise(slow, DEFAULTS)
    assert advice.stake == 0.4
    assert advice.evidence == "Rank 3 computes 2 times as long as the median rank, 4 ms a step more."


def test_a_straggler_by_microseconds_is_none() -> None:
    slow = Evidence(slowest_rank=3, slowest_over_median=2.0, slowest_longer_sec=0.001)
    assert rules(slow) == []
    assert rules(slow, AdviceThresholds(straggler_sec=0.0009)) == ["straggler"]


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


def test_waiting_for_other_ranks_is_nothing_that_larger_batches_would_mend() -> None:
    waits = Evidence(exposed_communication_share=0.5, overlap_ratio=0.25, waiting_share=0.41)
    assert rules(waits) == ["waiting"]
    transfers = replace(waits, waiting_share=0.125)
    exposed, hidden, waiting = advise(transfers, DEFAULTS)
    assert (exposed.rule, exposed.stake, hidden.rule, hidden.stake) == (
        "exposed_communication",
        0.375,
        "overlap",
        0.375,
    )
    assert exposed.evidence == (
        "Communication that no computation hides takes 50.00% of the step, 37.50% without waiting for other ranks."
    )
    assert (waiting.rule, waiting.stake) == ("waiting", 0.125)
