"""What the rules of advice look at, collected from a window and its traced steps, or from traces alone.

Every field of ``Evidence`` is None where it was not measured, and a rule whose evidence is None says nothing.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from lightning_flops.analysis.counts import FlopCounts, grouped, parent_name, with_those_above
from lightning_flops.analysis.devices import DeviceAbilities, device_abilities
from lightning_flops.analysis.lines import Cause, between, causes
from lightning_flops.analysis.rates import ratio
from lightning_flops.analysis.timing import timed_steps
from lightning_flops.records import (
    ROLLOUT,
    SCORING,
    ModuleRecord,
    OperatorCell,
    RunContext,
    RunFacts,
    WindowRecord,
    summed,
)
from lightning_flops.schema.plan import MemoryReport
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.step import Budget, LineProfile, LinesProfile, ModuleTimes, PhaseProfile, TimingProfile
from lightning_flops.schema.trace import Straggler, TracedStep, TraceReport

_ALIGNMENT_16_BITS = 8  # elements: tensor cores take 16-bit matrices in pieces of 16 bytes
_LEAST_SEC, _CHANCE_SHARE = 1.0, 0.25  # of steps that took less, a process that wakes up may have such a share

_DROPS = frozenset(("aten.bernoulli_", "aten.native_dropout"))
# Operators of which a norm that is written out in Python has one.
_DEVIATES = frozenset(("aten.rsqrt", "aten.sqrt", "aten.std", "aten.var", "aten.var_mean", "aten.linalg_vector_norm"))
_SAFE_SOFTMAX = "aten._safe_softmax"  # that of scaled_dot_product_attention where it falls back on separate products
_ATTENTION = "attention", "attention_dropout"
_SOFTMAX = frozenset(("aten._softmax", _SAFE_SOFTMAX, "aten.exp"))
_MANY_CALLS, _SHORT_CALL_SEC = 16, 0.002  # a module that a batch calls so often, each time for less
_MANY_OPERATORS = 64  # in one call of a module, without those of modules inside it: a loop of Python runs them
_LEAST_OF_COMPUTE = 0.15  # a line of the user's around the model, where the model computes, is named above this share
DATA_WAIT = "data wait"  # the part's name for people
_NO_LINES = LinesProfile(steps=0, rows=())  # of no loop
_TRAINERS = ("lightning.pytorch", "pytorch_lightning", "transformers")  # frameworks that run the loop themselves
# What is left of a wait whose dataset hands over whole batches, at least and at most: a sampler and an iterator, and a
# framework's fetcher. ``python -m benchmarks.loading``: 0.02 to 0.04 ms, with Lightning and transformers 0.18 to 0.39.
FETCH_SEC, FRAMEWORK_FETCH_SEC = (0.00002, 0.00005), (0.00018, 0.0004)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What the rules look at. Shares are of a typical step if nothing else is said; None is not measured."""

    #: What rules compare with their limits, by the names of the rules.
    shares: Mapping[str, float | None] = field(default_factory=dict)
    #: Modules that rules are about, by the names of the rules; the one that takes longest first.
    modules: Mapping[str, Sequence[str]] = field(default_factory=dict)
    step_sec: float | None = None
    batches: float = 1.0  #: Batches in a step.
    whose_loop: str = "the loop itself"  #: What runs between the parts of a step.
    fetch_sec: tuple[float, float] = FETCH_SEC  #: Of the wait for a batch, what is left at least and at most.
    compute_share: float | None = None  #: Forward and backward.
    #: In a loop of the user's on a CPU, what lies between the parts and is no line of it.
    between_share: float = 0.0
    kernel_share: float | None = None  #: Kernels that compute.
    device: DeviceAbilities = field(default_factory=DeviceAbilities)
    facts: RunFacts = field(default_factory=RunFacts)  #: How the run is set up.
    #: Of the process group that synchronizes gradients of modules on GPUs, where that could be NCCL.
    backend: str | None = None
    on_gpu: bool = False
    runs_alone: bool = False  #: Whether nothing that a step may wait for runs beside the training thread.
    parts: Mapping[str, float] = field(default_factory=dict)  #: Each part of the step, by its name for people.
    peaks: Mapping[str, float] = field(default_factory=dict)  #: FLOP/s of the device by dtype.
    matmul_share: float | None = None  #: Operators that multiply matrices.
    calls: Mapping[str, float] = field(default_factory=dict)  #: Of each module in a batch.
    samples: float | None = None  #: Of this rank in a step.
    types: Mapping[str, str] = field(default_factory=dict)  #: The class of each module.
    reads_a_step: float = 0.0  #: How often a number is read from a tensor, as by ``.item()``.
    forwards_a_batch: float | None = None  #: Of the model.
    #: The user's lines that rules are about, by the names of the rules; the most time first.
    causes: Mapping[str, Sequence[Cause]] = field(default_factory=dict)
    rows: Mapping[str, Sequence[LineProfile]] = field(default_factory=dict)  #: All of the user's lines by part.
    #: The rank that the others wait for longest; None if all keep pace, or the other ranks are not known.
    straggler: Straggler | None = None
    tensors: MemoryReport | None = None  #: What tensors held in the counted step.
    phases: Mapping[str, PhaseProfile] = field(default_factory=dict)  #: Of a step that has some beside training.
    idle_cores: float | None = None  #: Cores of the machine that had nothing to do while steps were timed.
    #: Processor time that this process had, or was ready for, while steps were timed ÷ their time; unknown: infinite.
    processor_share: float = math.inf

    @property
    def forward_rows(self) -> list[LineProfile]:
        """The user's lines in the forward, the most time first."""
        return [row for part, rows in self.rows.items() if "forward" in part for row in rows]

    def lines_of(self, *modules: str) -> list[LineProfile]:
        """The user's lines in the forward that stand in the classes of these *modules*, the most time first."""
        types = {self.types.get(one) for one in modules}
        return [row for row in self.forward_rows if row.function.rpartition(".")[0].rpartition(".")[2] in types]

    @property
    def data_wait_share(self) -> float:
        """Waiting for data; 0 where that is not known."""
        return self.parts.get(DATA_WAIT, 0.0)

    @property
    def loads_without_processor(self) -> bool:
        """Whether most of the wait is one for a disk or a network, so that a worker process needs no idle core."""
        return self.facts.loader_workers == 0 and self.processor_share < self.data_wait_share / 2

    @property
    def transfer_share(self) -> float | None:
        """Exposed communication that would be left if all ranks came at once: no batch size changes the rest."""
        share = self.shares.get("exposed_communication")
        return None if share is None else max(0.0, share - (self.shares.get("waiting") or 0.0))


