"""What the rules of advice look at, collected from a window and its traced steps, or from traces alone.

Every field of ``Evidence`` is None where it was not measured, and a rule whose evidence is None says nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lightning_flops.analysis.devices import UNKNOWN_DEVICE, DeviceAbilities, device_abilities
from lightning_flops.analysis.rates import ratio
from lightning_flops.records import ModuleRecord, OperatorCell, ProcessorLoss, RunFacts, TimePhase, WindowRecord
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.step import Budget, DtypeFlops, ModuleTimes, TimingProfile
from lightning_flops.schema.trace import TracedStep, TraceReport

_ALIGNMENT_16_BITS = 8
"""Elements: tensor cores take 16-bit matrices in pieces of 16 bytes."""
_LEAST_SEC, _CHANCE_SHARE = 1.0, 0.25
"""Of timed steps that took less, another process that wakes up for a moment may have such a share."""

_NO_FACTS = RunFacts()
_DROPS = frozenset(("aten.bernoulli_", "aten.native_dropout"))
_DEVIATES = frozenset(("aten.rsqrt", "aten.sqrt", "aten.std", "aten.var", "aten.var_mean", "aten.linalg_vector_norm"))
"""Operators of which a norm that is written out in Python has one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the rules look at. Shares are of a typical step if nothing else is said; None is not measured."""

    #: What rules compare with their limits, by the names of the rules.
    shares: Mapping[str, float | None] = field(default_factory=dict)
    #: Modules that rules are about, by the names of the rules; the one that takes longest first.
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    step_sec: float | None = None
    batches: float = 1.0  #: Batches in a step.
    data_wait_sec: float | None = None  #: Wait for data in a step.
    compute_share: float | None = None  #: Forward and backward.
    kernel_share: float | None = None  #: Kernels that compute.
    device: DeviceAbilities = UNKNOWN_DEVICE
    facts: RunFacts = _NO_FACTS  #: How the run is set up.
    #: Of the process group that synchronizes gradients of modules on GPUs, where that could be NCCL.
    backend: str | None = None
    #: The rank that the others wait for longest; None if all keep pace, or the other ranks are not known.
    straggler: Straggler | None = None
    idle_cores: float | None = None  #: Cores of the machine that had nothing to do while steps were timed.
    #: Processor time that this process had, or was ready for, while steps were timed ÷ their time.
    processor_share: float | None = None

    @property
    def data_wait_share(self) -> float | None:
        """Waiting for data."""
        return ratio(part=self.data_wait_sec, whole=self.step_sec)

    @property
    def loads_without_processor(self) -> bool:
        """Whether most of the wait is one for a disk or a network, so that a worker process needs no idle core."""
        if self.facts.loader_workers != 0 or self.processor_share is None:
            return False
        return self.processor_share < (self.data_wait_share or 0.0) / 2

    @property
    def transfer_share(self) -> float | None:
        """Exposed communication that would be left if all ranks came at once: no batch size changes the rest."""
        share = self.shares.get("exposed_communication")
        return None if share is None else max(0.0, share - (self.shares.get("waiting") or 0.0))


def gather_evidence(
    window: WindowRecord,
    *,
    timing: TimingProfile | None,
    batches: float,
    dtypes: Sequence[DtypeFlops],
    times: Mapping[str, ModuleTimes],
    traced: TracedStep | None,
    budget: Budget | None,
) -> Evidence:
    """What *window*, and the figures that were made of it, know that a rule can use."""
    context, processor = window.context, window.processor
    facts = window.facts or _NO_FACTS
    device = device_abilities(
        device_type=context.device_type, name=context.device_name, compute_capability=facts.compute_capability
    )
    on_gpu = context.device_type == "cuda"
    step_sec = None if timing is None else timing.global_step.typical_sec

    def seconds(*phases: TimePhase) -> float | None:
        return None if timing is None else timing.seconds_of(*phases, typical=True)

    in_float32 = sum(one.model for one in dtypes if one.dtype == "float32")  # not TF32
    odd_share, odd_names = _misaligned(window.flops.cells, window.modules, dtypes=device.tensor_core_dtypes)
    evidence = Evidence(
        shares={
            "optimizer": ratio(part=seconds("optimizer"), whole=step_sec),
            "float32": ratio(part=in_float32, whole=sum(one.model for one in dtypes)) if on_gpu else None,
            "misaligned": odd_share,
            "starved": None if processor is None else _starved_share(processor),
            "heat_limited": None if timing is None else timing.heat_limited_share,
        },
        modules={"misaligned": odd_names},
        step_sec=step_sec,
        batches=batches,
        data_wait_sec=seconds("data_wait"),
        compute_share=ratio(part=seconds("forward", "backward"), whole=step_sec),
        device=device,
        facts=facts,
        backend=facts.process_group_backend if on_gpu and context.world_size > 1 and facts.nccl is not False else None,
        idle_cores=None if processor is None else processor.idle_cores,
        processor_share=None if processor is None else _processor_share(processor),
    )
    if traced is None or traced.is_apart or step_sec is None:
        return evidence
    if traced.tables is not None:
        evidence = with_trace(evidence, traced.tables)
    if budget is not None and traced.shows_device:  # a typical step waits less for its host than the traced one
        ns = {key: time_ns or 0 for key, time_ns in budget.rows_ns.items()}
        kernel_ns = ns["model"] + ns["other_flops"] + ns["compute"] + ns["operators"]
        copies_ns = sum(one.copies_ns for one in (traced.filling or {}).values())
        shares = {**evidence.shares, "idle": ratio(part=max(0, ns["idle"] - copies_ns), whole=budget.wall_ns)}
        evidence = replace(evidence, shares=shares, kernel_share=ratio(part=kernel_ns, whole=budget.wall_ns))
    operators: defaultdict[str, set[str]] = defaultdict(set)
    for cell in window.flops.cells:
        if cell.phase == "forward":
            operators[cell.module].add(cell.operator)
    costs: defaultdict[str, list[tuple[float, str]]] = defaultdict(list)
    for one in window.modules:
        ran, kind = operators[one.name], one.type_name.lower()
        drops = "dropout" in kind and not _DROPS.isdisjoint(ran)
        is_whole = any(operator.endswith("_norm") for operator in ran - _DEVIATES)  # a norm of torch's
        norms = "norm" in kind and not _DEVIATES.isdisjoint(ran) and not is_whole
        if one.name in times and (drops or norms):
            spent_sec = times[one.name].own_forward_sec + (times[one.name].own_backward_sec or 0.0)
            costs["dropout" if drops else "norm"].append((-spent_sec, one.name))
    shares = {rule: ratio(part=-math.fsum(sec for sec, _ in of), whole=step_sec) for rule, of in costs.items()}
    modules = {rule: [name for _, name in sorted(of)] for rule, of in costs.items()}
    return replace(evidence, shares={**evidence.shares, **shares}, modules={**evidence.modules, **modules})


def _processor_share(processor: ProcessorLoss) -> float | None:
    had = ratio(part=math.fsum(processor.batches_sec), whole=processor.seconds)
    return None if had is None or processor.waited_share is None else had + processor.waited_share


def _starved_share(processor: ProcessorLoss) -> float | None:
    share = processor.waited_share
    return share if share is not None and (processor.seconds >= _LEAST_SEC or share >= _CHANCE_SHARE) else None


def _misaligned(
    cells: Sequence[OperatorCell], modules: Iterable[ModuleRecord], *, dtypes: Collection[str]
) -> tuple[float | None, tuple[str, ...]]:
    """FLOPs in *dtypes* in modules with a weight dimension that is no multiple of 8 ÷ all; and these modules."""
    odd = {module.name: [size for size in module.weight_sizes if size % _ALIGNMENT_16_BITS] for module in modules}
    by_module: Counter[str] = Counter()
    for cell in cells:
        if cell.flops and cell.dtype in dtypes and odd.get(cell.module):
            by_module[cell.module] += cell.flops
    sizes = {name or "the root": ", ".join(map(str, dict.fromkeys(odd[name]))) for name, _ in by_module.most_common()}
    share = ratio(part=by_module.total() or None, whole=sum(cell.flops for cell in cells))
    return share, tuple(f"{name} ({of})" for name, of in sizes.items())


def with_trace(evidence: Evidence, trace: TraceReport) -> Evidence:
    """*evidence* and what the tables of *trace* show."""
    mean, kernel_share = trace.step_times.mean, evidence.kernel_share
    wall_us = mean.wall_us
    found: dict[str, float | None] = {}
    if trace.overlap is not None:
        found["exposed_communication"] = ratio(part=trace.overlap.exposed_us, whole=trace.overlap.wall_us)
    if mean.kernel_us is not None:
        kernel_share = ratio(part=mean.kernel_us, whole=wall_us)
        # The parts of a step exclude one another, so what no device event and no wait for data fills is idle. The wait
        # is that of the traced step itself: the timed steps' may be another.
        others = (mean.memcpy_us, mean.memset_us, mean.communication_us, mean.data_loader_us)
        busy = ratio(part=mean.kernel_us + sum(part or 0.0 for part in others), whole=wall_us)
        found["idle"] = max(0.0, 1.0 - (busy or 0.0))
    if trace.kernel_summary is not None and trace.kernel_summary.tensor_core_ratio == 0:
        found["tensor_core_eligible"] = trace.kernel_summary.tensor_core_eligible_ratio
    if trace.transfers is not None and trace.device_metrics:
        pageable = [row for row in trace.transfers if "Pageable -> Device" in row.name]
        pageable_us = sum(row.device.total_us for row in pageable if row.device is not None)
        found["pageable_copies"] = ratio(part=pageable_us, whole=wall_us * len(trace.step_times.steps))
    return replace(evidence, shares={**evidence.shares, **found}, kernel_share=kernel_share)
