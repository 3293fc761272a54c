"""What the rules of advice look at, collected from a window and its traced step.

Every field of ``Evidence`` is None where it was not measured, and a rule whose evidence is None says nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_flops.analysis.device_abilities import UNKNOWN_DEVICE, DeviceAbilities, device_abilities
from lightning_flops.analysis.rates import ratio
from lightning_flops.analysis.without_flops import WithoutFlops
from lightning_flops.config import AdviceThresholds
from lightning_flops.records import (
    ModuleRecord,
    OperatorCell,
    OptimizerFacts,
    ProcessorLoss,
    RunContext,
    RunFacts,
)
from lightning_flops.schema.energy import Energy
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.step import DtypeFlops, Rates, TimingProfile
from lightning_flops.schema.trace import TraceReport
from lightning_flops.units import plain

ALIGNMENT_16_BITS = 8
"""Elements: tensor cores take 16-bit matrices in pieces of 16 bytes."""
_LEAST_SEC = 1.0
"""Of timed steps that took less, another process that wakes up for a moment has a large share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the rules look at. Shares are of the step if nothing else is said; None is not measured."""

    data_wait_share: float | None = None
    exposed_communication_share: float | None = None
    """Communication that no computation hides."""
    waiting_share: float | None = None
    """At most this much of it is waiting for other ranks; None where their calls are not known."""
    overlap_ratio: float | None = None
    """Communication that computation hides ÷ communication."""
    gpu_utilization: float | None = None
    """Union of the kernels ÷ the part of the traced step that did not wait for data."""
    low_blocks_kernel_share: float | None = None
    """Time in kernels with fewer blocks per SM than the threshold ÷ time in all kernels that compute."""
    kernel_share: float | None = None
    """Kernels that compute."""
    occupancy: float | None = None
    """Estimated achieved occupancy, 1 being full."""
    tensor_core_ratio: float | None = None
    """Time in kernels on tensor cores ÷ time in all kernels that compute."""
    tensor_core_eligible_ratio: float | None = None
    device: DeviceAbilities = UNKNOWN_DEVICE
    """What the device can do."""
    peak_memory_share: float | None = None
    """Peak of the device's memory ÷ what it has."""
    float32_share: float | None = None
    """Model FLOPs in float32, not TF32 ÷ model FLOPs."""
    misaligned_share: float | None = None
    """FLOPs in modules with a weight dimension that is no multiple of 8, and in a 16-bit dtype that the device's tensor
    cores take ÷ all FLOPs; None without tensor cores."""
    misaligned_modules: tuple[str, ...] = ()
    """Their names and dimensions, those with most FLOPs first."""
    optimizer_share: float | None = None
    single_tensor_optimizers: tuple[str, ...] | None = None
    """Types of the optimizers that update one tensor after the other."""
    optimizer_arguments: tuple[str, ...] = ()
    """Arguments with which they would update many tensors at once on this device."""
    host_idle_share: float | None = None
    """The device waits for the host to launch work, waiting for data left out."""
    kernel_gap_share: float | None = None
    idle_share: float | None = None
    """The device runs nothing, for whatever reason but data."""
    short_kernel_ratio: float | None = None
    """Kernels under 10 µs ÷ kernels."""
    straggler: Straggler | None = None
    """The rank that the others wait for longest; None if all keep pace, or the other ranks are not known."""
    straggler_name: str | None = None
    """What the straggler is called where its number is not known."""
    mfu: float | None = None
    """None too where it is only a lower bound."""
    data_parallel_devices: int | None = None
    """GPUs over which torch.nn.DataParallel spreads the batch; 0 for none."""
    backend: str | None = None
    """Of the process group that synchronizes gradients of modules on GPUs."""
    pageable_copy_share: float | None = None
    """Copies from pageable host memory to the device."""
    exposed_copy_share: float | None = None
    """Copies of any kind beside which neither kernels nor communication run."""
    loader_workers: int | None = None
    padding_share: float | None = None
    """Of the tokens of the run's batches so far."""
    processor_lost_share: float | None = None
    """Processor time that was asked for while steps were timed, and not given: the thread's, or the machine's."""
    power_limited_share: float | None = None
    """Of the timed steps, how long power held the GPU's clock down."""
    heat_limited_share: float | None = None
    """How long heat did."""
    clock_words: str | None = None
    """How high the clock was, and could be."""
    without_flops: WithoutFlops | None = None
    """What takes most of the step and computes no products."""


