from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_flops.analysis.advice import advise
from lightning_flops.analysis.device_abilities import UNKNOWN_DEVICE, device_abilities
from lightning_flops.analysis.evidence import Evidence
from lightning_flops.analysis.without_flops import WithoutFlops, what_helps
from lightning_flops.config import AdviceThresholds, ProfilerConfig
from lightning_flops.errors import ConfigError
from lightning_flops.report.text import render_advice
from lightning_flops.schema.advice import Advice
from lightning_flops.schema.ranks import Straggler

DEFAULTS = AdviceThresholds()
VOLTA = device_abilities(device_type="cuda", name="Tesla V100-SXM2-16GB", compute_capability=(7, 0))
AMPERE = device_abilities(device_type="cuda", name="NVIDIA A100-SXM4-80GB", compute_capability=(8, 0))
FUSED = ("fused=True", "foreach=True")


def rules(evidence: Evidence, thresholds: AdviceThresholds = DEFAULTS) -> list[str]:
    return [advice.rule for advice in advise(evidence, thresholds)]


A_LITTLE = 1e-6


def late(rank: int) -> Straggler:
    return Straggler(
        rank=rank,
        late_sec=0.5,
        share=0.5,
        part="data wait",
        part_sec=0.5,
        module=None,
        exposed_sec=None,
        others_exposed_sec=None,
    )


def dropout(share: float) -> WithoutFlops:
    return WithoutFlops(kind="class", name="Dropout", share=share, stake=share)


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
        Evidence(tensor_core_eligible_ratio=0.05, tensor_core_ratio=0.0, device=VOLTA),
        Evidence(tensor_core_eligible_ratio=0.05 + A_LITTLE, tensor_core_ratio=0.0, device=VOLTA),
    ),
    "memory_high": (Evidence(peak_memory_share=0.9), Evidence(peak_memory_share=0.9 + A_LITTLE)),
    "memory_low": (
        Evidence(peak_memory_share=0.5, gpu_utilization=0.7),
        Evidence(peak_memory_share=0.5 - A_LITTLE, gpu_utilization=0.7),
    ),
    "float32": (
        Evidence(float32_share=0.05, device=AMPERE),
        Evidence(float32_share=0.05 + A_LITTLE, device=AMPERE),
    ),
    "misaligned": (Evidence(misaligned_share=0.05), Evidence(misaligned_share=0.05 + A_LITTLE)),
    "optimizer": (
        Evidence(optimizer_share=0.15, single_tensor_optimizers=("Adam",), optimizer_arguments=FUSED),
        Evidence(optimizer_share=0.15 + A_LITTLE, single_tensor_optimizers=("Adam",), optimizer_arguments=FUSED),
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
        Evidence(waiting_share=0.5),  # of whom the others wait for, find_stragglers decides
        Evidence(straggler=late(3)),
    ),
    "waiting": (Evidence(waiting_share=0.1), Evidence(waiting_share=0.1 + A_LITTLE)),
    "data_parallel": (Evidence(data_parallel_devices=1), Evidence(data_parallel_devices=2)),
    "backend": (Evidence(backend="nccl"), Evidence(backend="gloo")),
    "padding": (Evidence(padding_share=0.20), Evidence(padding_share=0.20 + A_LITTLE)),
    "pageable_copies": (Evidence(pageable_copy_share=0.05), Evidence(pageable_copy_share=0.05 + A_LITTLE)),
    "without_flops": (Evidence(without_flops=dropout(0.15)), Evidence(without_flops=dropout(0.15 + A_LITTLE))),
    "heat_limited": (Evidence(heat_limited_share=0.05), Evidence(heat_limited_share=0.05 + A_LITTLE)),
    "power_limited": (Evidence(power_limited_share=0.2), Evidence(power_limited_share=0.2 + A_LITTLE)),
    "starved": (Evidence(processor_lost_share=0.05), Evidence(processor_lost_share=0.05 + A_LITTLE)),
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
    given = [field.name for field in fields(Evidence) if getattr(beyond, field.name) not in (None, (), UNKNOWN_DEVICE)]
    for name in given:
        unknown: Any = {"device": UNKNOWN_DEVICE, "optimizer_arguments": ()}.get(name)
        assert rule not in rules(replace(beyond, **{name: unknown}))


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
        device=AMPERE,
        peak_memory_share=0.8,
        float32_share=0.01,
        misaligned_share=0.0,
        optimizer_share=0.04,
        single_tensor_optimizers=(),
        optimizer_arguments=("fused=True",),
        exposed_copy_share=0.01,
        host_idle_share=0.01,
        kernel_gap_share=0.01,
        idle_share=0.02,
        short_kernel_ratio=0.3,
        mfu=0.45,
        data_parallel_devices=0,
        backend="nccl",
        pageable_copy_share=0.0,
        padding_share=0.1,
        processor_lost_share=0.01,
        power_limited_share=0.1,
        heat_limited_share=0.0,
        clock_words="1,900 of at most 1,980 MHz",
        without_flops=dropout(0.03),
    )
    assert advise(healthy, DEFAULTS) == ()
    # Nothing is left out of what is healthy here, so that a new rule must say what healthy means to it.
    unset = {field.name for field in fields(Evidence) if getattr(healthy, field.name) is None}
    assert unset == {"loader_workers", "straggler", "straggler_name"}  # a healthy job has none


