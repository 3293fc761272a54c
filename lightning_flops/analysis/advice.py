"""What holds a run back, and what to try: one table of rules; docs/advice.md is made of it.

A rule compares one measured number with one limit. Its advice is the fact, the remedy, and the most that the remedy
can save: each "up to", so two pieces of advice may name the same milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from lightning_flops.analysis.devices import DeviceAbilities
from lightning_flops.analysis.evidence import Evidence, with_trace
from lightning_flops.analysis.module_names import pattern_of
from lightning_flops.analysis.rank_names import name_files
from lightning_flops.analysis.rates import ratio
from lightning_flops.analysis.stragglers import straggler_action, straggler_evidence
from lightning_flops.config import AdviceThresholds
from lightning_flops.schema.ranks import RankComparison, RankRow, Straggler
from lightning_flops.schema.step import Advice
from lightning_flops.schema.trace import TraceReport
from lightning_flops.units import duration, percent, plain

ON_COMMUNICATION = ("exposed_communication", "waiting", "straggler")  # rules that the other ranks' answers change
LEAST_WAIT_SEC = 0.001  # a worker process hands a batch over in about a millisecond: no shorter wait is saved by one

_PROFILER, _MATCHER, _OWN = "PyTorch Profiler's recommendations", "torch.profiler's pattern matcher", "this project"
_US_PER_SEC = 1e6
_NAMED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One row of the table. In ``fact`` and ``remedy``, names in braces stand for what ``words`` returns."""

    name: str
    #: What is compared: None where it is not known or the rule does not apply; else the share of the rule's name.
    measured: Callable[[Evidence], float | None] | None = None
    limit: str = ""  #: The field of ``AdviceThresholds`` above which that must be, if not that of the rule's name.
    threshold: str = "more than {limit}"
    fact: str
    remedy: str
    unless: str  #: When not to follow it.
    #: The ceiling: the share of a step that the remedy can save at most; None if that is not known.
    saves: Callable[[Evidence, float], float | None] | None = lambda evidence, measured: measured
    ceiling: str = ""  #: That limit in words, where it is neither the share that was measured nor unknown.
    source: str = _OWN
    words: Callable[[Evidence], Mapping[str, str]] = lambda evidence: {}

    def limit_of(self, limits: AdviceThresholds) -> float | None:
        """What must be exceeded; None where the rule knows no limit."""
        return getattr(limits, self.limit or self.name, None)

    def advice(self, evidence: Evidence, limits: AdviceThresholds) -> Advice | None:
        """What this rule says; None if it says nothing."""
        limit = self.limit_of(limits)
        measured = evidence.shares.get(self.name) if self.measured is None else self.measured(evidence)
        if measured is None or measured <= (-math.inf if limit is None else limit):
            return None
        words = {"measured": percent(measured), "modules": _some(evidence.modules.get(self.name, ()))}
        words |= self.words(evidence)
        saves = self.saves(evidence, measured) if self.saves else None
        return Advice(
            rule=self.name,
            fact=self.fact.format(**words),
            remedy=self.remedy.format(**words),
            ceiling=None if saves is None else min(1.0, saves),
            unless=self.unless,
            threshold=self.threshold.format(limit=percent(limit)),
            source=self.source,
        )


def advise(evidence: Evidence, thresholds: AdviceThresholds, *, known: Iterable[Advice] = ()) -> tuple[Advice, ...]:
    """What to try by *evidence* and what is *known* already, the largest possible saving first."""
    found = [advice for rule in RULES if (advice := rule.advice(evidence, thresholds)) is not None]
    return tuple(sorted((*found, *known), key=lambda one: (one.ceiling is None, -(one.ceiling or 0.0))))