def gather_evidence(
    *,
    rates: Rates,
    timing: TimingProfile | None,
    dtypes: Sequence[DtypeFlops],
    cells: Iterable[OperatorCell],
    modules: Iterable[ModuleRecord],
    context: RunContext,
    facts: RunFacts | None,
    trace: TraceReport | None,
    peak_memory_bytes: int | None,
    lower_bound: bool,
    thresholds: AdviceThresholds,
    processor: ProcessorLoss | None = None,
    energy: Energy | None = None,
    without_flops: WithoutFlops | None = None,
) -> Evidence:
    """What a window knows that a rule can use.

    Args:
        rates: the profile's rates.
        timing: means over the timed steps; None if none was timed.
        dtypes: FLOPs by dtype.
        cells: what each operator did in each module.
        modules: the model's modules.
        context: where the run takes place.
        facts: how it is set up; None if nobody looked.
        trace: the tables of the traced step; None if none was traced.
        peak_memory_bytes: most bytes that the device's memory held; None if not known.
        lower_bound: FLOPs are lower bounds.
        thresholds: the one for a kernel's blocks per SM is used here.
        processor: what the timed steps lost of it.
        energy: what the GPU's counters told of the timed steps.
        without_flops: what takes most of the traced step without FLOPs.
    """
    whole = sum(one.model for one in dtypes)
    single = sum(one.model for one in dtypes if one.dtype == "float32")
    device = device_abilities(
        device_type=context.device_type,
        name=context.device_name,
        compute_capability=None if facts is None else facts.compute_capability,
    )
    misaligned_share, misaligned = _misaligned_modules(cells, modules, dtypes=device.tensor_core_dtypes)
    evidence = Evidence(
        data_wait_share=rates.data_wait_ratio,
        device=device,
        float32_share=ratio(part=single, whole=whole) if context.device_type == "cuda" else None,
        misaligned_share=misaligned_share if device.tensor_core_dtypes else None,
        misaligned_modules=misaligned,
        optimizer_share=None if timing is None else ratio(part=timing.optimizer_sec, whole=timing.global_step_sec),
        mfu=None if lower_bound else rates.mfu,
        processor_lost_share=None if processor is None or processor.seconds < _LEAST_SEC else processor.lost_share,
        without_flops=without_flops,
    )
    if energy is not None:
        evidence = replace(
            evidence,
            power_limited_share=energy.power_limited_share,
            heat_limited_share=energy.heat_limited_share,
            clock_words=_clock_words(energy),
        )
    if facts is not None:
        evidence = replace(
            evidence,
            peak_memory_share=ratio(part=peak_memory_bytes, whole=facts.device_memory_bytes)
            if facts.device_memory_bytes
            else None,
            single_tensor_optimizers=_single_tensor(facts.optimizers),
            optimizer_arguments=_arguments(facts.optimizers),
            data_parallel_devices=facts.data_parallel_devices,
            padding_share=facts.padding_ratio,
            backend=facts.process_group_backend
            if context.device_type == "cuda" and context.world_size > 1 and facts.nccl is not False
            else None,
            loader_workers=facts.loader_workers,
        )
    return evidence if trace is None else with_trace(evidence, trace, thresholds)


def _clock_words(energy: Energy) -> str | None:
    if energy.clock_mhz is None or energy.highest_clock_mhz is None:
        return None
    return f"{plain(round(energy.clock_mhz))} of at most {plain(energy.highest_clock_mhz)} MHz"


def _single_tensor(optimizers: tuple[OptimizerFacts, ...] | None) -> tuple[str, ...] | None:
    if optimizers is None:
        return None
    return tuple(dict.fromkeys(one.type_name for one in optimizers if one.implementation == "single-tensor"))


def _arguments(optimizers: tuple[OptimizerFacts, ...] | None) -> tuple[str, ...]:
    """Arguments that all optimizers accept which update one tensor at a time."""
    single = [one for one in optimizers or () if one.implementation == "single-tensor"]
    first = single[0].faster_with if single else ()
    return tuple(name for name in first if all(name in one.faster_with for one in single))


