"""All tables of one trace in a frozen record, and what other traces' reports need of it.

Processes that read traces side by side import this module: it needs no settings, and nothing of a comparison.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_flops.analysis.device_abilities import UNKNOWN_DEVICE, DeviceAbilities, device_abilities
from lightning_flops.analysis.trace.by_step import TraceBySteps, by_steps
from lightning_flops.analysis.trace.columns import Trace
from lightning_flops.analysis.trace.communication import collective_table, overlap
from lightning_flops.analysis.trace.device import (
    device_metrics,
    idle_times,
    kernel_summary,
    kernel_table,
    launch_statistics,
)
from lightning_flops.analysis.trace.flops import Formulas, trace_flops
from lightning_flops.analysis.trace.head import WITH_MODULES
from lightning_flops.analysis.trace.memory_curve import memory_curves
from lightning_flops.analysis.trace.module_memory import module_memory_table
from lightning_flops.analysis.trace.modules import module_table
from lightning_flops.analysis.trace.no_mfu import NO_FLOPS
from lightning_flops.analysis.trace.operator_tables import memory_table, operator_table, operators_by_shape
from lightning_flops.analysis.trace.parts import step_parts
from lightning_flops.analysis.trace.phases import model_summary
from lightning_flops.analysis.trace.ranks import RankSummary, rank_summary
from lightning_flops.analysis.trace.scopes import device_summary, overview, transfer_table, user_scope_table
from lightning_flops.analysis.trace.step_time import step_times
from lightning_flops.schema.trace import TracedPart, TraceReport

_NO_TORCH = f"{NO_FLOPS}working them out from shapes needs torch, which is not installed."
_NO_SHAPES = f"{NO_FLOPS}the trace was taken without record_shapes=True."
_NO_CALLS_OF_MODULES = (
    "Modules are n/a: with_modules=True alone has torch name those of TorchScript programs, and record no calls. With "
    "with_stack=True it records the calls of all modules."
)


def analyze_trace(trace: Trace, *, formulas: Formulas | None = None) -> TraceReport:
    """Every table of *trace*.

    Args:
        trace: what to analyze.
        formulas: what a recorded call spent; without them the report has no FLOPs.
    """
    collectives = collective_table(trace)
    modules = module_table(trace)
    return TraceReport(
        source=trace.source,
        rank=trace.rank,
        events=len(trace),
        step_times=step_times(trace),
        modules=modules,
        device_metrics=device_metrics(trace),
        device_summary=device_summary(trace),
        overview=overview(trace),
        model_summary=model_summary(trace),
        overlap=overlap(trace) if collectives is not None else None,
        collectives=collectives,
        kernel_summary=kernel_summary(trace),
        kernels=kernel_table(trace),
        operators=operator_table(trace),
        memory=memory_table(trace),
        module_memory=module_memory_table(trace),
        transfers=transfer_table(trace),
        user_scopes=user_scope_table(trace),
        idle=idle_times(trace),
        launches=launch_statistics(trace),
        notes=trace.notes + tuple(mark.words() for mark in trace.steps.odd),
        memory_curves=memory_curves(trace),
        operators_by_shape=operators_by_shape(trace),
        flops=None if formulas is None else trace_flops(trace, formulas, modules),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedTrace:
    """What one trace says, and what the others' reports need of it: small, whatever the size of the trace."""

    report: TraceReport
    abilities: DeviceAbilities
    parts: tuple[TracedPart, ...]
    """Of its steps, as ``summary``: for a comparison with other ranks, empty where there is none."""
    summary: RankSummary | None
    by_steps: TraceBySteps | None = None
    """Its steps one by one: for a comparison with another run's, else None."""


def analyze_one(
    trace: Trace, *, compared: bool, formulas: Formulas | None = None, stepwise: bool = False
) -> AnalyzedTrace:
    """What *trace* says by itself.

    Args:
        trace: what to analyze.
        compared: whether it will be held against traces of other ranks.
        formulas: as for ``analyze_trace``; None where there is no torch, as the report then says.
        stepwise: whether it will be held against another run's, step by step.
    """
    return AnalyzedTrace(
        report=_with_words(analyze_trace(trace, formulas=formulas), trace),
        abilities=_abilities(trace),
        parts=step_parts(trace) if compared else (),
        summary=rank_summary(trace) if compared else None,
        by_steps=by_steps(trace) if stepwise else None,
    )


def _with_words(report: TraceReport, trace: Trace) -> TraceReport:
    """*report* with a sentence on why it has no FLOPs, and no modules that were asked for."""
    notes = report.notes
    if report.flops is None:
        notes += (_NO_TORCH if (trace.inputs >= 0).any() else _NO_SHAPES,)
    if report.modules is None and trace.metadata.get(WITH_MODULES):
        notes += (_NO_CALLS_OF_MODULES,)
    return report if notes == report.notes else replace(report, notes=notes)


def _abilities(trace: Trace) -> DeviceAbilities:
    """What the device that ran the kernels can do; a trace lists all devices of its machine."""
    if not trace.has_device:
        return UNKNOWN_DEVICE
    used = set(trace.device[trace.on_device].tolist())
    kinds = {(one.name, one.compute_capability) for one in trace.devices if one.index in used}
    name, capability = kinds.pop() if len(kinds) == 1 else ("", None)
    # A device without a name may be any vendor's.
    return device_abilities(device_type="cuda", name=name, compute_capability=capability if name else None)