def gather_evidence(window: WindowRecord, profile: Profile) -> Evidence:
    """What *window*, and the *profile* that was made of it, know that a rule can use."""
    timed = timed_steps(window)[0]
    evidence = _of_run(window, profile.timing, batches=sum(step.micro_steps for step in timed) / max(1, len(timed)))
    evidence = _of_counts(evidence, window, profile)
    evidence = _of_lines(evidence, profile.lines or _NO_LINES, window.context)
    traced = profile.traced
    if traced is None or traced.is_apart or evidence.step_sec is None:
        return _of_modules(evidence, window, {})
    if traced.tables is not None:
        evidence = with_trace(evidence, traced.tables)
    if profile.budget is not None and traced.shows_device:  # a typical step waits less for its host than the traced one
        evidence = _of_breakdown(evidence, profile.budget, traced)
    return _of_modules(evidence, window, {one.name: one.times for one in profile.modules if one.times is not None})


def _of_run(window: WindowRecord, timing: TimingProfile | None, *, batches: float) -> Evidence:
    """How the run is set up, and how long the parts of its steps are."""
    context, processor, facts = window.context, window.processor, window.facts or RunFacts()
    shares, times = dict[str, float | None](), dict[str, Any]()
    if processor is not None and processor.waited_share is not None:
        waited, had = processor.waited_share, ratio(part=math.fsum(processor.batches_sec), whole=processor.seconds)
        shares["starved"] = waited if processor.seconds >= _LEAST_SEC or waited >= _CHANCE_SHARE else None
        times["processor_share"] = math.inf if had is None else had + waited
    if timing is not None:
        step_sec = timing.global_step.typical_sec
        parts = {part.name: ratio(part=part.typical_sec, whole=step_sec) or 0.0 for part in timing.parts}
        times |= {
            "step_sec": step_sec,
            "parts": parts,
            "compute_share": ratio(part=timing.seconds_of("forward", "backward", typical=True), whole=step_sec),
        }
        shares |= {"optimizer": parts.get("optimizer"), "heat_limited": timing.heat_limited_share}
    on_several = context.device_type == "cuda" and context.world_size > 1 and facts.nccl is not False
    return Evidence(
        shares=shares,
        batches=batches,
        whose_loop=context.whose_loop,
        fetch_sec=FETCH_SEC if context.framework in ("torch", "deepspeed") else FRAMEWORK_FETCH_SEC,
        on_gpu=context.device_type == "cuda",
        runs_alone=context.device_type == "cpu" and context.world_size == 1 and facts.loader_workers == 0,
        device=device_abilities(
            device_type=context.device_type, name=context.device_name, compute_capability=facts.compute_capability
        ),
        facts=facts,
        backend=facts.process_group_backend if on_several else None,
        idle_cores=None if processor is None else processor.idle_cores,
        **times,
    )