def _misaligned_modules(
    cells: Iterable[OperatorCell], modules: Iterable[ModuleRecord], *, dtypes: Collection[str]
) -> tuple[float | None, tuple[str, ...]]:
    """Share of all FLOPs that are in one of *dtypes* and in modules with an odd weight dimension; and these."""
    odd: Mapping[str, list[int]] = {
        module.name: [size for size in module.weight_sizes if size % ALIGNMENT_16_BITS] for module in modules
    }
    whole = 0
    by_module: dict[str, int] = {}
    for cell in cells:
        whole += cell.flops
        if cell.flops and cell.dtype in dtypes and odd.get(cell.module):
            by_module[cell.module] = by_module.get(cell.module, 0) + cell.flops
    ordered = sorted(by_module, key=lambda name: (-by_module[name], name))
    named = tuple(f"{name or 'the root'} ({', '.join(map(str, dict.fromkeys(odd[name])))})" for name in ordered)
    return ratio(part=sum(by_module.values()), whole=whole), named


def with_trace(evidence: Evidence, trace: TraceReport, thresholds: AdviceThresholds) -> Evidence:
    """*evidence* and what the tables of *trace* tell; *thresholds* say which kernels are small."""
    mean = trace.step_times.mean
    wall_us = mean.wall_us
    # Of the traced step itself: the timed steps' wait for data may be another.
    waiting = ratio(part=mean.data_loader_us or 0.0, whole=wall_us) or 0.0
    found: dict[str, float | None] = {}
    if trace.overlap is not None:
        exposed_us = trace.overlap.communication_us - trace.overlap.overlap_us
        found["exposed_communication_share"] = ratio(part=exposed_us, whole=trace.overlap.wall_us)
        found["overlap_ratio"] = trace.overlap.overlap_ratio
    if trace.device_metrics:
        device = max(trace.device_metrics, key=lambda one: one.utilization)
        found["gpu_utilization"] = min(1.0, device.utilization / (1.0 - waiting)) if waiting < 1 else None
        found["occupancy"] = None if device.occupancy_percent is None else device.occupancy_percent / 100
    if mean.kernel_us is not None:
        found["kernel_share"] = ratio(part=mean.kernel_us, whole=wall_us)
    if trace.kernels:
        found["low_blocks_kernel_share"] = _low_blocks_share(trace, thresholds)
    if trace.kernel_summary is not None:
        found["tensor_core_ratio"] = trace.kernel_summary.tensor_core_ratio
        found["tensor_core_eligible_ratio"] = trace.kernel_summary.tensor_core_eligible_ratio
        found["short_kernel_ratio"] = trace.kernel_summary.short_calls_ratio
    if mean.kernel_us is not None:
        # The parts of a step exclude one another, so what no device event and no wait for data fills is idle. Pauses
        # are known between device events alone: before a step's first and after its last the host launches nothing.
        busy_us = mean.kernel_us + sum(part or 0.0 for part in (mean.memcpy_us, mean.memset_us, mean.communication_us))
        idle = max(0.0, 1.0 - (ratio(part=busy_us, whole=wall_us) or 0.0) - waiting)
        whole_us = wall_us * len(trace.step_times.steps)
        pauses = [one for one in trace.idle or () if one.stream is None]
        busiest = max(pauses, key=lambda one: one.busy_us, default=None)
        gaps = 0.0 if busiest is None else ratio(part=busiest.kernel_gap_us, whole=whole_us) or 0.0
        other = 0.0 if busiest is None else ratio(part=busiest.other_us, whole=whole_us) or 0.0
        found["idle_share"], found["kernel_gap_share"] = idle, gaps
        found["host_idle_share"] = max(0.0, idle - gaps - other)
        # Copies come before communication in a step's breakdown: what of the exposed communication is missing there ran
        # beside them.
        beside = max(0.0, (found.get("exposed_communication_share") or 0.0) * wall_us - (mean.communication_us or 0.0))
        found["exposed_copy_share"] = ratio(part=max(0.0, (mean.memcpy_us or 0.0) - beside), whole=wall_us)
    if trace.transfers is not None and trace.device_metrics:
        pageable = [row for row in trace.transfers if "Pageable -> Device" in row.name]
        pageable_us = sum(row.device.total_us for row in pageable if row.device is not None)
        found["pageable_copy_share"] = ratio(part=pageable_us, whole=wall_us * len(trace.step_times.steps))
    return replace(evidence, **found)  # type: ignore[arg-type]  # every field named here is a float or None


def _low_blocks_share(trace: TraceReport, thresholds: AdviceThresholds) -> float | None:
    rows = [row for row in trace.kernels or () if not row.collective and row.blocks_per_sm is not None]
    low_us = sum(row.device.total_us for row in rows if (row.blocks_per_sm or 0.0) < thresholds.blocks_per_sm)
    return ratio(part=low_us, whole=sum(row.device.total_us for row in rows))