def advise_on_traces(
    traces: Sequence[TraceReport],
    ranks: RankComparison | None,
    *,
    straggler: Straggler | None,
    devices: Sequence[DeviceAbilities],
    thresholds: AdviceThresholds | None = None,
) -> tuple[Advice, ...]:
    """Advice from traces alone, in whose order *ranks* and *devices* are; by each rule for the rank that saves most."""
    limits = AdviceThresholds() if thresholds is None else thresholds
    files = name_files([trace.source for trace in traces])
    rows: Sequence[RankRow | None] = [None] * len(traces) if ranks is None else ranks.ranks
    every: list[Advice] = []
    for trace, file, row, device in zip(traces, files, rows, devices, strict=True):
        mean, waiting = trace.step_times.mean, None
        if row is not None and row.wait_us is not None:
            waiting = ratio(part=min(row.overlap.exposed_us, row.wait_us), whole=row.overlap.wall_us)
        evidence = Evidence(
            step_sec=mean.wall_us / _US_PER_SEC,
            batches=_batches(trace),
            data_wait_sec=None if mean.data_loader_us is None else mean.data_loader_us / _US_PER_SEC,
            shares={"waiting": waiting, "unmatched": float(ranks is not None and bool(ranks.notes))},
            device=device,
        )
        whose = "" if len(traces) == 1 else f"{file}: " if trace.rank is None else f"Rank {trace.rank}: "
        whole = "step" if trace.step_times.marked else "trace"
        for one in advise(with_trace(evidence, trace), limits):
            if straggler is None or one.rule != "waiting":  # the others wait for the straggler
                every.append(replace(one, fact=f"{whose}{one.fact}".replace("he step", f"he {whole}")))
    ordered = advise(Evidence(straggler=straggler), limits, known=every)
    return tuple({one.rule: one for one in reversed(ordered)}.values())[::-1]


def _batches(trace: TraceReport) -> float:
    """Batches in a step, by the calls of the data loader in all of them."""
    calls = next((row.calls for row in trace.phases or () if row.name == "data loader"), 0)
    return max(1.0, calls / len(trace.step_times.steps))


# ---- waiting for data


def _wait_of_batch(evidence: Evidence) -> float:
    return (evidence.data_wait_sec or 0.0) / max(1.0, evidence.batches)


def _share_of_wait(rule: str, evidence: Evidence) -> float | None:
    is_short, is_full = _wait_of_batch(evidence) < LEAST_WAIT_SEC, _more_workers(evidence) == 0
    applies = "data_wait_short" if is_short else "data_wait_full" if is_full else "data_wait"
    return evidence.data_wait_share if rule == applies else None


def _more_workers(evidence: Evidence) -> int | None:
    """Workers to add: as many as keep up and find a core, idle where loading computes; None: cores unknown."""
    cores, now = evidence.facts.cores, evidence.facts.loader_workers or 0
    if cores is None or evidence.step_sec is None:
        return None
    idle = cores - 1 - now if evidence.idle_cores is None else min(evidence.idle_cores, cores - now)
    room = cores if evidence.loads_without_processor else math.floor(idle + 0.5)
    work_sec = max(evidence.step_sec - (evidence.data_wait_sec or 0.0), evidence.step_sec / 100)
    loads_sec = evidence.step_sec * now if now else evidence.data_wait_sec or 0.0
    return max(0, min(room, math.ceil(loads_sec / work_sec) - now))


def _of_loader(evidence: Evidence) -> Mapping[str, str]:
    cores, now, room = evidence.facts.cores, evidence.facts.loader_workers, _more_workers(evidence)
    idle = "" if evidence.idle_cores is None else f", {evidence.idle_cores:.1f} of them idle"
    idle = ", and loading hardly uses them" if evidence.loads_without_processor else idle
    pins = evidence.device.pins_memory and evidence.shares.get("pageable_copies") != 0
    return {
        "wait": duration(_wait_of_batch(evidence)),
        "workers": "" if now is None else f", with {plain(now)} loader workers",
        "cores": "" if cores is None else f"; this process may use {plain(cores)} cores{idle}",
        "more": "Raise the DataLoader's num_workers"
        if room is None
        else f"Set the DataLoader's num_workers={plain((now or 0) + room)}",
        "pin": ", pin_memory=True" if pins else "",
    }


# ---- words of other rules