def _of_counts(evidence: Evidence, window: WindowRecord, profile: Profile) -> Evidence:
    """What the counts of FLOPs and calls show."""
    cells, whole = window.flops.cells, sum(one.model for one in profile.dtypes)
    of_dtype = {one.dtype: ratio(part=one.model, whole=whole) for one in profile.dtypes}
    odd_share, odd_names = _misaligned(cells, window.modules, dtypes=evidence.device.tensor_core_dtypes)
    again = sum(one.flops for one in cells if one.phase == "recompute" and "attention" not in one.operator)
    reads = sum(one.calls for one in cells if one.operator == "aten._local_scalar_dense")
    first = next(iter(window.counted_steps), None)
    steps = max(1, len(window.counted_steps))
    trained = {above for cell in cells if cell.phase == "backward" for above in with_those_above(cell.module)}
    is_trained = {name in trained for name in window.flops.asked} == {True}
    shares = {
        # Beside a rollout the model that trains is asked as the old policy, or as its own reference.
        "metric_forward": profile.phases[SCORING].ratio
        if is_trained and SCORING in profile.phases and ROLLOUT not in profile.phases
        else None,
        "float32": of_dtype.get("float32", 0.0) if evidence.on_gpu else None,
        "tf32": of_dtype.get("tf32") if evidence.on_gpu else None,
        "float64": _product(of_dtype.get("float64"), evidence.compute_share),
        "misaligned": odd_share,
        "recompute": _product(
            ratio(part=again, whole=sum(one.flops for one in cells if one.phase != "outside")), evidence.compute_share
        ),
    }
    return replace(
        evidence,
        shares={**evidence.shares, **shares},
        modules={**evidence.modules, "misaligned": odd_names},
        peaks=profile.peaks_flops_per_sec,
        tensors=profile.tensors,
        samples=profile.samples,
        phases=profile.phases,
        types={one.name: one.type_name for one in window.modules},
        calls={name: number / steps / max(1.0, evidence.batches) for name, number in window.flops.module_calls.items()},
        reads_a_step=reads / steps,
        forwards_a_batch=None if first is None else first.signature.forwards / max(1, first.micro_steps),
    )


def _of_lines(evidence: Evidence, lines: LinesProfile, context: RunContext) -> Evidence:
    """Which of the user's lines take time, in the parts of a step and inside of modules."""
    of_model = {part for part in evidence.parts if "forward" in part or "backward" in part}

    def is_around(row: LineProfile) -> bool:
        # A hook's work is not the model's, though its part is joined to the forward where it has FLOPs.
        is_apart = row.in_pieces or row.part not in of_model or (bool(row.hook) and "other" in row.part)
        return not row.in_module and row.part != DATA_WAIT and is_apart

    around = [one for one in causes(lines, is_around) if one.part not in of_model or one.share > _LEAST_OF_COMPUTE]
    found = {
        "line": around,
        "line_in_module": causes(lines, lambda row: row.in_module and row.in_pieces and row.part in of_model),
        DATA_WAIT: causes(lines, lambda row: row.part == DATA_WAIT),
        "host_wait": causes(  # a line of the loop that launches the model waits only where that takes long
            lines, lambda row: not row.in_pieces and (row.is_long or row.in_module or row.part not in of_model)
        ),
    }
    own_loop = context.device_type == "cpu" and context.framework not in _TRAINERS and lines is not _NO_LINES
    return replace(
        evidence,
        shares={**evidence.shares, "line": around[0].share if around else None},
        causes=found,
        rows=grouped((row for row in lines.rows if row.file), attrgetter("part")),
        # There the host frees what the model made. No sample separates that from the work of a framework's loop.
        between_share=between(evidence.parts, lines.rows) if own_loop else 0.0,
    )


