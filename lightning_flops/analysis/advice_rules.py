"""The rules of advice: each looks at the evidence, and has a threshold and a source."""

from __future__ import annotations

from collections.abc import Callable

from lightning_flops.analysis.advice_claims import STRAGGLER
from lightning_flops.analysis.evidence import ALIGNMENT_16_BITS, Evidence
from lightning_flops.analysis.straggler_words import straggler_action, straggler_evidence
from lightning_flops.analysis.without_flops import what_helps
from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.advice import Advice
from lightning_flops.units import duration, percent, plain

_TORCH_PROFILER = "PyTorch Profiler's recommendations"
_PATTERN_MATCHER = "torch.profiler's pattern matcher"
_MATMUL_GUIDE = "NVIDIA's matrix multiplication guide"
_HTA = "Holistic Trace Analysis"
_OWN = "this project"

_OCCUPANCY_ENOUGH = 0.30
_MODULES_NAMED = 3

STARVED = "starved"
"""The rule that comes first: what else was measured is that of a starved run."""

LOW_MFU = "mfu"
"""The rule that points at the others."""

RULES_ON_COMMUNICATION = ("exposed_communication", "overlap")
"""Rules whose answer changes once the other ranks tell how much of the communication was waiting for them."""


_Check = Callable[[Evidence, AdviceThresholds], Advice | None]


def seen_alone(evidence: Evidence, thresholds: AdviceThresholds) -> tuple[Advice, ...]:
    """What each rule says by itself. Several may claim the same moments of the step: see ``set_apart``."""
    return tuple(advice for check in _RULES if (advice := check(evidence, thresholds)) is not None)


