"""Everything a report says about one window: every count, time and rate, so that renderers only format."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from itertools import chain
from statistics import fmean

from lightning_flops.analysis.advice import advise, starved_words, unexplained_words
from lightning_flops.analysis.counts import (
    FlopCounts,
    build_modules,
    bytes_by_phase,
    flops_by_phase,
    grouped,
    with_those_above,
    with_those_below,
)
from lightning_flops.analysis.devices import device_named
from lightning_flops.analysis.evidence import gather_evidence
from lightning_flops.analysis.lines import build_lines
from lightning_flops.analysis.plan import build_memory_report
from lightning_flops.analysis.rates import (
    COPY,
    at_peaks,
    build_rates,
    measured_peaks,
    peak_for,
    peak_seconds,
    ratio,
    sum_if_all_known,
    utilization,
    whole,
)
from lightning_flops.analysis.timing import build_timing, middle_half, timed_steps
from lightning_flops.config import DTYPE_NAMES, ProfilerConfig
from lightning_flops.records import (
    OUTSIDE,
    REST,
    ROLLOUT,
    SCORING,
    TRAINING,
    BucketFlops,
    FlopRecord,
    ModuleRecord,
    OperatorCell,
    PhaseFlops,
    PhaseSeconds,
    RunContext,
    RunFacts,
    StepRecord,
    StepSignature,
    WindowRecord,
    summed,
)
from lightning_flops.schema.profile import FlopsOf, Origin, Profile, ReportSettings
from lightning_flops.schema.step import DtypeFlops, ModuleTimes, OperatorProfile, PhaseProfile, StepFlops
from lightning_flops.schema.trace import TracedStep
from lightning_flops.units import plural

_OF_MODEL = ("forward", "backward")


def build_profile(
    window: WindowRecord,
    *,
    config: ProfilerConfig,
    traced: TracedStep | None = None,
    times: Mapping[str, ModuleTimes] | None = None,
) -> Profile:
    """Count, divide and look up: the profile of *window*, with its *traced* step, which no sink was given yet.

    *times* of modules stand in for the traced step's, where hooks took them.
    """
    context, counts, cells = window.context, FlopCounts(window.flops), window.flops.cells
    timed, longer, plain = timed_steps(window)
    predicted, flops_of = _predicted(window, timed)
    spent = _spent_by_step(window, predicted)
    flops = _step_flops(spent, forwards=context.trains * (2 + Fraction(config.recompute_fwd_factor)))
    dtypes = _flops_by_dtype(spent)
    timing = build_timing(
        timed,
        mixed_phases=window.mixed_phases,
        trains=context.trains,
        processor=window.processor,
        longer=longer,
        whole=plain,
        unhooked_steps=len(window.unhooked_sec),
    )
    peaks, bandwidth, peaks_from = _device_figures(context, config, dtypes)
    steps = timed or window.counted_steps
    samples, tokens = (
        ratio(part=sum_if_all_known(getattr(step, name) or None for step in steps), whole=len(steps))
        for name in ("samples", "tokens")
    )
    rates, unavailable = build_rates(flops=flops, timing=timing, samples=samples, tokens=tokens, context=context)
    root = next((module for module in window.modules if module.name == ""), None)
    profile = Profile(
        profile_step=window.profile_step,
        report_step=window.profile_step,  # who shows it says when
        context=context,
        settings=ReportSettings(
            module_depth=config.module_depth,
            top_modules=config.top_modules,
            detailed=config.detailed,
            recompute_fwd_factor=float(config.recompute_fwd_factor),
            causal_attention=config.causal_attention,
            peaks_from=peaks_from,
        ),
        set_up=_set_up(window.facts or RunFacts()),
        counted_steps=tuple(step.index for step in window.counted_steps),
        timed_steps=tuple(step.index for step in timed),
        params=getattr(root, "params", None),
        trainable_params=getattr(root, "trainable_params", None),
        local_params=getattr(root, "local_params", None),
        parameter_bytes=dict(getattr(root, "parameter_bytes", {})),
        micro_steps=sum(step.micro_steps for step in window.counted_steps) / max(1, len(window.counted_steps)),
        samples=samples,
        tokens=tokens,
        flops=flops,
        flops_of=flops_of,
        typical_flops_ratio=_typical_ratio(timed, predicted),
        bytes_total=bytes_by_phase(cells),
        dtypes=dtypes,
        peaks_flops_per_sec=peaks,
        phases=_phases(window, timed=timed, peaks=peaks, model_flops=flops.model, tokens=tokens),
        timing=timing,
        memory_bytes_per_sec=bandwidth,
        rates=rates,
        unavailable=unavailable,
        lower_bound=counts.is_lower_bound,
        modules=build_modules(window.modules, counts, times or module_times(traced)),
        outside=counts.own_by_module().get(OUTSIDE, PhaseFlops()),
        operators=_operators(cells),
        uncounted=dict(window.flops.uncounted),
        memory=window.memory,
        tensors=None if window.tensors is None else build_memory_report(window.tensors),
        traced=traced,
        lines=build_lines(window.lines, timing=timing, on_host=context.device_type == "cpu"),
        ranks=None,
        advice=(),
        notes=tuple(dict.fromkeys(_notes(window, timed, predicted=predicted))),
    )
    modules = {
        dtype: FlopCounts(FlopRecord(cells=tuple(of))).by_module()
        for dtype, of in grouped(cells, lambda cell: cell.dtype).items()
    }
    profile = at_peaks(profile, modules)
    evidence, limits = gather_evidence(window, profile), config.thresholds
    return replace(
        profile,
        advice=() if timing is None or timing.few_steps else advise(evidence, limits),
        starved=starved_words(evidence, limits),
        unexplained=unexplained_words(evidence, limits),
    )


def module_times(traced: TracedStep | None) -> dict[str, ModuleTimes]:
    """Times of each module in one step, by qualified name, without rates; empty without a trace of modules."""
    table = traced and traced.tables and traced.tables.modules
    if traced is None or not table:
        return {}
    forward, backward = traced.forward_scale / 1e6, traced.backward_scale / 1e6  # the table has microseconds
    return {
        row.name: ModuleTimes(
            clock=table.clock,
            forward_sec=row.forward_us * forward,
            own_forward_sec=row.own_forward_us * forward,
            # None: the steps have no backward, instead of one of 0 s.
            backward_sec=row.backward_us * backward if table.backward_us else None,
            own_backward_sec=row.own_backward_us * backward if table.backward_us else None,
        )
        for row in table.rows
    }


def build_forward_profile(
    *,
    records: tuple[ModuleRecord, ...],
    flops: FlopRecord,
    own_sec: Mapping[str, float] | None,
    calls: tuple[int, int],
    timed_while_counted: bool,
    calls_sec: tuple[float, ...],
    context: RunContext,
    recompute_fwd_factor: float = 0.0,
    engine_sec: PhaseSeconds | None = None,
    ignored: Collection[str] = (),
) -> Profile:
    """The profile of a model whose modules are *records*; all calls together stand for one step.

    Of these *calls* the outermost ones are numbered, counted and timed: *own_sec* are seconds of each module without
    those below it, None where no clock reads them. *calls_sec* are of calls to which nothing listened, each like all
    counted ones together, whose samples are the *context*'s micro_batch_size. *engine_sec* are those of the backward
    and the optimizer, if an engine knows them. Work of *ignored* modules counts for the module around them.
    """
    notes = []
    if own_sec is None:
        notes.append("Latencies are n/a: this package has no clock for this device, or for these devices together.")
    elif calls[0] != calls[1]:
        own_sec = None
        notes.append(f"Latencies are n/a: {calls[0]} calls of the model were counted and {calls[1]} were timed.")
    elif timed_while_counted:
        notes.append(
            "Latencies were taken while counting, and counting takes time: they are upper bounds, and FLOPS are lower "
            "bounds. get_model_profile() times a forward of its own; in a loop, start_profile(count=False) times the "
            "forwards up to stop_profile() and keeps the counts."
        )
    cells = tuple(
        replace(cell, module=_not_ignored(cell.module, ignored)) for cell in flops.cells if cell.module != OUTSIDE
    )
    step = StepRecord(
        index=0,
        signature=StepSignature(batches=(), forwards=1, backwards=0, updates=0),
        micro_steps=1,
        samples=context.micro_batch_size,
    )
    forward_sec = () if own_sec is None else calls_sec or (math.fsum(own_sec.values()),)
    window = WindowRecord(
        profile_step=0,
        context=context,
        modules=records,
        flops=replace(flops, cells=cells),
        counted_steps=(step,),
        timed_steps=tuple(
            replace(step, seconds=replace(engine_sec or PhaseSeconds(), forward=seconds)) for seconds in forward_sec
        ),
        timing_steps=len(forward_sec),
        notes=tuple(notes),
    )
    names, known = grouped(own_sec or (), lambda name: _not_ignored(name, ignored)), own_sec or {}
    own = {owner: math.fsum(known[name] for name in of) for owner, of in names.items()}
    times = {
        name: ModuleTimes(
            clock="hooks",
            forward_sec=sec,
            own_forward_sec=own.get(name, 0.0),
            backward_sec=None,
            own_backward_sec=None,
        )
        for name, sec in with_those_below(own, 0.0).items()
    }
    profile = build_profile(window, config=ProfilerConfig(recompute_fwd_factor=recompute_fwd_factor), times=times)
    return replace(profile, outside=flops_by_phase(cell for cell in flops.cells if cell.module == OUTSIDE))


def _not_ignored(name: str, ignored: Collection[str]) -> str:
    """The innermost module at or around *name* that is not ignored."""
    return next(above for above in with_those_above(name) if not above or above not in ignored)


def _predicted(window: WindowRecord, timed: Sequence[StepRecord]) -> tuple[list[BucketFlops], FlopsOf]:
    """FLOPs of each of the *timed* steps by the run's formula; none where it lacks one's, or all cost what was counted.

    And whose a step's FLOPs are. What a rollout or a scoring costs goes by more than the batches show.
    """
    found = [one.predicted for one in timed if one.predicted is not None]
    costs = {PhaseFlops(**summed(((phase, amount) for (phase, _), amount in one.items()), 0)) for one in found}
    differ = costs != {one.flops for one in window.counted_steps}
    if not (differ and found and len(found) == len(timed) and window.phases.keys() <= {TRAINING, REST}):
        return [], "counted"
    return found, "estimate" if any(one.is_beyond for one in timed) else "formula"


def _spent_by_step(window: WindowRecord, predicted: Sequence[BucketFlops]) -> dict[tuple[str, str], tuple[int, int]]:
    """FLOPs of one step by phase and dtype, and how many it skips.

    They are the mean of those *predicted* of the model, or of the counted steps; as large a part of each is skipped.
    """
    skipped: dict[tuple[str, str], int] = summed(
        (((cell.phase, cell.dtype), cell.skipped) for cell in window.flops.cells), 0
    )
    counted, found = window.flops.by_bucket(), {}
    for key in dict.fromkeys(chain(counted, *predicted)):
        amounts = [one.get(key, 0) for one in predicted if key[0] != "outside"]
        flops = whole(sum(amounts) if amounts else counted[key], of=len(amounts) or max(1, len(window.counted_steps)))
        found[key] = flops, whole(flops * skipped.get(key, 0), of=counted[key] or 1)
    return found


def _step_flops(spent: Mapping[tuple[str, str], tuple[int, int]], *, forwards: Fraction) -> StepFlops:
    """FLOPs of one step, from those by phase and dtype; its backward is estimated as so many *forwards*."""
    of_step = PhaseFlops(**summed(((phase, amount) for (phase, _), (amount, _) in spent.items()), 0))
    skipped = sum(skipped for _, skipped in spent.values())
    return StepFlops(**asdict(of_step), skipped=skipped, backward_estimated=round(forwards * of_step.forward))


def _typical_ratio(timed: Sequence[StepRecord], predicted: Sequence[BucketFlops]) -> float:
    """FLOPs of a typical one of the *timed* steps by those of their mean; 1 where none are *predicted*."""
    spent = [sum(flops.values()) for flops in predicted]
    middle = middle_half([one.seconds.total for one in timed if one.seconds is not None])
    return fmean(spent[place] for place in middle) / fmean(spent) if any(spent) else 1.0


def _flops_by_dtype(costs: Mapping[tuple[str, str], tuple[int, int]]) -> tuple[DtypeFlops, ...]:
    """FLOPs in each dtype that the model has any in, most first; *costs* are FLOPs, and skipped ones."""
    of_model = [key for key in costs if costs[key][0] and key[0] != "outside"]
    found = (
        DtypeFlops(
            dtype=dtype,
            model=sum(costs[key][0] for key in keys if key[0] in _OF_MODEL),
            hardware=sum(costs[key][0] for key in keys),
            executed=sum(costs[key][0] - costs[key][1] for key in keys),
            executed_model=sum(costs[key][0] - costs[key][1] for key in keys if key[0] in _OF_MODEL),
        )
        for dtype, keys in grouped(of_model, lambda key: key[1]).items()
    )
    return tuple(sorted(found, key=lambda one: (-one.hardware, one.dtype)))


def _operators(cells: Sequence[OperatorCell]) -> tuple[OperatorProfile, ...]:
    """Each operator that ran and has a place in the counts, most FLOPs first."""
    operators = (
        OperatorProfile(
            operator=name,
            calls=sum(cell.calls for cell in group),
            flops=flops_by_phase(group),
            dtypes=tuple(sorted({cell.dtype for cell in group if cell.flops})),
            bytes=sum(cell.bytes_read + cell.bytes_written for cell in group),
        )
        for name, group in grouped(cells, lambda cell: cell.operator).items()
    )
    return tuple(sorted(operators, key=lambda one: (-one.flops.total, one.operator)))


def _phases(
    window: WindowRecord,
    *,
    timed: Sequence[StepRecord],
    peaks: Mapping[str, float],
    model_flops: int,
    tokens: float | None,
) -> dict[str, PhaseProfile]:
    """The phases of *window* by name, which add up to a step of so many *model_flops*; none where all is training.

    *tokens* are those of a step's batches.
    """
    ran = {TRAINING, *window.phases} - {REST}
    if ran == {TRAINING}:
        return {}
    spent_sec = (
        (name if name in ran else REST, spent / len(timed)) for step in timed for name, spent in step.phase_sec.items()
    )
    seconds = defaultdict(float, summed(spent_sec, 0.0))
    steps = max(1, len(window.counted_steps))
    in_order = dict.fromkeys((ROLLOUT, SCORING, TRAINING, *window.phases))
    of_model = {
        name: [(dtype, spent) for (bucket, dtype), spent in of.items() if bucket in _OF_MODEL]
        for name, of in window.phases.items()
    }
    flops = {name: summed(of_model.get(name, ()), 0) for name in (*filter(ran.__contains__, in_order), REST)}
    of_step = {name: whole(sum(spent.values()), of=steps) for name, spent in flops.items()}
    of_step[TRAINING] += model_flops - sum(of_step.values())  # each is rounded
    found = {}
    for name, spent_in in flops.items():
        peak_sec = peak_seconds({dtype: spent / steps for dtype, spent in spent_in.items()}, peaks)
        found[name] = PhaseProfile(
            flops=of_step[name],
            dtype=max(spent_in, key=spent_in.__getitem__, default=None) if of_step[name] else None,
            seconds=seconds[name] if timed else None,
            ratio=ratio(part=seconds[name], whole=sum(seconds.values())),
            mfu=utilization({"mfu": peak_sec}, seconds[name])[0]["mfu"],
        )
    found[TRAINING] = replace(found[TRAINING], tokens=tokens)
    if ROLLOUT in found:
        found[ROLLOUT] = _with_tokens(found[ROLLOUT], window, timed or window.counted_steps)
    return found


def _with_tokens(rollout: PhaseProfile, window: WindowRecord, steps: Sequence[StepRecord]) -> PhaseProfile:
    """The *rollout* with the tokens of *steps*; where nothing of it was counted a server ran: FLOPs are estimated."""
    made = [tokens for one in steps for tokens in one.rollouts]
    if made:
        prompts, completions = (sum(amounts) / len(steps) for amounts in zip(*made, strict=True))
        speed = ratio(part=completions, whole=rollout.seconds)
        rollout = replace(rollout, tokens=prompts + completions, completion_tokens=completions, tokens_per_sec=speed)
    if rollout.flops:
        return rollout
    forward = sum(spent for (bucket, _), spent in window.phases.get(TRAINING, {}).items() if bucket == "forward")
    a_token = ratio(part=forward, whole=sum_if_all_known(one.tokens for one in window.counted_steps))
    flops = None if a_token is None or rollout.tokens is None else round(a_token * rollout.tokens)
    return replace(rollout, flops=flops, estimated=flops is not None, mfu=None)


def _device_figures(
    context: RunContext, config: ProfilerConfig, dtypes: Sequence[DtypeFlops]
) -> tuple[dict[str, float], float | None, Origin]:
    """The device's peaks by dtype and its memory's bandwidth, and whose the peaks are."""
    measured, device = measured_peaks(context.host, context.device_name), device_named(context.device_name)
    peaks = {
        dtype: peak
        for dtype in dict.fromkeys((*DTYPE_NAMES, *(one.dtype for one in dtypes)))
        if (peak := peak_for(context.device_name, dtype, config.peak_flops_per_sec, measured)) is not None
    }
    bandwidth = config.memory_bytes_per_sec or (device and device.memory_bytes_per_sec) or measured.get(COPY)
    otherwise: Origin = "measured" if device is None and measured else "vendor"
    return peaks, bandwidth, otherwise if config.peak_flops_per_sec is None else "given"


def _set_up(facts: RunFacts) -> dict[str, str]:
    ways = [", ".join(filter(None, (one.type_name, one.updates))) for one in facts.optimizers or ()]
    found = {
        "optimizer": "; ".join(dict.fromkeys(ways)) or None,
        "workers": facts.loader_workers,
        "cores": facts.cores,
        "compiled": "seen" if facts.compiled else None,
    }
    return {name: str(value) for name, value in found.items() if value is not None}


def _notes(window: WindowRecord, timed: Sequence[StepRecord], *, predicted: Sequence[BucketFlops]) -> Iterator[str]:
    number, beyond = len(window.counted_steps), sum(one.is_beyond for one in timed)
    those, some = f"the {number} counted {plural('step', number)}", f"{beyond} of them beyond the counted sizes"
    yield from window.notes
    if window.variable:
        yield "Batch shapes or the numbers of forwards, backwards and updates keep changing from step to step."
    # Whose the FLOPs are, where the counted steps are not like the timed ones.
    if predicted:
        by = "by an exact formula of the batch's sizes" + (f", {some}, where it is an estimate" if beyond else "")
        yield (
            f"FLOPs of a step, FLOP/s and MFU are of the {len(timed)} timed steps, {by}. FLOPs of modules and "
            f"operators are of {those}."
        )
    elif window.variable and timed:
        yield f"FLOPs are of {those} and times of {len(timed)} others, so rates compare averages."
    yield from window.flops.notes
    if not window.counted_steps:
        yield "No step was counted to its end: the FLOPs are of everything that ran while the counter was on."
    if wrong := sum(step.seconds is not None for step in window.timed_steps) - len(timed):
        yield f"Left out: {wrong} timed {plural('step', wrong)} with times that cannot be right."