def _of_breakdown(evidence: Evidence, budget: Budget, traced: TracedStep) -> Evidence:
    """What fills a typical step on a device."""
    ns = {key: time_ns or 0 for key, time_ns in budget.rows_ns.items()}
    matmul_ns = ns["model"] + ns["other_flops"] + ns["compute"]
    copies_ns = sum(one.copies_ns for one in (traced.filling or {}).values())
    return replace(
        evidence,
        shares={
            **evidence.shares,
            "idle": ratio(part=max(0, ns["idle"] - copies_ns), whole=budget.wall_ns),
            "other_operators": ratio(part=ns["operators"], whole=budget.wall_ns),
        },
        kernel_share=ratio(part=matmul_ns + ns["operators"], whole=budget.wall_ns),
        matmul_share=ratio(part=matmul_ns, whole=budget.wall_ns),
    )


# ---- modules: by rule, the seconds of each that the rule is about


def _of_modules(evidence: Evidence, window: WindowRecord, times: Mapping[str, ModuleTimes]) -> Evidence:
    """Which modules do what a remedy is known for, and what they take in a step; without *times*, loops of Python's."""
    cells, by_rule = grouped(window.flops.cells, attrgetter("module")), defaultdict[str, dict[str, float]](dict)
    calls, steps = window.flops.module_calls, max(1, len(window.counted_steps))
    for module in window.modules:
        of, number = cells.get(module.name, ()), calls.get(module.name, 0)
        for rule, part in _about(module, of, steps=steps, calls=number, on_gpu=evidence.on_gpu):
            if module.name in times or rule == "loop":
                by_rule[rule][module.name] = part * _own_sec(times.get(module.name))
    loop_share = _share_of_loop(evidence, by_rule.pop("loop", {}), times)
    by_rule |= {"calls": _repeated(window, times, evidence), "unused_forward": _unused(window, times)}
    found = {rule: of for rule, of in by_rule.items() if of}
    shares = {rule: ratio(part=math.fsum(of.values()), whole=evidence.step_sec) for rule, of in found.items()}
    modules = {rule: sorted(of, key=lambda name, of=of: -of[name]) for rule, of in found.items()}  # type: ignore[misc]
    left, parts = None, evidence.parts.items()
    if loop_share is not None and not times:
        # Its lines are those of the forward: of the backward as much is the loop's, and at most all.
        forward, backward = (math.fsum(of for part, of in parts if word in part) for word in ("forward", "backward"))
        of_both = loop_share * (1.0 + (ratio(part=backward, whole=forward) or 0.0))
        left, loop_share = loop_share + backward + evidence.between_share - of_both, of_both
    return replace(
        evidence,
        shares={**evidence.shares, **shares, "line_in_module": loop_share, "behind_the_loop": left},
        modules={**evidence.modules, **modules},
    )


def _about(
    module: ModuleRecord, cells: Sequence[OperatorCell], *, steps: int, calls: int, on_gpu: bool
) -> Iterator[tuple[str, float]]:
    """The rules that a module with so many *calls* is about, by its class and what ran in it; and of its time what."""
    products = summed(((one.dtype, one.flops) for one in cells), 0)
    if products.get("float64"):
        yield "float64", 1.0
    ran = summed(((one.operator, one.calls) for one in cells if one.phase == "forward"), 0)
    if sum(ran.values()) >= _MANY_OPERATORS * calls > 0:
        yield "loop", 1.0
    # What multiplies is more than its name says: attention with dropout, a layer that scales its weights.
    name = "" if any(products.values()) else module.type_name.lower()
    if "dropout" in name and not _DROPS.isdisjoint(ran):
        yield "dropout", 1.0
    elif (  # unless there is one of torch's own
        "norm" in name
        and not _DEVIATES.isdisjoint(ran)
        and not any(one.endswith("_norm") for one in ran.keys() - _DEVIATES)
    ):
        yield "norm", 1.0
        yield "norm_left", min(1.0, calls / sum(ran.values()))  # one operator in the place of these
    # A softmax, or what one is written with, and two products of batches of matrices: scores, and what they weigh.
    elif ran.get("aten.bmm", 0) + ran.get("aten.baddbmm", 0) >= 2 * steps and not _SOFTMAX.isdisjoint(ran):
        # On a GPU dropout is no reason to fall back.
        yield _ATTENTION[_SAFE_SOFTMAX in ran and not _DROPS.isdisjoint(ran) and not on_gpu], 1.0


