"""What holds a run back, and what to try: rules over the evidence, each with its threshold and its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from lightning_flops.analysis.evidence import ALIGNMENT_16_BITS, Evidence
from lightning_flops.analysis.straggler_words import straggler_action, straggler_evidence
from lightning_flops.config import AdviceThresholds
from lightning_flops.units import duration, percent, plain

_TORCH_PROFILER = "PyTorch Profiler's recommendations"
_PATTERN_MATCHER = "torch.profiler's pattern matcher"
_MATMUL_GUIDE = "NVIDIA's matrix multiplication guide"
_HTA = "Holistic Trace Analysis"
_OWN = "this project"

_TENSOR_CORES_SINCE = (7, 0)
_TF32_SINCE = (8, 0)
_OCCUPANCY_ENOUGH = 0.30
_MODULES_NAMED = 3

_LOW_MFU = "mfu"
"""The rule that points at the others."""

RULES_ON_COMMUNICATION = ("exposed_communication", "overlap")
"""Rules that say something else where the other ranks tell how much of a rank's communication was waiting for them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """One thing that holds the run back."""

    rule: str
    """The rule's name, which also begins the names of its thresholds."""
    evidence: str
    """What was measured, in a sentence."""
    threshold: str
    """What it was held against, in words."""
    action: str
    """What to try, in a sentence."""
    source: str
    """Where the rule comes from."""
    stake: float | None
    """Share of the step that is at stake; None where nobody can say."""


_Check = Callable[[Evidence, AdviceThresholds], Advice | None]


def advise(evidence: Evidence, thresholds: AdviceThresholds, *, known: Iterable[Advice] = ()) -> tuple[Advice, ...]:
    """What to try, the most at stake first; empty for a run that nothing measured holds back.

    Args:
        evidence: what was measured.
        thresholds: what it is held against.
        known: what earlier evidence, of one rank, led to; it stands where *evidence* says nothing of its rule.
    """
    found = {advice.rule: advice for advice in known if advice.rule != _LOW_MFU}
    found |= {advice.rule: advice for check in _RULES if (advice := check(evidence, thresholds)) is not None}
    ordered = in_order(found.values())
    low = _low_mfu(evidence, thresholds, largest=ordered[0] if ordered else None)
    return (*ordered, low) if low is not None else ordered


def in_order(found: Iterable[Advice]) -> tuple[Advice, ...]:
    """The most at stake first, and last that of which nobody can say."""
    return tuple(sorted(found, key=lambda advice: (advice.stake is None, -(advice.stake or 0.0))))


# ---- the rules