def _some(names: Sequence[str]) -> str:
    """The first of *names*, repeated layers together: "2 x layers.*.dropout"."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(pattern_of(name), []).append(name)
    words = [f"{len(of)} x {pattern}" if of[1:] else of[0] or "the root" for pattern, of in alike.items()]
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return f"{', '.join(words[:_NAMED])}{more}"


def _of_optimizer(evidence: Evidence) -> Mapping[str, str]:
    single = [one for one in evidence.facts.optimizers or () if one.faster_with]
    ways = [way for way in (single[0].faster_with if single else ()) if all(way in one.faster_with for one in single)]
    return {"names": " and ".join(dict.fromkeys(one.type_name for one in single)), "ways": ", or with ".join(ways)}


def _of_waiting(evidence: Evidence) -> Mapping[str, str]:
    if evidence.shares.get("waiting") is None:
        return {"waits": "with any wait for other ranks, which is not known"}
    known = " as far as it is known" if evidence.shares.get("unmatched") else ""
    return {"waits": f"the wait for other ranks left out{known}"}


def _of_straggler(evidence: Evidence) -> Mapping[str, str]:
    one = evidence.straggler
    return {} if one is None else {"who": straggler_evidence(one), "look": straggler_action(one)}


RULES: tuple[Rule, ...] = (
    *(
        Rule(
            name=name,
            measured=partial(_share_of_wait, name),
            limit="data_wait",
            words=_of_loader,
            fact="The step waits {wait} a batch for data ({measured}){workers}{cores}.",
            remedy=remedy,
            unless=unless,
            source=_PROFILER if name == "data_wait" else _OWN,
        )
        for name, remedy, unless in (
            (
                "data_wait",
                "{more}, with persistent_workers=True{pin}.",
                "where the wait is for a disk or a network that is at its limit",
            ),
            (
                "data_wait_full",
                "No core is idle for more workers: prepare once, before training, what is made anew for each sample "
                "(decoded, resized, tokenized), or load fewer bytes.",
                "where each epoch needs other random changes of a sample",
            ),
            (
                "data_wait_short",
                "Workers would cost more than such a wait. Take a whole batch from the data at once: give the Dataset "
                "__getitems__(indices), which returns data[indices], and the DataLoader collate_fn=lambda batch: "
                "batch.",
                "where samples differ in shape",
            ),
        )
    ),
    Rule(
        name="padding",
        measured=lambda one: one.facts.padding_ratio,
        fact="Padding is {measured} of the tokens that are processed.",
        remedy="Put samples of similar lengths into a batch (transformers: train_sampling_strategy='group_by_length', "
        "before version 5 group_by_length=True), pad to the longest of the batch alone, or pack several samples into "
        "one sequence.",
        unless="where the order of the samples must stay random",
        saves=lambda one, measured: None if one.compute_share is None else measured * one.compute_share,
        ceiling="that share of forward and backward; of attention, whose work grows with the square, more",
    ),
    Rule(
        name="exposed_communication",
        measured=lambda one: one.transfer_share,
        words=_of_waiting,
        fact="Communication that no computation hides takes {measured} of the step, {waits}.",
        # Sharded gradients (ZeRO-2 and -3, FSDP) are reduced in every micro-step: accumulation saves nothing there.
        remedy="Raise the batch size, or, where gradients are reduced once a step (DDP, ZeRO-0 and -1), accumulate "
        "them over more batches; let communication begin earlier (DDP: a smaller bucket_cap_mb; DeepSpeed: "
        "overlap_comm, reduce_bucket_size, stage3_prefetch_bucket_size).",
        unless="where a larger batch changes how the model learns",
        source=_PROFILER,
    ),
    Rule(
        name="waiting",
        measured=lambda one: one.shares.get("waiting") if one.straggler is None else None,
        fact="Waiting for other ranks takes {measured} of the traced step, and none of them is late enough to be a "
        "straggler.",
        remedy="Even out what ranks do in a step: lengths of samples, sizes of batches, what else runs on their hosts.",
        unless="where another rank is late in each step for a reason outside of the program",
    ),
    Rule(
        name="straggler",
        measured=lambda one: None if one.straggler is None else math.inf,
        threshold="more than {limit} of the other ranks' own time, and longer by more than straggler_sec",
        words=_of_straggler,
        fact="{who}",
        remedy="{look}",
        unless="where that rank does what the others do not, such as saving a checkpoint in each step",
        saves=lambda one, _: None if one.straggler is None else one.straggler.share,
        ceiling="what the others wait for it",
    ),
    Rule(
        name="backend",
        measured=lambda one: None if one.backend in (None, "nccl", "rccl") else math.inf,
        threshold="any backend but NCCL",
        words=lambda one: {"backend": str(one.backend)},
        fact="Gradients on GPUs are synchronized through {backend}.",
        remedy='Initialize the process group with backend="nccl".',
        unless="where NCCL does not run",
        saves=lambda one, _: one.transfer_share,
        ceiling="exposed communication",
        source=_PROFILER,
    ),
    Rule(
        name="data_parallel",
        measured=lambda one: math.inf if one.facts.data_parallel_devices > 1 else None,
        threshold="DataParallel over several GPUs",
        fact="torch.nn.DataParallel spreads the batch over several GPUs from one process.",
        remedy="Use DistributedDataParallel, with a process for each GPU.",
        unless="where the program cannot run as several processes",
        saves=None,
        source=_PROFILER,
    ),
    Rule(
        name="optimizer",
        measured=lambda one: one.shares.get("optimizer") if _of_optimizer(one)["ways"] else None,
        words=_of_optimizer,
        fact="{names} updates one tensor at a time and takes {measured} of the step.",
        remedy="Construct it with {ways}.",
        unless="where its results must stay the same to the last bit",
        source=_MATCHER,
    ),
    Rule(
        name="norm",
        fact="Norms that are written out in Python take {measured} of the step: {modules}.",
        remedy="Take torch's own, which are one operator: nn.LayerNorm, nn.RMSNorm, nn.BatchNorm.",
        unless="where torch has none that computes the same",
    ),
    Rule(
        name="dropout",
        fact="Dropout takes {measured} of the step: {modules}.",
        remedy="Set its p to 0.",
        unless="where the model overfits without it",
    ),
    Rule(
        name="starved",
        fact="For {measured} of the timed steps' time this process was ready to run and waited for a processor.",
        remedy="Give it cores of its own, or fewer threads and workers, and profile again: all times, rates and shares "
        "here are those of a starved run.",
        unless="where the run will always share its cores",
    ),
    Rule(
        name="idle",
        fact="The device is idle for {measured} of the step, not counting the wait for data.",
        remedy="Raise the batch size, and take .item(), print and other synchronizations out of the step.",
        unless="where memory is full, or a larger batch changes how the model learns",
        source="Holistic Trace Analysis",
    ),
    Rule(
        name="tensor_core_eligible",
        measured=lambda one: one.shares.get("tensor_core_eligible") if one.device.tensor_core_dtypes else None,
        words=lambda one: {"dtype": one.device.tensor_core_dtypes[0]},
        fact="No kernel runs on tensor cores, but {measured} of the kernel time could.",
        remedy="Train with automatic mixed precision in {dtype}.",
        unless="where the model needs more digits",
        saves=lambda one, measured: None if one.kernel_share is None else measured * one.kernel_share,
        ceiling="that share of the kernels",
        source=_PROFILER,
    ),
    Rule(
        name="float32",
        measured=lambda one: one.shares.get("float32") if one.device.tf32 else None,
        fact="{measured} of the model FLOPs are float32, with TF32 off.",
        remedy='Call torch.set_float32_matmul_precision("high").',
        unless="where the model needs more digits",
        saves=None,
        source=_MATCHER,
    ),
    Rule(
        name="misaligned",
        fact="{measured} of the FLOPs are 16-bit products with a dimension that is not a multiple of 8: {modules}.",
        remedy="Pad the dimension (vocabulary, hidden size) to a multiple of 8.",
        unless="where a checkpoint fixes it",
        saves=None,
        source="NVIDIA's matrix multiplication guide",
    ),
    Rule(
        name="pageable_copies",
        fact="Copies from pageable host memory to the device take {measured} of the step.",
        remedy="Set the DataLoader's pin_memory, and copy with non_blocking=True.",
        unless="where host memory is short",
    ),
    Rule(
        name="heat_limited",
        fact="While steps were timed, heat held the GPU's clock down for {measured} of the time.",
        remedy="Look after its cooling, or what else heats its host.",
        unless="where that is the speed that the GPU has for such work",
        saves=None,
        source="NVML",
    ),
)
"""Every rule, in the order of docs/advice.md."""