def _outermost(names: Set[str]) -> list[str]:
    """Of modules inside one another the outermost."""
    return [one for one in names if not one or names.isdisjoint(with_those_above(parent_name(one)))]


def _repeated(window: WindowRecord, times: Mapping[str, ModuleTimes], evidence: Evidence) -> dict[str, float]:
    """Modules with products that one batch calls many times, each time for a moment.

    What the module around does by itself at the line that calls them, such as to take each input out of all, goes with
    them, and of what is done outside of all modules, such as adding up gradients call by call, their share.
    """
    # Calls for one token after the other need the one before, and so do those of the closures that LBFGS runs.
    if ROLLOUT in evidence.phases or "LBFGS" in {one.type_name for one in evidence.facts.optimizers or ()}:
        return {}
    computes = {name for name, of in FlopCounts(window.flops).by_module().items() if of.total}
    found, spent = dict[str, float](), {name: _all_sec(one) for name, one in times.items()}
    # Where tracing so many calls took too long for times of modules, the root's are all that the model computes in.
    for name, seconds in (spent or {"": _product(evidence.compute_share, evidence.step_sec) or 0.0}).items():
        calls = evidence.calls.get(name, 0.0)
        if name in computes and calls >= _MANY_CALLS and seconds < _SHORT_CALL_SEC * calls * evidence.batches:
            found[name] = seconds
    names, factor = _outermost(found.keys()), _around_modules(times, evidence)
    for parent, called in grouped(filter(None, names), parent_name).items():
        for name in called:
            found[name] += _loop_sec(parent, called, times, evidence) / len(called)
    return {name: factor * found[name] for name in names}


def _loop_sec(parent: str, called: Sequence[str], times: Mapping[str, ModuleTimes], evidence: Evidence) -> float:
    """What the module *parent* takes by itself at the line that calls the modules *called* many times; else 0."""
    around, calls = times.get(parent), min(evidence.calls[name] for name in called)
    if around is None or calls < _MANY_CALLS * evidence.calls.get(parent, math.inf):
        return 0.0
    beside = [row.share or 0.0 for row in evidence.lines_of(parent) if row.in_module]
    at_line = (ratio(part=beside[0], whole=sum(beside)) or 0.0) if beside else 1.0  # else all is the loop's
    # A line has the time of the modules that it calls, but for those that the user has written: these have own lines.
    line_sec = at_line * around.forward_sec - sum(times[name].forward_sec for name in called)
    share = ratio(part=max(line_sec, at_line * around.own_forward_sec), whole=around.own_forward_sec)
    return min(1.0, share or 0.0) * _own_sec(around)


def _around_modules(times: Mapping[str, ModuleTimes], evidence: Evidence) -> float:
    """How many times as long as its modules a step is without its other work: data, optimizer, lines of the user's."""
    inside = _all_sec(times.get(""))
    compute_sec = ((evidence.compute_share or 0.0) + evidence.between_share) * (evidence.step_sec or 0.0)
    return max(1.0, compute_sec / inside) if inside else 1.0


def _share_of_loop(
    evidence: Evidence, loops_sec: Mapping[str, float], times: Mapping[str, ModuleTimes]
) -> float | None:
    """The share of the loop of Python that takes most: of what its modules take by themselves, as its lines have it."""
    found = evidence.causes["line_in_module"]
    if loops_sec and found and not times and not evidence.on_gpu:
        return found[0].share  # tracing thousands of short operations took too long, so that only its lines are known
    functions = {cause.rows[0].function for cause in found}
    rows = [row for of in evidence.rows.values() for row in of if row.in_module and row.function in functions]
    whole = sum(row.share or 0.0 for row in rows if not row.only_enters)
    part = ratio(part=found[0].share if found else None, whole=whole)
    own = ratio(part=math.fsum(loops_sec.values()) or None, whole=evidence.step_sec)
    return _product(own, _product(part, _around_modules(times, evidence)))


