"""Everything a report says about one window: every count, time and rate, so that renderers only format.

``build_profile`` makes a ``Profile`` of what was measured; ``Profile.to_json`` and ``Profile.from_json`` keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_flops.analysis.advice import advise
from lightning_flops.analysis.budget import build_budget, own_seconds, seconds_at_peak
from lightning_flops.analysis.devices import device_named, memory_bytes_per_sec
from lightning_flops.analysis.energy import build_energy
from lightning_flops.analysis.evidence import gather_evidence
from lightning_flops.analysis.flop_counts import FlopCounts, bytes_by_phase
from lightning_flops.analysis.flop_tables import flops_by_dtype, flops_by_operator, mean_flops, total_flops
from lightning_flops.analysis.impossible import possible_operators, possible_times
from lightning_flops.analysis.measured_peaks import COPY, measured_peaks
from lightning_flops.analysis.module_tree import build_modules
from lightning_flops.analysis.peak_flops import peak_for
from lightning_flops.analysis.rates import mean, per_second
from lightning_flops.analysis.roofline import Roof, module_rooflines, operator_rooflines
from lightning_flops.analysis.step_rates import build_rates
from lightning_flops.analysis.timing import build_timing, is_timed
from lightning_flops.analysis.traced_step import module_times
from lightning_flops.config import DTYPE_NAMES, ProfilerConfig
from lightning_flops.records import OUTSIDE, ModuleRecord, OperatorCell, PhaseFlops, WindowRecord
from lightning_flops.schema.modules import ModuleTimes
from lightning_flops.schema.profile import SCHEMA_VERSION, Profile, ReportSettings
from lightning_flops.schema.trace import TracedStep
from lightning_flops.units import plural


def build_profile(window: WindowRecord, *, config: ProfilerConfig, traced: TracedStep | None = None) -> Profile:
    """Count, divide and look up: the profile of *window*, which no sink was given yet.

    Args:
        window: what was measured.
        config: the profiler's settings; ``peak_flops_per_sec`` and ``memory_bytes_per_sec`` in it win over the
            tables of devices.
        traced: the window's traced step, analysed.
    """

    def peak_of(dtype: str) -> float | None:
        context, given = window.context, config.peak_flops_per_sec
        return peak_for(device_name=context.device_name, dtype=dtype, given=given, host=context.host)

    measured = measured_peaks(window.context.host, window.context.device_name)
    counts = FlopCounts(window.flops)
    timed = [step for step in window.timed_steps if is_timed(step)]
    steps = max(1, len(window.counted_steps))
    total = total_flops(counts, recompute_fwd_factor=config.recompute_fwd_factor)
    timing = build_timing(
        timed, mixed_phases=window.mixed_phases, trains=window.context.trains, processor=window.processor
    )
    dtypes = flops_by_dtype(window.flops.cells, peak_of=peak_of)
    samples = _mean_amount([step.samples for step in timed or window.counted_steps])
    tokens = _mean_amount([step.tokens for step in timed or window.counted_steps])
    rates, unavailable = build_rates(
        flops=total,
        counted_steps=steps,
        dtypes=dtypes,
        timing=timing,
        samples=samples,
        tokens=tokens,
        context=window.context,
    )
    root = _root(window.modules)
    lower_bound = counts.is_lower_bound
    times: Mapping[str, ModuleTimes] = {}
    if traced is not None:
        times = module_times(
            traced,
            counts,
            counted_steps=steps,
            peak_of=peak_of,
            has_backward=window.context.trains or total.hardware + total.skipped > total.forward,
        )
    times, notes = possible_times(times)
    flops = mean_flops(total, steps=steps)
    energy = build_energy(window.gpu, timing=timing, hardware_flops=flops.hardware, samples=samples, tokens=tokens)
    evidence = gather_evidence(
        window,
        timing=timing,
        batches=sum(step.micro_steps for step in timed) / max(1, len(timed)),
        dtypes=dtypes,
        times=times,
        traced=traced,
        energy=energy,
    )
    advice = () if timing is None or timing.few_steps else advise(evidence, config.thresholds)
    bandwidth = config.memory_bytes_per_sec
    if bandwidth is None:
        bandwidth = memory_bytes_per_sec(window.context.device_name) or measured.get(COPY)
    roof = Roof(peak_of=peak_of, memory_bytes_per_sec=bandwidth)
    operators, more = possible_operators(
        flops_by_operator(
            window.flops.cells, operator_rooflines(window.flops.cells, traced, roof, counted_steps=steps)
        ),
        peak_of,
    )
    return Profile(
        schema_version=SCHEMA_VERSION,
        profile_step=window.profile_step,
        report_step=window.profile_step,  # who shows it says when
        context=window.context,
        settings=ReportSettings(
            module_depth=config.module_depth,
            top_modules=config.top_modules,
            detailed=config.detailed,
            recompute_fwd_factor=float(config.recompute_fwd_factor),
            causal_attention=config.causal_attention,
            timing_steps=window.timing_steps,
            peak_given=config.peak_flops_per_sec is not None,
            memory_given=config.memory_bytes_per_sec is not None,
            measured=device_named(window.context.device_name) is None and bool(measured),
        ),
        counted_steps=tuple(step.index for step in window.counted_steps),
        timed_steps=tuple(step.index for step in timed),
        variable=window.variable,
        params=None if root is None else root.params,
        trainable_params=None if root is None else root.trainable_params,
        local_params=None if root is None else root.local_params,
        parameter_bytes={} if root is None else dict(root.parameter_bytes),
        micro_steps=sum(step.micro_steps for step in window.counted_steps) / steps,
        samples=samples,
        tokens=tokens,
        flops=flops,
        flops_total=total,
        bytes_total=bytes_by_phase(window.flops.cells),
        dtypes=dtypes,
        peaks_flops_per_sec={
            dtype: peak
            for dtype in dict.fromkeys((*DTYPE_NAMES, *(one.dtype for one in dtypes)))
            if (peak := peak_of(dtype)) is not None
        },
        timing=timing,
        budget=build_budget(
            timing=timing,
            traced=traced,
            at_peak=seconds_at_peak(window.flops.cells, peak_of=peak_of, counted_steps=steps),
            memory_sec=mean(total=per_second(amount=_other_bytes(window.flops.cells), seconds=bandwidth), steps=steps),
            advice=advice,
            lower_bound=lower_bound,
            step_word=window.context.step_word,
            own_sec=own_seconds(window, timing),
        ),
        memory_bytes_per_sec=bandwidth,
        energy=energy,
        rates=rates,
        unavailable=unavailable,
        lower_bound=lower_bound,
        modules=build_modules(
            window.modules,
            counts,
            times,
            module_rooflines(window.flops.cells, times, roof, counted_steps=steps),
        ),
        outside=counts.own_by_module().get(OUTSIDE, PhaseFlops()),
        operators=operators,
        uncounted=dict(window.flops.uncounted),
        memory=window.memory,
        traced=traced,
        ranks=None,
        advice=advice,
        notes=(*_notes(window, timed=len(timed)), *notes, *more),
    )


def _root(modules: Sequence[ModuleRecord]) -> ModuleRecord | None:
    return next((module for module in modules if module.name == ""), None)


def _other_bytes(cells: Sequence[OperatorCell]) -> int:
    """Bytes that operators without FLOPs read and wrote."""
    spending = {cell.operator for cell in cells if cell.flops}
    return sum(cell.bytes_read + cell.bytes_written for cell in cells if cell.operator not in spending)


def _mean_amount(amounts: Sequence[int | None]) -> float | None:
    """Mean of samples or tokens; None if one of them is not known or cannot be right."""
    known = [amount for amount in amounts if amount is not None and amount > 0]
    return sum(known) / len(known) if known and len(known) == len(amounts) else None


def _notes(window: WindowRecord, *, timed: int) -> tuple[str, ...]:
    notes = [*window.notes, *window.flops.notes]
    if not window.counted_steps:
        notes.append("No step was counted to its end: the FLOPs are of everything that ran while the counter was on.")
    wrong = sum(step.seconds is not None for step in window.timed_steps) - timed
    if wrong:
        notes.append(f"Left out: {wrong} timed {plural('step', wrong)} with times that cannot be right.")
    return tuple(dict.fromkeys(notes))