def _data_wait(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share = evidence.data_wait_share
    if share is None or share <= thresholds.data_wait:
        return None
    workers = "" if evidence.loader_workers is None else f" (now {evidence.loader_workers})"
    return Advice(
        rule="data_wait",
        evidence=f"The step waits for data for {percent(share)} of its time.",
        threshold=f"more than {percent(thresholds.data_wait)}",
        action=f"Raise the DataLoader's num_workers{workers}, and set pin_memory and persistent_workers.",
        source=_TORCH_PROFILER,
        stake=share,
    )


def _exposed_communication(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share, stake = evidence.exposed_communication_share, _exposed_transfer(evidence)
    if share is None or stake is None or stake <= thresholds.exposed_communication:
        return None
    waiting = f", {percent(stake)} without waiting for other ranks" if evidence.waiting_share else ""
    return Advice(
        rule="exposed_communication",
        evidence=f"Communication that no computation hides takes {percent(share)} of the step{waiting}.",
        threshold=f"more than {percent(thresholds.exposed_communication)}",
        # Sharded gradients (ZeRO-2 and -3, FSDP) are reduced in every micro-step: accumulation saves nothing there.
        action=(
            "Raise the batch size, compress gradients, or, where they are reduced once a step (DDP, ZeRO-0 and -1), "
            "accumulate them over more micro-steps."
        ),
        source=_TORCH_PROFILER,
        stake=stake,
    )


def _exposed_transfer(evidence: Evidence) -> float | None:
    """Exposed communication that would be left if all ranks came at once: no batch size changes the rest."""
    share = evidence.exposed_communication_share
    return None if share is None else max(0.0, share - (evidence.waiting_share or 0.0))


def _overlap(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share, hidden = _exposed_transfer(evidence), evidence.overlap_ratio
    if share is None or hidden is None:
        return None
    if hidden >= thresholds.overlap or share <= thresholds.exposed_communication:
        return None
    what = "exposed transfer" if evidence.waiting_share else "exposed"
    return Advice(
        rule="overlap",
        evidence=f"Computation hides {percent(hidden)} of the communication; {percent(share)} of the step is {what}.",
        threshold=(
            f"less than {percent(thresholds.overlap)} hidden, and more than "
            f"{percent(thresholds.exposed_communication)} of the step exposed"
        ),
        action=(
            "Let communication begin earlier: smaller buckets (DDP: bucket_cap_mb; DeepSpeed: overlap_comm and "
            "reduce_bucket_size), prefetching of shards (ZeRO-3: stage3_prefetch_bucket_size)."
        ),
        source=_OWN,
        stake=share,
    )


def _gpu_utilization(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    used = evidence.gpu_utilization
    if used is None or used >= thresholds.gpu_utilization:
        return None
    return Advice(
        rule="gpu_utilization",
        evidence=f"Kernels run during {percent(used)} of the time in which the step does not wait for data.",
        threshold=f"less than {percent(thresholds.gpu_utilization)}",
        action="Raise the batch size.",
        source=_TORCH_PROFILER,
        stake=evidence.idle_share if evidence.idle_share is not None else 1.0 - used,
    )


def _blocks_per_sm(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share = evidence.low_blocks_kernel_share
    if share is None or share <= thresholds.blocks_per_sm_share:
        return None
    return Advice(
        rule="blocks_per_sm",
        evidence=f"Kernels too small for the device hold {percent(share)} of the kernels' time.",
        threshold=(
            f"fewer than {plain(thresholds.blocks_per_sm)} blocks per SM, in more than "
            f"{percent(thresholds.blocks_per_sm_share)} of the time"
        ),
        action="Give each kernel more to do: a larger batch, larger layers, fused operators.",
        source=f"{_TORCH_PROFILER}; the share is of {_OWN}",
        stake=None if evidence.kernel_share is None else share * evidence.kernel_share,
    )


def _occupancy(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    occupancy = evidence.occupancy
    if occupancy is None or occupancy >= thresholds.occupancy:
        return None
    return Advice(
        rule="occupancy",
        evidence=f"Estimated achieved occupancy is {percent(occupancy)}.",
        threshold=f"less than {percent(thresholds.occupancy)}",
        action=(
            "Use kernels with more warps in flight: larger tiles or batches, fused operators. Above "
            f"{percent(_OCCUPANCY_ENOUGH)}, more gains nothing for certain."
        ),
        source=_TORCH_PROFILER,
        stake=None,
    )


def _tensor_cores(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    eligible, used, capability = (
        evidence.tensor_core_eligible_ratio,
        evidence.tensor_core_ratio,
        evidence.compute_capability,
    )
    if eligible is None or used is None or capability is None or capability < _TENSOR_CORES_SINCE:
        return None
    if used > 0 or eligible <= thresholds.tensor_core_eligible:
        return None
    return Advice(
        rule="tensor_core_eligible",
        evidence=f"No kernel runs on tensor cores, though {percent(eligible)} of the kernels' time could.",
        threshold=f"none, where more than {percent(thresholds.tensor_core_eligible)} could",
        action="Train in bfloat16 or with automatic mixed precision.",
        source=_TORCH_PROFILER,
        stake=None if evidence.kernel_share is None else eligible * evidence.kernel_share,
    )


def _memory(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    peak, used = evidence.peak_memory_share, evidence.gpu_utilization
    if peak is None:
        return None
    if peak > thresholds.memory_high:
        return Advice(
            rule="memory_high",
            evidence=f"Memory peaks at {percent(peak)} of the device's.",
            threshold=f"more than {percent(thresholds.memory_high)}",
            action="Checkpoint activations, or train with mixed precision, before a longer batch fails.",
            source=_TORCH_PROFILER,
            stake=None,
        )
    if used is not None and peak < thresholds.memory_low and used < thresholds.memory_low_utilization:
        return Advice(
            rule="memory_low",
            evidence=f"Memory peaks at {percent(peak)} of the device's, and kernels run {percent(used)} of the time.",
            threshold=(
                f"less than {percent(thresholds.memory_low)} with less than "
                f"{percent(thresholds.memory_low_utilization)} utilization"
            ),
            action="Double the batch size.",
            source=_OWN,
            stake=None,
        )
    return None


def _float32(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share, capability = evidence.float32_share, evidence.compute_capability
    if share is None or capability is None or capability < _TF32_SINCE or share <= thresholds.float32:
        return None
    return Advice(
        rule="float32",
        evidence=f"{percent(share)} of the model FLOPs are float32, with TF32 off.",
        threshold=f"more than {percent(thresholds.float32)}, on a device of compute capability 8.0 or above",
        action='Call torch.set_float32_matmul_precision("high").',
        source=_PATTERN_MATCHER,
        stake=None,
    )


def _misaligned(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share = evidence.misaligned_share
    if share is None or share <= thresholds.misaligned:
        return None
    shown = ", ".join(evidence.misaligned_modules[:_MODULES_NAMED])
    more = len(evidence.misaligned_modules) - _MODULES_NAMED
    return Advice(
        rule="misaligned",
        evidence=(
            f"{percent(share)} of the FLOPs are 16-bit products with a dimension that is no multiple of "
            f"{ALIGNMENT_16_BITS}: {shown}" + (f" and {more} more." if more > 0 else ".")
        ),
        threshold=f"more than {percent(thresholds.misaligned)}",
        action=f"Pad the dimension (vocabulary, hidden size) to a multiple of {ALIGNMENT_16_BITS}.",
        source=_MATMUL_GUIDE,
        stake=None,
    )


def _optimizer(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share, single = evidence.optimizer_share, evidence.single_tensor_optimizers
    if share is None or not single or share <= thresholds.optimizer:
        return None
    return Advice(
        rule="optimizer",
        evidence=f"{' and '.join(single)} updates tensor by tensor and takes {percent(share)} of the step.",
        threshold=f"single-tensor updates, and more than {percent(thresholds.optimizer)}",
        action="Construct it with fused=True, or with foreach=True.",
        source=f"{_PATTERN_MATCHER}; the share is of {_OWN}",
        stake=share,
    )


def _host_idle(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    host, gaps, idle = evidence.host_idle_share, evidence.kernel_gap_share, evidence.idle_share
    if host is None or gaps is None or idle is None or host <= gaps or idle <= thresholds.idle:
        return None
    return Advice(
        rule="idle",
        evidence=(
            f"The device is idle for {percent(idle)} of the step besides waiting for data: {percent(host)} until the "
            f"host launches work, {percent(gaps)} between kernels."
        ),
        threshold=f"more than {percent(thresholds.idle)}, most of it the host's",
        action="Use torch.compile or CUDA graphs, and take .item(), print and other synchronizations out of the step.",
        source=f"{_HTA}'s kinds of idle time; the share is of {_OWN}",
        stake=host,
    )


def _short_kernels(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    short, idle = evidence.short_kernel_ratio, evidence.idle_share
    if short is None or idle is None or short <= thresholds.short_kernels or idle <= thresholds.short_kernels_idle:
        return None
    return Advice(
        rule="short_kernels",
        evidence=f"{percent(short)} of the kernels take under 10 us, and for {percent(idle)} of the step none runs.",
        threshold=f"more than {percent(thresholds.short_kernels)}, and {percent(thresholds.short_kernels_idle)} idle",
        action="Fuse operators: torch.compile, fused layers, a foreach or fused optimizer.",
        source=_OWN,
        stake=idle,
    )


def _straggler(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    one = evidence.straggler
    if one is not None:
        return Advice(
            rule="straggler",
            evidence=straggler_evidence(one),
            threshold=f"more than {percent(thresholds.straggler - 1.0)} of the step, and than "
            f"{duration(thresholds.straggler_sec)}",
            action=straggler_action(one),
            source=_OWN,
            stake=min(1.0, one.share),
        )
    factor, longer_sec = evidence.slowest_over_median, evidence.slowest_longer_sec
    if factor is None or factor <= thresholds.straggler or longer_sec is None or longer_sec <= thresholds.straggler_sec:
        return None
    return Advice(
        rule="straggler",
        evidence=(
            f"Rank {evidence.slowest_rank} computes {plain(factor)} times as long as the median rank, "
            f"{duration(longer_sec)} a step more."
        ),
        threshold=f"more than {plain(thresholds.straggler)} times, and {duration(thresholds.straggler_sec)} more",
        action="Balance the work between ranks, and look at that rank's device.",
        source=f"{_TORCH_PROFILER}; the factor is of {_OWN}",
        stake=evidence.slowest_longer_share,
    )


def _waiting(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share = evidence.waiting_share
    if share is None or share <= thresholds.waiting or evidence.straggler is not None:
        return None
    return Advice(
        rule="waiting",
        evidence=(
            f"Waiting for other ranks takes {percent(share)} of the traced step, and none of them is late enough to "
            "be a straggler."
        ),
        threshold=f"more than {percent(thresholds.waiting)}, without a straggler",
        action="Even out what ranks do in a step: lengths of samples, sizes of batches, what else runs on their hosts.",
        source=_OWN,
        stake=share,
    )


def _data_parallel(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    devices = evidence.data_parallel_devices
    if devices is None or devices < 2:
        return None
    return Advice(
        rule="data_parallel",
        evidence=f"torch.nn.DataParallel spreads the batch over {devices} GPUs from one process.",
        threshold="DataParallel over several GPUs",
        action="Use DistributedDataParallel, with a process for each GPU.",
        source=_TORCH_PROFILER,
        stake=None,
    )


def _backend(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    if evidence.backend is None or evidence.backend in ("nccl", "rccl"):
        return None
    return Advice(
        rule="backend",
        evidence=f"Gradients on GPUs are synchronized through {evidence.backend}.",
        threshold="any backend but NCCL",
        action='Initialize the process group with backend="nccl".',
        source=_TORCH_PROFILER,
        stake=evidence.exposed_communication_share,
    )


def _pageable_copies(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share = evidence.pageable_copy_share
    if share is None or share <= thresholds.pageable_copies:
        return None
    return Advice(
        rule="pageable_copies",
        evidence=f"Copies from pageable host memory to the device take {percent(share)} of the step.",
        threshold=f"more than {percent(thresholds.pageable_copies)}",
        action="Set the DataLoader's pin_memory, and copy with non_blocking=True.",
        source=_OWN,
        stake=share,
    )


def _low_mfu(evidence: Evidence, thresholds: AdviceThresholds, *, largest: Advice | None) -> Advice | None:
    mfu = evidence.mfu
    if mfu is None or mfu >= thresholds.mfu:
        return None
    if largest is None:
        action = "No loss that was measured is above its threshold: look for the modules with the lowest FLOP/s."
    else:
        action = f"Begin with the first of the above, {largest.rule}."
    return Advice(
        rule=_LOW_MFU,
        evidence=f"MFU is {percent(mfu)}.",
        threshold=f"less than {percent(thresholds.mfu)}",
        action=action,
        source=_OWN,
        stake=None,
    )


_RULES: tuple[_Check, ...] = (
    _data_wait,
    _exposed_communication,
    _overlap,
    _gpu_utilization,
    _blocks_per_sm,
    _occupancy,
    _tensor_cores,
    _memory,
    _float32,
    _misaligned,
    _optimizer,
    _host_idle,
    _short_kernels,
    _straggler,
    _waiting,
    _data_parallel,
    _backend,
    _pageable_copies,
)