def _own_sec(times: ModuleTimes | None) -> float:
    return 0.0 if times is None else times.own_forward_sec + (times.own_backward_sec or 0.0)


def _all_sec(times: ModuleTimes | None) -> float:
    return 0.0 if times is None else times.forward_sec + (times.backward_sec or 0.0)


def _unused(window: WindowRecord, times: Mapping[str, ModuleTimes]) -> dict[str, float]:
    """Modules of whose forwards with gradients a backward used some and not all."""
    calls = window.flops.module_calls
    some = {
        name: number / calls[name]
        for name, number in window.flops.unused_calls.items()
        if name in times and number < calls.get(name, 0)
    }
    return {name: times[name].forward_sec * some[name] for name in _outermost(some.keys())}


def _product(share: float | None, of: float | None) -> float | None:
    return None if share is None or of is None else share * of


def _misaligned(
    cells: Sequence[OperatorCell], modules: Iterable[ModuleRecord], *, dtypes: Collection[str]
) -> tuple[float | None, tuple[str, ...]]:
    """FLOPs in *dtypes* in modules with a weight dimension that is no multiple of 8 ÷ all; and these modules."""
    odd = {module.name: [size for size in module.weight_sizes if size % _ALIGNMENT_16_BITS] for module in modules}
    of_odd = [one for one in cells if one.flops and one.dtype in dtypes and odd.get(one.module)]
    by_module = Counter(summed(((one.module, one.flops) for one in of_odd), 0))
    sizes = {name: ", ".join(map(str, dict.fromkeys(odd[name]))) for name, _ in by_module.most_common()}
    named = tuple(f"{name or 'the root'} ({of})" for name, of in sizes.items())
    return ratio(part=by_module.total() or None, whole=sum(cell.flops for cell in cells)), named


def with_trace(evidence: Evidence, trace: TraceReport) -> Evidence:
    """*evidence* and what the tables of *trace* show."""
    mean, kernels, overlap = trace.step_times.mean, trace.kernel_summary, trace.overlap
    # The parts of a step exclude one another, so what no device event and no wait for data fills is idle. The wait is
    # that of the traced step itself: the timed steps' may be another.
    parts = (mean.kernel_us, mean.memcpy_us, mean.memset_us, mean.communication_us, mean.data_loader_us)
    busy = ratio(part=sum(part or 0.0 for part in parts), whole=mean.wall_us)
    pageable = [row.device for row in trace.transfers or () if "Pageable -> Device" in row.name]
    pageable_us = sum(device.total_us for device in pageable if device is not None)
    found = {
        "exposed_communication": None if overlap is None else ratio(part=overlap.exposed_us, whole=overlap.wall_us),
        "idle": None if mean.kernel_us is None or busy is None else max(0.0, 1.0 - busy),
        "short_kernels": None if kernels is None else kernels.short_calls_ratio,
        "tensor_core_eligible": kernels.tensor_core_eligible_ratio
        if kernels is not None and kernels.tensor_core_ratio == 0
        else None,
        "pageable_copies": None
        if trace.transfers is None or not trace.device_metrics
        else ratio(part=pageable_us, whole=mean.wall_us * len(trace.step_times.steps)),
    }
    kernel_share = ratio(part=mean.kernel_us, whole=mean.wall_us)
    return replace(
        evidence,
        shares={**evidence.shares, **found},
        kernel_share=evidence.kernel_share if kernel_share is None else kernel_share,
    )


def of_optimizer(evidence: Evidence) -> Mapping[str, str]:
    """Which arguments make the optimizers faster; none where one of them has none, as the time is that of all."""
    every = evidence.facts.optimizers or ()
    ways = [way for way in (every[0].faster_with if every else ()) if all(way in one.faster_with for one in every)]
    in_groups = any(one.updates == "foreach" for one in every)
    how = "each group of tensors in several kernels" if in_groups else "one tensor at a time"
    names = [*dict.fromkeys(one.type_name for one in every)]
    return {
        "names": " and ".join(names),
        "ways": ", or with ".join(ways),
        "does": f"updates {how} and takes" if len(names) == 1 else f"update {how} and take",
    }
