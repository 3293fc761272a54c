"""Every table of a trace, described once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from lightning_flops.report.document import (
    CALLS,
    NAME_CHARS,
    Column,
    Figure,
    Section,
    Table,
    at,
    field,
    named,
    short,
    statistics,
    table,
    us,
)
from lightning_flops.report.layout import shortened
from lightning_flops.report.work_document import flops_section, kernel_section, operator_section, rates
from lightning_flops.schema.ranks import Overlap
from lightning_flops.schema.tables import KERNEL_GAP_LIMIT_US, STEP_PARTS, MemoryCurve, ModuleTable, StepTime
from lightning_flops.schema.trace import TraceReport
from lightning_flops.units import NOT_AVAILABLE, percent, si

MEMORY_TITLES = ("Memory over time", "Memory (bytes)", "Memory by module (bytes)")
"""Sections of which a trace has what it needs with ``profile_memory`` alone."""


def trace_sections(report: TraceReport) -> Iterator[Section]:
    """All that one trace says, in the order of a report; what it has nothing for is left out."""
    yield _steps(report)
    yield _devices(report)
    if report.kernels is not None:
        yield kernel_section(report)
    if report.flops is not None:
        yield flops_section(report, report.flops)
    yield _phases(report)
    if report.modules is not None:
        yield _modules(report.modules)
    if report.overlap is not None:
        yield _communication(report, report.overlap)
    if report.operators is not None:
        yield operator_section(report)
    if report.memory_curves:
        yield Section("Memory over time", "The most that was allocated at once.", [*map(_peak, report.memory_curves)])
    sizes = {"least_width": 3, "total": at("allocation_bytes")}
    note = "Size increase: allocated less freed. Allocation: frees left out. Self: without operators it called."
    yield from _section("Memory (bytes)", note, report.memory, [_place("operator"), *_SIZES], **sizes)
    note = "As above, by the module whose forward was running. Self: without the modules inside."
    yield from _section("Memory by module (bytes)", note, report.module_memory, [_place("module"), *_SIZES], **sizes)
    note = "Copies and memsets: the calls that launched them, and they themselves."
    calls = statistics(at("host"), sorts=False, prefix="call ")
    columns = [named("kind"), CALLS, _BYTES, *calls, *statistics(at("device"))]
    yield from _section("Memory manipulation", note, report.transfers, columns, least_width=6)
    columns = [named("scope"), CALLS, *statistics(at("host"))]
    if any(row.device is not None for row in report.user_scopes or ()):
        columns += statistics(at("device"), sorts=False, labels="total ratio", prefix="device ")
    note = "record_function and the like; device: work launched in them."
    yield from _section("User-defined scopes", note, report.user_scopes, columns, least_width=6)
    note = (
        "Pauses between device events, over the whole trace. Host: what ended the pause was launched after it had "
        f"begun. Kernel gap: launched in time, under {KERNEL_GAP_LIMIT_US} us. Other: the rest."
    )
    yield from _section("Idle", note, report.idle, _IDLE)


def _section(
    title: str, note: str, rows: Sequence[Any] | None, columns: Sequence[Column], **settings: Any
) -> Iterator[Section]:
    """The section of one table; none without rows."""
    if rows:
        yield Section(title, note, [table(rows, columns, **settings)])


def _where(row: Any) -> str:
    return "host" if row.device < 0 else f"device {row.device}"


def _place(of: str) -> Column:
    """The column of what allocated: an *operator* or a *module*."""

    def name(row: Any) -> str:
        return shortened("(outside operators)" if row.name is None else row.name or "(root)", chars=NAME_CHARS)

    return Column(of, name, str, "name")


_BYTES = field("bytes", "bytes", sort="bytes")
_SIZES = [
    Column("where", _where, str, left=True),
    CALLS,
    field("size increase", "size_increase_bytes"),
    field("self", "self_size_increase_bytes"),
    field("allocation", "allocation_bytes", sort="bytes"),
    field("self", "self_allocation_bytes", sort="self"),
]
_IDLE = [
    Column("", _where, str),
    field("busy", "busy_us", us, "total"),
    field("host", "host_wait_us", us),
    field("kernel gap", "kernel_gap_us", us),
    field("other", "other_us", us),
]


def _steps(report: TraceReport) -> Section:
    times = report.step_times
    wall, many = times.mean.wall_us, len(times.steps) > 1

    def name(step: StepTime) -> str:
        return "whole trace" if step.number is None else f"step {step.number}"

    parts = [wall, *(getattr(times.mean, part) for _, part in STEP_PARTS)]
    shares = [percent(None if part is None or not wall else part / wall) for part in parts]
    foot = [["mean" if many else name(times.steps[0]), *map(us, parts)], ["ratio", *shares]]
    columns = [
        Column("", name, str),
        field("wall", "wall_us", us, "total"),
        *(field(label, part, us) for label, part in STEP_PARTS),
    ]
    return Section(
        "Step time",
        "Each moment of a step counts once: under the first name from the left that ran then. The parts add up to the "
        "wall time. A step lasts to the end of the last kernel that was launched in it.",
        [table(times.steps if many else (), columns, foot=foot, least_width=8)],
    )


def _devices(report: TraceReport) -> Section:
    if report.device_metrics is None:
        nothing = Figure("GPU utilization, SM efficiency, occupancy", f"{NOT_AVAILABLE} (no device events)")
        return Section("Devices", "", [nothing])
    columns = [
        Column("", _where, str),
        Column("", lambda row: row.name or "not described in the trace", str, left=True),
        field("SMs", "sm_count"),
        field("GPU utilization", "utilization", percent),
        field("SM efficiency", "sm_efficiency", percent),
        field("occupancy, %", "occupancy_percent"),
        field("blocks/SM", "blocks_per_sm"),
    ]
    return Section(
        "Devices",
        "Within the steps. Utilization: a kernel ran. SM efficiency and occupancy are estimated from launches.",
        [table(report.device_metrics, columns, least_width=6)],
    )


def _phases(report: TraceReport) -> Section:
    if report.phases is None:
        return Section("Phases", "", [Figure("Phases", f"{NOT_AVAILABLE} (nothing in the trace shows phases)")])
    tables = []
    for clock in ("host", "device") if report.device_metrics is not None else ("host",):
        columns = [named(clock), CALLS, *statistics(at(clock))]
        tables.append(table(report.phases, columns, whole=True))
    return Section(
        "Phases",
        "On the host's clock, and the device work launched in them, as scopes in the trace name them, or by operators: "
        "with gradients on before a backward, and in autograd. What is in no phase is in others, once for each step.",
        tables,
    )


def _modules(modules: ModuleTable) -> Section:
    columns = [
        Column("module", lambda row: row.name or "(root)", short, "name"),
        CALLS,
        field("fwd self", "own_forward_us", us),
        field("fwd total", "forward_us", us),
    ]
    on_device, has_backward = modules.clock == "device", any(row.backward_us for row in modules.rows)
    columns += [field("bwd self", "own_backward_us", us), field("bwd total", "backward_us", us)] if has_backward else []
    columns += [field("fwd kernels", "forward_kernels")] if on_device else []
    columns += [field("bwd kernels", "backward_kernels")] if on_device and has_backward else []
    columns += rates(modules.rows)

    def own(row: Any) -> float:
        return float(row.own_forward_us + row.own_backward_us)

    rows = sorted(modules.rows, key=own, reverse=True)
    wholes = (
        ("forward", modules.forward_us),
        ("  of it unattributed", modules.unattributed_forward_us),
        ("backward", modules.backward_us),
        ("  of it gradient accumulation", modules.gradient_accumulation_us),
        ("  of it unattributed", modules.unattributed_backward_us),
        ("optimizer", modules.optimizer_us),
    )
    items: list[Figure | Table | str] = [Figure(label, us(time_us)) for label, time_us in wholes]
    items.append(table(rows, columns, total=lambda row: row.forward_us + row.backward_us, self=own))
    of_steps = "medians of one step" if modules.steps == 1 else "all steps together"
    return Section(
        "Modules",
        f"Time on the {modules.clock}, {of_steps}; self: without the modules inside. The backward includes "
        "what it repeats of the forward. Gradient accumulation is of the whole model and has its own line.",
        items,
    )


def _communication(report: TraceReport, share: Overlap) -> Section:
    def part(label: str, time_us: float) -> Figure:
        of_steps = percent(time_us / share.wall_us if share.wall_us else None)
        return Figure(label, f"{us(time_us)} ({of_steps} of the steps)")

    columns = [named("collective"), CALLS, _BYTES, *statistics(lambda row: row.device or row.host)]
    return Section(
        "Communication",
        "Overlapping events are merged. Computation is every kernel that does not communicate.",
        [
            part("computation without communication", share.computation_us - share.overlap_us),
            part("both at once", share.overlap_us),
            part("communication without computation", share.communication_us - share.overlap_us),
            part("neither", share.other_us),
            Figure("overlap / communication", percent(share.overlap_ratio)),
            table(report.collectives, columns),
        ],
    )


def _peak(curve: MemoryCurve) -> Figure:
    since = "" if curve.absolute else " more than when the trace began"
    peak = f"{si(curve.peak_bytes, 'B')}{since}, {us(curve.peak_us)} after the first event"
    return Figure(f"{_where(curve)}: peak", peak)