def test_slow_loader_is_told_first() -> None:
    slow = Evidence(
        data_wait_share=0.5, gpu_utilization=0.45, idle_share=0.3, host_idle_share=0.28, kernel_gap_share=0.02, mfu=0.1
    )
    found = rules(slow)
    assert found[0] == "data_wait"
    assert found[-1] == "mfu"


def test_advice_is_in_the_order_of_what_is_at_stake() -> None:
    evidence = Evidence(data_wait_share=0.2, pageable_copy_share=0.3, optimizer_share=0.25, occupancy=0.1)
    evidence = replace(evidence, single_tensor_optimizers=("AdamW",), optimizer_arguments=FUSED)
    # Copies of 30% come first: the optimizer's 25% may be among them.
    assert rules(evidence) == ["pageable_copies", "data_wait", "optimizer", "occupancy"]


def test_low_mfu_points_at_the_largest_loss() -> None:
    (*_, low) = advise(Evidence(data_wait_share=0.2, mfu=0.1), DEFAULTS)
    assert low == Advice(
        rule="mfu",
        evidence="MFU is 10.00%.",
        threshold="less than 30.00%",
        action="Begin with the first one above, data_wait.",
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


def test_what_the_others_wait_for_a_straggler_is_at_stake() -> None:
    (advice,) = advise(Evidence(straggler=late(3)), DEFAULTS)
    assert advice.stake == 0.5
    assert advice.evidence == (
        "The other ranks wait 500 ms a step (50.00% of it) for rank 3: its data wait takes 500 ms longer than theirs."
    )


def test_a_straggler_without_a_number_goes_by_its_name() -> None:
    (advice,) = advise(Evidence(straggler=late(0), straggler_name="c.json"), DEFAULTS)
    assert " for c.json: " in advice.evidence


def test_what_is_in_no_named_part_of_a_step_is_told_in_words() -> None:
    (advice,) = advise(Evidence(straggler=replace(late(3), part="other", part_sec=0.4)), DEFAULTS)
    assert ": what is in no named part of its step takes 400 ms longer than theirs." in advice.evidence


def test_a_starved_run_is_told_before_all_else_and_the_rest_is_said_to_be_of_it() -> None:
    first, second, low = advise(Evidence(processor_lost_share=0.4, data_wait_share=0.9, mfu=0.1), DEFAULTS)
    assert (first.rule, second.rule, low.rule) == ("starved", "data_wait", "mfu")
    assert "40.00% of the processor time" in first.evidence and "of a starved run" in first.evidence
    assert first.stake is None


def test_a_gpu_that_was_held_down_is_told_of_with_its_clock() -> None:
    (advice,) = advise(Evidence(heat_limited_share=0.4, clock_words="1,400 of at most 1,980 MHz"), DEFAULTS)
    assert advice.evidence == (
        "While steps were timed, heat held the GPU's clock down for 40.00% of the time, on average at 1,400 of at most "
        "1,980 MHz."
    )
    assert advice.stake is None


def test_what_computes_no_products_is_named_with_what_helps_on_that_device() -> None:
    (advice,) = advise(Evidence(without_flops=dropout(0.36)), DEFAULTS)
    assert advice.evidence == (
        "Dropout's own work, the modules inside it left out, takes 36.00% of the traced step and computes no products."
    )
    assert advice.action == (
        "Set its p to 0 where the data do not overfit, or compile the model, which fuses it with what surrounds it."
    )
    pascal = device_abilities(device_type="cuda", name="Tesla P100-PCIE-16GB", compute_capability=(6, 0))
    (advice,) = advise(Evidence(without_flops=dropout(0.36), device=pascal), DEFAULTS)
    assert advice.action == "Set its p to 0 where the data do not overfit."


@pytest.mark.parametrize("name", ["aten::gelu", "aten::mul", "Custom"])
def test_an_operator_of_no_known_kind_is_to_be_fused(name: str) -> None:
    one = WithoutFlops(kind="operator", name=name, share=0.2, stake=0.2)
    assert what_helps(one, compiles=True).startswith("Compile the model, which fuses it")
    assert what_helps(one, compiles=False).startswith("Use a layer that has it built in")


def test_what_computes_no_products_claims_no_products() -> None:
    both = Evidence(
        without_flops=dropout(0.25),
        tensor_core_eligible_ratio=0.5,
        tensor_core_ratio=0.0,
        kernel_share=0.5,
        device=VOLTA,
    )
    assert stakes(both) == {"without_flops": 0.25, "tensor_core_eligible": 0.25}
    # Small kernels may be either.
    small = replace(both, low_blocks_kernel_share=1.0, kernel_share=1.0)
    assert stakes(small) == {"tensor_core_eligible": 0.5, "without_flops": 0.25, "blocks_per_sm": 0.25}


# ---- as text


def test_advice_reads_evidence_then_stake_then_what_to_do() -> None:
    advice = advise(Evidence(data_wait_share=0.412, loader_workers=0, mfu=0.1, device=AMPERE), DEFAULTS)
    assert render_advice(advice).splitlines() == [
        "1. The step waits for data for 41.20% of its time. Potential saving: up to 41.2% of step time. Raise",
        "   the DataLoader's num_workers (now 0), and set pin_memory and persistent_workers. (Rule data_wait:",
        "   more than 5.00%; PyTorch Profiler's recommendations.)",
        "2. MFU is 10.00%. Begin with the first one above, data_wait. (Rule mfu: less than 30.00%; this",
        "   project.)",
    ]


def test_no_advice_says_so() -> None:
    assert render_advice(()) == "Nothing that was measured is above its threshold.\n"


def test_waiting_for_other_ranks_is_nothing_that_larger_batches_would_mend() -> None:
    waits = Evidence(exposed_communication_share=0.5, overlap_ratio=0.25, waiting_share=0.41)
    assert rules(waits) == ["waiting"]
    transfers = replace(waits, waiting_share=0.125)
    exposed, waiting, hidden = advise(transfers, DEFAULTS)
    assert (exposed.rule, exposed.stake, hidden.rule, hidden.stake) == (
        "exposed_communication",
        0.375,
        "overlap",
        None,
    )
    assert exposed.evidence == (
        "Communication that no computation hides takes 50.00% of the step, 37.50% without waiting for other ranks."
    )
    assert (waiting.rule, waiting.stake) == ("waiting", 0.125)


# ---- nothing is claimed of a device that cannot do it


DEVICES: dict[str, tuple[str | None, str | None, tuple[int, int] | None]] = {
    "P100": ("cuda", "Tesla P100-PCIE-16GB", (6, 0)),
    "V100": ("cuda", "Tesla V100-SXM2-16GB", (7, 0)),
    "T4": ("cuda", "Tesla T4", (7, 5)),
    "RTX 2080": ("cuda", "NVIDIA GeForce RTX 2080 Ti", (7, 5)),
    "GTX 1660": ("cuda", "NVIDIA GeForce GTX 1660 Ti", (7, 5)),  # Turing without tensor cores
    "A100": ("cuda", "NVIDIA A100-SXM4-80GB", (8, 0)),
    "H100": ("cuda", "NVIDIA H100 80GB HBM3", (9, 0)),
    "MI250X": ("cuda", "AMD Instinct MI250X", (9, 0)),  # what ROCm writes in the place of a compute capability
    "without capability": ("cuda", "AMD Instinct MI300X", None),
    "unknown": (None, None, None),
    "CPU": ("cpu", "AMD EPYC 7B13", None),
    "MPS": ("mps", "Apple M2", None),
    "XPU": ("xpu", "Intel(R) Data Center GPU Max 1550", None),
}

BFLOAT16 = "Train in bfloat16 or with automatic mixed precision."
FLOAT16 = "Train with automatic mixed precision in float16: this device has no tensor cores for bfloat16."
TF32 = 'Call torch.set_float32_matmul_precision("high").'
OUT_OF_STEP = "ake .item(), print and other synchronizations out of the step."
ALL_OF_IT = f"Use torch.compile or CUDA graphs, and t{OUT_OF_STEP}"
COMPILE = f"Use torch.compile, and t{OUT_OF_STEP}"
FUSE = "Fuse operators: torch.compile, fused layers, a foreach or fused optimizer."

# For each device: tensor cores, float32, idle, short kernels, and whether memory is pinned for it.
ADVISED: dict[str, tuple[str | None, str | None, str, str, bool]] = {
    "P100": (
        None,
        None,
        f"Use CUDA graphs, and t{OUT_OF_STEP}",
        "Fuse operators: fused layers, a foreach or fused optimizer.",  # Triton begins with Volta
        True,
    ),
    "V100": (FLOAT16, None, ALL_OF_IT, FUSE, True),
    "T4": (FLOAT16, None, ALL_OF_IT, FUSE, True),
    "RTX 2080": (FLOAT16, None, ALL_OF_IT, FUSE, True),
    "GTX 1660": (None, None, ALL_OF_IT, FUSE, True),
    "A100": (BFLOAT16, TF32, ALL_OF_IT, FUSE, True),
    "H100": (BFLOAT16, TF32, ALL_OF_IT, FUSE, True),
    "MI250X": (None, None, COMPILE, FUSE, True),
    "without capability": (None, None, COMPILE, FUSE, True),
    "unknown": (None, None, COMPILE, FUSE, False),
    "CPU": (None, None, COMPILE, FUSE, False),
    "MPS": (None, None, COMPILE, FUSE, False),
    "XPU": (None, None, COMPILE, FUSE, True),
}


@pytest.mark.parametrize("device", DEVICES)
def test_advice_asks_of_no_device_what_it_cannot_do(device: str) -> None:
    kind, name, capability = DEVICES[device]
    evidence = Evidence(
        device=device_abilities(device_type=kind, name=name, compute_capability=capability),
        data_wait_share=0.2,
        tensor_core_eligible_ratio=0.5,
        tensor_core_ratio=0.0,
        float32_share=0.9,
        idle_share=0.3,
        host_idle_share=0.25,
        kernel_gap_share=0.05,
        short_kernel_ratio=0.9,
    )
    found = {advice.rule: advice.action for advice in advise(evidence, DEFAULTS)}
    loader = "Raise the DataLoader's num_workers, and set " + ("pin_memory and " if ADVISED[device][4] else "")
    assert found.pop("data_wait") == f"{loader}persistent_workers."
    rule_names = ("tensor_core_eligible", "float32", "idle", "short_kernels")
    expected = dict(zip(rule_names, ADVISED[device][:4], strict=True))
    assert found == {rule: action for rule, action in expected.items() if action is not None}


# ---- no moment of a step is claimed twice


def stakes(evidence: Evidence, **settings: Any) -> dict[str, float | None]:
    return {advice.rule: advice.stake for advice in advise(evidence, DEFAULTS, **settings)}


def test_what_two_rules_see_belongs_to_the_first_and_what_lies_outside_to_the_second() -> None:
    # Idle for half of the step, 3/8 of it for want of launches: the other 1/8 is for larger kernels, and for a larger
    # batch nothing is left.
    idle = Evidence(
        idle_share=0.5, host_idle_share=0.375, kernel_gap_share=0.125, short_kernel_ratio=0.9, gpu_utilization=0.25
    )
    assert stakes(idle) == {"idle": 0.375, "short_kernels": 0.125, "gpu_utilization": None}
    # The kernels on which tensor cores would help may be the small ones.
    kernels = Evidence(
        tensor_core_eligible_ratio=0.5,
        tensor_core_ratio=0.0,
        low_blocks_kernel_share=0.75,
        kernel_share=0.5,
        device=AMPERE,
    )
    assert stakes(kernels) == {"tensor_core_eligible": 0.25, "blocks_per_sm": 0.125}
    # Smaller buckets and larger batches hide or save the same transfer, and so does a faster backend.
    transfer = Evidence(exposed_communication_share=0.5, overlap_ratio=0.0, backend="gloo")
    assert stakes(transfer) == {"backend": 0.5, "exposed_communication": None, "overlap": None}


def test_a_straggler_that_waits_for_data_is_told_once_where_the_report_is_its_own() -> None:
    known = advise(Evidence(data_wait_share=0.625), DEFAULTS)
    # Its own step: half of it are the seconds in which it waits for data longer than the others do.
    assert stakes(Evidence(straggler=late(0)), known=known, rank=0) == {"straggler": 0.5, "data_wait": 0.125}
    # Another's: what rank 1 is late by is rank 0's waiting for it, not its wait for data; both fill the step.
    assert stakes(Evidence(straggler=late(1)), known=known, rank=0) == {"straggler": 0.5, "data_wait": 0.5}


def test_what_was_set_apart_once_stays_as_it_is() -> None:
    idle = Evidence(idle_share=0.5, host_idle_share=0.375, kernel_gap_share=0.125, short_kernel_ratio=0.9)
    known = advise(idle, DEFAULTS)
    assert advise(Evidence(), DEFAULTS, known=known) == known


SHARES = st.none() | st.integers(0, 64).map(lambda part: part / 64)


@st.composite
def evidences(draw: st.DrawFn) -> Evidence:
    """Anything that shares can be, also what no step can be."""
    of_shares = {
        field.name: draw(SHARES)
        for field in fields(Evidence)
        if field.name.endswith(("_share", "_ratio", "utilization", "occupancy", "mfu"))
    }
    return Evidence(
        **of_shares,  # type: ignore[arg-type]
        device=AMPERE,
        single_tensor_optimizers=("Adam",),
        optimizer_arguments=FUSED,
        backend=draw(st.none() | st.just("gloo")),
        straggler=draw(st.none() | st.just(late(0)) | st.just(late(1))),
    )


@given(evidences(), evidences(), st.integers(0, 1))
def test_all_pieces_together_claim_no_more_than_the_step(first: Evidence, second: Evidence, rank: int) -> None:
    of_one = advise(first, DEFAULTS, rank=rank)
    for found in (of_one, advise(second, DEFAULTS, known=of_one, rank=rank)):
        known = [one.stake for one in found if one.stake is not None]
        assert all(0 < stake <= 1 for stake in known)
        assert sum(known) <= 1


PARTS_OF_A_STEP = ("data wait", "transfer", "waiting", "copies", "kernels", "gaps", "host")


@given(st.lists(st.integers(0, 32), min_size=7, max_size=7), st.floats(0, 1), st.floats(0, 1))
def test_no_part_of_a_step_is_claimed_for_more_than_it_is(sizes: list[int], small: float, eligible: float) -> None:
    whole = sum(sizes) or 1
    step = {name: size / whole for name, size in zip(PARTS_OF_A_STEP, sizes, strict=True)}
    idle = step["gaps"] + step["host"]
    evidence = Evidence(
        data_wait_share=step["data wait"],
        exposed_communication_share=step["transfer"] + step["waiting"],
        waiting_share=step["waiting"],
        overlap_ratio=0.0,
        backend="gloo",
        pageable_copy_share=step["copies"] + step["kernels"] / 2,  # half of the kernels hide copies
        exposed_copy_share=step["copies"],
        kernel_share=step["kernels"],
        low_blocks_kernel_share=small,
        tensor_core_eligible_ratio=eligible,
        tensor_core_ratio=0.0,
        idle_share=idle,
        host_idle_share=step["host"],
        kernel_gap_share=step["gaps"],
        gpu_utilization=0.0,
        short_kernel_ratio=1.0,
        device=AMPERE,
    )
    found = stakes(evidence)
    for parts, claiming in (
        (step["data wait"], ("data_wait",)),
        (step["transfer"], ("backend", "exposed_communication", "overlap")),
        (step["waiting"], ("waiting",)),
        (step["copies"], ("pageable_copies",)),
        (step["kernels"], ("tensor_core_eligible", "blocks_per_sm")),
        (idle, ("idle", "short_kernels", "gpu_utilization")),
    ):
        assert sum(found.get(rule) or 0.0 for rule in claiming) <= parts + 1e-9
