"""All tables of one trace, and what other traces' reports need of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from lightning_flops.analysis.devices import DeviceAbilities, device_abilities
from lightning_flops.analysis.peaks import NO_FLOPS
from lightning_flops.analysis.rank_record import TracedRank
from lightning_flops.schema.trace import TracedPart, TraceReport
from lightning_flops.schema.trace_flops import Flops
from lightning_flops.trace import tables
from lightning_flops.trace.columns import Trace
from lightning_flops.trace.communication import collective_calls, collective_table, overlap
from lightning_flops.trace.counting import Formulas
from lightning_flops.trace.flops import Peaks, find_work
from lightning_flops.trace.memory import memory_curves, memory_table, module_memory_table
from lightning_flops.trace.modules import module_table
from lightning_flops.trace.names import Kind
from lightning_flops.trace.read import WITH_MODULES, load_trace
from lightning_flops.trace.steps import phase_table, step_parts, step_times

if TYPE_CHECKING:
    from lightning_flops.schema.comparison import TableName

_NO_KERNELS = (
    "Calls of the device's runtime launched no kernel, copy or memset that was recorded, as where the profiler may not "
    "watch the device: its work is in no table."
)
_NO_TORCH = f"{NO_FLOPS}working them out from shapes needs torch, which is not installed."
_NO_SHAPES = f"{NO_FLOPS}the trace was taken without record_shapes=True."
_NO_CALLS_OF_MODULES = (
    "Modules are n/a: with_modules=True alone has torch name those of TorchScript programs, and record no calls. With "
    "with_stack=True it records the calls of all modules."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AnalyzedTrace(TracedRank):
    """One trace's tables, and what the others' reports need of it: small, whatever the size of the trace."""

    report: TraceReport
    abilities: DeviceAbilities
    """Of the device that ran the kernels; a trace lists all devices of its machine."""
    parts: tuple[TracedPart, ...]
    """Of its steps: for a comparison with other ranks."""
    step_sums: Mapping[TableName, tables.StepSums] | None = None
    """Its steps one by one: for a comparison with another run's, else None."""


def analyze_trace(trace: Trace, *, formulas: Formulas | None = None, peaks: Peaks | None = None) -> TraceReport:
    """Every table of *trace*; FLOPs with *formulas* alone, shares of the peak by a user's own *peaks* if given."""
    collectives, modules, kernels = collective_table(trace), module_table(trace), tables.kernel_table(trace)
    by_shape = tables.operators_by_shape(trace)
    work = None if formulas is None else find_work(trace, formulas, peaks)
    if work is not None:
        kernels = _with_flops(kernels, work.of_kernels())
        by_shape = _with_flops(by_shape, work.of_shapes(), "name", "inputs", "dtypes")
        if modules is not None:
            of_modules = work.of_modules({row.name: row for row in modules.rows})
            modules = replace(modules, rows=_with_flops(modules.rows, of_modules))
    launched_nothing = not trace.has_device and (trace.kind == Kind.RUNTIME).any()
    return TraceReport(
        source=trace.source,
        rank=trace.rank,
        events=len(trace),
        step_times=step_times(trace),
        modules=modules,
        device_metrics=tables.device_metrics(trace),
        phases=phase_table(trace),
        overlap=overlap(trace) if collectives is not None else None,
        collectives=collectives,
        kernel_summary=tables.kernel_summary(trace),
        kernels=kernels,
        operators=tables.operator_table(trace),
        memory=memory_table(trace),
        module_memory=module_memory_table(trace),
        transfers=tables.transfer_table(trace),
        user_scopes=tables.user_scope_table(trace),
        idle=tables.idle_times(trace),
        notes=(
            *trace.notes,
            *trace.steps.odd,
            *((_NO_KERNELS,) if launched_nothing else ()),
            *(work.notes if work else ()),
        ),
        memory_curves=memory_curves(trace),
        operators_by_shape=by_shape,
        flops=None if work is None else work.totals(),
    )


def _with_flops(rows: Any, flops: Mapping[Any, Flops], *key: str) -> Any:
    """*rows* of a table with the FLOPs that are known under what they have as *key*, which is their name."""
    known = attrgetter(*(key or ("name",)))
    return rows and tuple(replace(row, flops=flops.get(known(row))) for row in rows)


def analyze_one(
    trace: Trace, *, stepwise: bool = False, formulas: Formulas | None = None, peaks: Peaks | None = None
) -> AnalyzedTrace:
    """What *trace* says by itself, and for a comparison with other ranks, or with another run *stepwise*.

    Without *formulas* there is no torch, as the report then says.
    """
    report = analyze_trace(trace, formulas=formulas, peaks=peaks)
    notes = report.notes
    if report.flops is None:
        notes += (_NO_TORCH if (trace.inputs >= 0).any() else _NO_SHAPES,)
    if report.modules is None and trace.metadata.get(WITH_MODULES):
        notes += (_NO_CALLS_OF_MODULES,)
    used = trace.used_device
    return AnalyzedTrace(
        report=replace(report, notes=notes),
        abilities=device_abilities(
            device_type="cuda" if trace.has_device else "cpu",
            name=used.name if used else None,
            # A device without a name may be any vendor's.
            compute_capability=used.compute_capability if used and used.name else None,
        ),
        parts=step_parts(trace),
        rank=trace.rank,
        source=trace.source,
        steps=len(trace.steps),
        overlap=overlap(trace),
        collectives=collective_calls(trace),
        step_sums=tables.step_sums(trace) if stepwise else None,
    )


def analyze_file(file: str, **settings: Any) -> AnalyzedTrace:
    """What ``analyze_one`` gives for the trace in *file*."""
    return analyze_one(load_trace(file), **settings)