def _data_wait(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share = evidence.data_wait_share
    if share is None or share <= thresholds.data_wait:
        return None
    pin = "pin_memory and " if evidence.device.pins_memory else ""
    workers = "" if evidence.loader_workers is None else f" (now {evidence.loader_workers})"
    return Advice(
        rule="data_wait",
        evidence=f"The step waits for data for {percent(share)} of its time.",
        threshold=f"more than {percent(thresholds.data_wait)}",
        action=f"Raise the DataLoader's num_workers{workers}, and set {pin}persistent_workers.",
        source=_TORCH_PROFILER,
        stake=share,
    )


def _padding(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share = evidence.padding_share
    if share is None or share <= thresholds.padding:
        return None
    return Advice(
        rule="padding",
        evidence=f"Padding is {percent(share)} of the tokens that are processed.",
        threshold=f"more than {percent(thresholds.padding)}",
        action=(
            "Put samples of similar lengths into a batch (transformers: train_sampling_strategy='group_by_length', "
            "before version 5 group_by_length=True), pad to the longest of the batch alone, or pack several samples "
            "into one sequence."
        ),
        source=_OWN,
        stake=None,
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
        stake=evidence.idle_share,
    )


def _blocks_per_sm(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share = evidence.low_blocks_kernel_share
    if share is None or share <= thresholds.blocks_per_sm_share:
        return None
    return Advice(
        rule="blocks_per_sm",
        evidence=f"Kernels that are too small for the device take {percent(share)} of the kernel time.",
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
            f"{percent(_OCCUPANCY_ENOUGH)}, more occupancy may gain nothing."
        ),
        source=_TORCH_PROFILER,
        stake=None,
    )


def _tensor_cores(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    eligible, used = evidence.tensor_core_eligible_ratio, evidence.tensor_core_ratio
    dtypes = evidence.device.tensor_core_dtypes
    if eligible is None or used is None or not dtypes:
        return None
    if used > 0 or eligible <= thresholds.tensor_core_eligible:
        return None
    return Advice(
        rule="tensor_core_eligible",
        evidence=f"No kernel runs on tensor cores, but {percent(eligible)} of the kernel time could.",
        threshold=f"none, where more than {percent(thresholds.tensor_core_eligible)} could",
        action="Train in bfloat16 or with automatic mixed precision."
        if "bfloat16" in dtypes
        else f"Train with automatic mixed precision in {dtypes[0]}: this device has no tensor cores for bfloat16.",
        source=_TORCH_PROFILER,
        stake=None if evidence.kernel_share is None else eligible * evidence.kernel_share,
    )


def _memory(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    peak, used = evidence.peak_memory_share, evidence.gpu_utilization
    if peak is None:
        return None
    if peak > thresholds.memory_high:
        dtypes = evidence.device.tensor_core_dtypes
        mixed = f", or train with mixed precision in {dtypes[0]}," if dtypes else ""
        return Advice(
            rule="memory_high",
            evidence=f"Peak memory is {percent(peak)} of the device's memory.",
            threshold=f"more than {percent(thresholds.memory_high)}",
            action=f"Checkpoint activations{mixed} before a larger batch runs out of memory.",
            source=_TORCH_PROFILER,
            stake=None,
        )
    if used is not None and peak < thresholds.memory_low and used < thresholds.memory_low_utilization:
        return Advice(
            rule="memory_low",
            evidence=(
                f"Peak memory is {percent(peak)} of the device's memory, and kernels run {percent(used)} of the time."
            ),
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
    share = evidence.float32_share
    if share is None or not evidence.device.tf32 or share <= thresholds.float32:
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
            f"{percent(share)} of the FLOPs are 16-bit products with a dimension that is not a multiple of "
            f"{ALIGNMENT_16_BITS}: {shown}" + (f" and {more} more." if more > 0 else ".")
        ),
        threshold=f"more than {percent(thresholds.misaligned)}",
        action=f"Pad the dimension (vocabulary, hidden size) to a multiple of {ALIGNMENT_16_BITS}.",
        source=_MATMUL_GUIDE,
        stake=None,
    )


def _optimizer(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share, single, ways = evidence.optimizer_share, evidence.single_tensor_optimizers, evidence.optimizer_arguments
    if share is None or not single or not ways or share <= thresholds.optimizer:
        return None
    return Advice(
        rule="optimizer",
        evidence=f"{' and '.join(single)} updates one tensor at a time and takes {percent(share)} of the step.",
        threshold=f"single-tensor updates, and more than {percent(thresholds.optimizer)}",
        action=f"Construct it with {', or with '.join(ways)}.",
        source=f"{_PATTERN_MATCHER}; the share is of {_OWN}",
        stake=share,
    )


def _host_idle(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    host, gaps, idle = evidence.host_idle_share, evidence.kernel_gap_share, evidence.idle_share
    if host is None or gaps is None or idle is None or host <= gaps or idle <= thresholds.idle:
        return None
    ways = ["torch.compile"] * evidence.device.compiles + ["CUDA graphs"] * evidence.device.cuda_graphs
    use = f"Use {' or '.join(ways)}, and t" if ways else "T"
    return Advice(
        rule="idle",
        evidence=(
            f"The device is idle for {percent(idle)} of the step, not counting the wait for data: {percent(host)} "
            f"until the host launches work, {percent(gaps)} between kernels."
        ),
        threshold=f"more than {percent(thresholds.idle)}, most of it the host's",
        action=f"{use}ake .item(), print and other synchronizations out of the step.",
        source=f"{_HTA}'s kinds of idle time; the share is of {_OWN}",
        stake=host,
    )


def _short_kernels(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    short, idle = evidence.short_kernel_ratio, evidence.idle_share
    if short is None or idle is None or short <= thresholds.short_kernels or idle <= thresholds.short_kernels_idle:
        return None
    compiled = "torch.compile, " if evidence.device.compiles else ""
    return Advice(
        rule="short_kernels",
        evidence=(
            f"{percent(short)} of the kernels take under 10 us, and no kernel runs for {percent(idle)} of the step."
        ),
        threshold=f"more than {percent(thresholds.short_kernels)}, and {percent(thresholds.short_kernels_idle)} idle",
        action=f"Fuse operators: {compiled}fused layers, a foreach or fused optimizer.",
        source=_OWN,
        stake=idle,
    )


def _straggler(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    one = evidence.straggler
    if one is None:
        return None
    return Advice(
        rule=STRAGGLER,
        evidence=straggler_evidence(one, name=evidence.straggler_name),
        threshold=f"more than {percent(thresholds.straggler - 1.0)} of the step, and than "
        f"{duration(thresholds.straggler_sec)}",
        action=straggler_action(one),
        source=_OWN,
        stake=min(1.0, one.share),
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
        stake=_exposed_transfer(evidence),
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
        stake=share if evidence.exposed_copy_share is None else min(share, evidence.exposed_copy_share),
    )


def _without_flops(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    one = evidence.without_flops
    if one is None or one.stake <= thresholds.without_flops:
        return None
    return Advice(
        rule="without_flops",
        evidence=one.evidence,
        threshold=f"more than {percent(thresholds.without_flops)}, without what Python does between operators",
        action=what_helps(one, compiles=evidence.device.compiles),
        source=_OWN,
        stake=one.stake,
    )


def _heat(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    return _throttled(
        "heat_limited",
        "heat",
        evidence,
        share=evidence.heat_limited_share,
        threshold=thresholds.heat_limited,
        action="Look after its cooling, or what else heats its host: the same program is faster on a cooler GPU.",
    )


def _power(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    return _throttled(
        "power_limited",
        "power",
        evidence,
        share=evidence.power_limited_share,
        threshold=thresholds.power_limited,
        action=(
            "See whether its power limit was lowered (nvidia-smi -q -d POWER). If it is the GPU's own, this is the "
            "speed that it has for such work: compare runs at the same limit, and look at the energy of a sample."
        ),
    )


def _throttled(
    rule: str, cause: str, evidence: Evidence, *, share: float | None, threshold: float, action: str
) -> Advice | None:
    if share is None or share <= threshold:
        return None
    clock = "" if evidence.clock_words is None else f", on average at {evidence.clock_words}"
    return Advice(
        rule=rule,
        evidence=f"While steps were timed, {cause} held the GPU's clock down for {percent(share)} of the time{clock}.",
        threshold=f"more than {percent(threshold)}",
        action=action,
        source=f"NVML; the share is of {_OWN}",
        stake=None,
    )


def _starved(evidence: Evidence, thresholds: AdviceThresholds) -> Advice | None:
    share = evidence.processor_lost_share
    if share is None or share <= thresholds.starved:
        return None
    return Advice(
        rule=STARVED,
        evidence=(
            f"While steps were timed, {percent(share)} of the processor time that this process asked for went to "
            "others: all times, rates and shares here are those of a starved run."
        ),
        threshold=f"more than {percent(thresholds.starved)}",
        action="Give it processors of its own, or fewer threads and workers, and profile again before all else.",
        source=_OWN,
        stake=None,
    )


def low_mfu(evidence: Evidence, thresholds: AdviceThresholds, *, largest: Advice | None) -> Advice | None:
    """The rule that comes last: it points at *largest*, the piece of advice with most at stake."""
    mfu = evidence.mfu
    if mfu is None or mfu >= thresholds.mfu:
        return None
    if largest is None:
        action = "Nothing else that was measured is over its threshold: look for the modules with the lowest FLOP/s."
    else:
        action = f"Begin with the first one above, {largest.rule}."
    return Advice(
        rule=LOW_MFU,
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
    _padding,
    _without_flops,
    _heat,
    _power,
    _starved,
)
