"""Every table of a trace, described once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lightning_flops.analysis.rates import ratio
from lightning_flops.report import layout
from lightning_flops.report.document import (
    CALLS,
    NAME_CHARS,
    Column,
    Figure,
    Section,
    Table,
    field,
    named,
    place,
    short,
    statistics,
    table,
    us,
)
from lightning_flops.report.work_document import flops_section, kernel_section, operator_section
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_events import KERNEL_GAP_LIMIT_US, HeldMemory, MemoryCurve
from lightning_flops.schema.trace_steps import STEP_PARTS, Durations, PhaseRow, StepTime
from lightning_flops.units import NOT_AVAILABLE, percent, plain, si

_PHASES = {"forward": "fwd", "backward": "bwd"}


MEMORY_TITLES = ("Memory over time", "Memory (bytes)", "Memory by module (bytes)")
"""Sections of which a trace has what it needs with ``profile_memory`` alone."""


def trace_sections(report: TraceReport) -> Iterator[Section]:
    """All that one trace says, in the order of a report; what it has nothing for is left out."""
    yield _steps(report)
    yield _devices(report)
    if report.flops is not None:
        yield flops_section(report.flops)
    yield _phases(report)
    if report.modules is not None:
        yield _modules(report)
    if report.overlap is not None:
        yield _communication(report)
    if report.kernels is not None:
        yield kernel_section(report)
    if report.operators is not None:
        yield operator_section(report)
    yield from _memory(report)
    if report.transfers:
        yield _transfers(report)
    if report.user_scopes is not None:
        yield _scopes(report)
    if report.idle is not None:
        yield _idle(report)
    if report.launches:
        yield _launches(report)


def _steps(report: TraceReport) -> Section:
    times = report.step_times
    many = len(times.steps) > 1

    def name(step: StepTime) -> str:
        return "whole trace" if step.number is None else f"step {step.number}"

    columns = [
        Column("", name, str),
        field("wall", "wall_us", us, "total"),
        *(field(label, name_of, us) for label, name_of in STEP_PARTS),
    ]
    wall, mean = times.mean.wall_us, "mean" if many else name(times.steps[0])
    parts = [getattr(times.mean, part) for _, part in STEP_PARTS]
    shares = [percent(None if part is None or not wall else part / wall) for part in (wall, *parts)]
    return Section(
        "Step time",
        "Each moment of a step counts once: under the first name from the left that ran then. The parts add up to the "
        "wall time. A step lasts to the end of the last kernel that was launched in it.",
        [
            table(
                times.steps if many else (),
                columns,
                foot=[[mean, *map(us, (wall, *parts))], ["ratio", *shares]],
                least_width=8,
            )
        ],
    )


def _devices(report: TraceReport) -> Section:
    items = []
    for device in report.device_metrics or ():
        name = f"device {device.device}"
        described = device.name or "not described in the trace"
        occupancy = ratio(part=device.occupancy_percent, whole=100.0)
        items += [
            Figure(name, described + (f", {device.sm_count} SMs" if device.sm_count else "")),
            Figure(f"{name}: GPU utilization (a kernel ran)", percent(device.utilization)),
            Figure(f"{name}: SM efficiency (estimated)", percent(device.sm_efficiency)),
            Figure(f"{name}: achieved occupancy (estimated)", percent(occupancy)),
            Figure(f"{name}: mean blocks per SM", plain(device.blocks_per_sm)),
        ]
    if report.device_metrics is None:
        items.append(Figure("GPU utilization, SM efficiency, occupancy", f"{NOT_AVAILABLE} (no device events)"))
    summary = report.device_summary
    items += [
        Figure("elapsed, first event to last", us(summary.elapsed_us)),
        Figure("CPU (process) = CPU time / elapsed", percent(summary.cpu_process_ratio)),
        Figure("CPU (system) = busy / (busy + idle)", percent(summary.cpu_system_ratio)),
        *(Figure(f"GPU {use.device} = kernels / elapsed", percent(use.utilization)) for use in summary.devices or ()),
    ]
    return Section("Devices", 'Within the steps; from "elapsed" on, over the whole trace.', items)


def _phases(report: TraceReport) -> Section:
    summary = report.model_summary
    phases = [
        ("data loader", summary.data_loader),
        ("forward", summary.forward),
        ("backward", summary.backward),
        ("optimizer", summary.optimizer),
    ]

    def of(clock: str, rest_us: float | None, rest: float | None) -> Table:
        def times(row: PhaseRow | None) -> Durations | None:
            return None if row is None else getattr(row, clock)

        def name(one: tuple[str, PhaseRow | None]) -> str:
            return f"{one[0]} *" if one[1] is not None and one[1].source == "operators" else one[0]

        shown = statistics(lambda one: times(one[1]))
        columns = [
            Column(clock, name, str),
            Column("calls", lambda one: None if one[1] is None else one[1].calls, plain, "calls"),
            *shown,
        ]
        step = ["step", plain(summary.step.calls), *(one.show(one.of(("", summary.step))) for one in shown)]
        others = ["others", "", us(rest_us), "", "", "", percent(rest)]
        return table(phases, columns, name=lambda one: one[0], top=[step], foot=[others], whole=True)

    others = summary.others
    tables = [of("host", others.host_us, others.host_ratio)]
    if summary.step.device is not None:
        tables.append(of("device", others.device_us, others.device_ratio))
    return Section(
        "Model summary",
        "Phases on the host's clock, and the device work launched in them. A phase with * has no scope in the trace "
        "and is found by its operators. A phase that is n/a cannot be found; its time is in others.",
        tables,
    )


def _modules(report: TraceReport) -> Section:
    modules = report.modules
    assert modules is not None  # asked before
    known = report.flops is not None and report.flops.modules is not None
    flops = {row.name: row for row in (report.flops.modules if report.flops else None) or ()}

    def of_flops(label: str, of: Callable[[Any], Any], show: Callable[[Any], str], absent: str = "") -> Column:
        return Column(label, lambda row: flops.get(row.name), lambda one: absent if one is None else show(of(one)))

    columns = [
        Column("module", lambda row: row.name or "(root)", short),
        CALLS,
        field("fwd self", "own_forward_us", us),
        field("fwd total", "forward_us", us),
        field("bwd self", "own_backward_us", us),
        field("bwd total", "backward_us", us),
    ]
    if modules.clock == "device":
        columns += [field("fwd kernels", "forward_kernels"), field("bwd kernels", "backward_kernels")]
    if known:
        columns += [
            of_flops("FLOPs", lambda one: one.forward + one.backward + one.recompute, si, "0"),
            of_flops("FLOP/s", lambda one: one.flops_per_sec, si),
            of_flops("of peak", lambda one: one.peak_share, percent),
        ]
    if any(row.source is not None for row in modules.rows):
        columns.append(field("forward is in", "source", place))
    items: list[Figure | Table | str] = [
        Figure("forward", us(modules.forward_us)),
        Figure("  of it unattributed", us(modules.unattributed_forward_us)),
        Figure("backward", us(modules.backward_us)),
        Figure("  of it gradient accumulation", us(modules.gradient_accumulation_us)),
        Figure("  of it communication", us(modules.backward_communication_us)),
        Figure("  of it operators outside of autograd's nodes", us(modules.backward_outside_nodes_us)),
        Figure("  of it unattributed", us(modules.unattributed_backward_us)),
        Figure("optimizer", us(modules.optimizer_us)),
        table(
            sorted(modules.rows, key=lambda row: -(row.own_forward_us + row.own_backward_us)),
            columns,
            name=lambda row: row.name,
            total=lambda row: row.forward_us + row.backward_us,
            self=lambda row: row.own_forward_us + row.own_backward_us,
            flops=lambda row: flops[row.name].forward + flops[row.name].backward if row.name in flops else 0,
            rate=lambda row: flops[row.name].flops_per_sec if row.name in flops else 0,
        ),
    ]
    return Section(
        "Modules",
        f"Time on the {modules.clock}, all steps together; self: without the modules inside. The backward includes "
        "what it repeats of the forward. Gradient accumulation is of the whole model and has its own line.",
        items,
    )


def _communication(report: TraceReport) -> Section:
    share = report.overlap
    assert share is not None  # asked before

    def part(label: str, time_us: float) -> Figure:
        return Figure(
            label, f"{us(time_us)} ({percent(time_us / share.wall_us if share.wall_us else None)} of the steps)"
        )

    columns = [
        named("collective"),
        CALLS,
        field("bytes", "bytes", sort="bytes"),
        *statistics(lambda row: row.latency),
    ]
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


def _memory(report: TraceReport) -> Iterator[Section]:
    if report.memory_curves:
        items = [item for curve in report.memory_curves for item in _peak_of(curve)]
        yield Section("Memory over time", "The most that was allocated at once, and what had allocated it.", items)
    sizes = [
        field("size increase", "size_increase_bytes"),
        field("self", "self_size_increase_bytes"),
        field("allocation", "allocation_bytes"),
        field("self", "self_allocation_bytes"),
    ]
    sorts: dict[str, Any] = {
        "name": lambda row: row.name or "",
        "total": lambda row: row.allocation_bytes,
        "bytes": lambda row: row.allocation_bytes,
        "self": lambda row: row.self_allocation_bytes,
    }

    def where(row: Any) -> str:
        return row.device_type if row.device < 0 else f"{row.device_type} {row.device}"

    def cut(name: str) -> str:
        return layout.shortened(name, chars=NAME_CHARS)

    if report.memory is not None:
        columns = [
            Column("operator", lambda row: "(outside operators)" if row.name is None else row.name, cut),
            Column("where", where, str, left=True),
            CALLS,
            *sizes,
        ]
        note = "Size increase: allocated less freed. Allocation: frees left out. Self: without operators it called."
        yield Section("Memory (bytes)", note, [table(report.memory, columns, least_width=6, **sorts)])
    if report.module_memory:
        columns = [
            Column("module", lambda row: f"({row.part})" if row.name is None else row.name or "(root)", cut),
            Column("", lambda row: "" if row.name is None else _PHASES[row.part], str, left=True),
            Column("where", where, str, left=True),
            *sizes,
        ]
        note = "As above, by the module whose forward or backward was running. Self: without the modules inside."
        yield Section("Memory by module (bytes)", note, [table(report.module_memory, columns, least_width=3, **sorts)])


def _peak_of(curve: MemoryCurve) -> Iterator[Figure | Table]:
    where = "host" if curve.device_type == "host" else f"device {curve.device}"
    step = "" if curve.peak_step is None else f", in step {curve.peak_step}"
    since = "" if curve.absolute else " more than when the trace began"
    peak = f"{si(curve.peak_bytes, 'B')}{since}, {us(curve.peak_us)} after the first event{step}"
    yield Figure(f"{where}: peak", peak)
    if curve.held is None:
        yield Figure(f"{where}: held by", f"{NOT_AVAILABLE} (the trace has no addresses)")
        return

    def operator(one: HeldMemory) -> str:
        if one.operator is not None:
            return one.operator
        return "(before the trace)" if one.allocations is None else "(outside operators)"

    with_modules = any(one.module is not None for one in curve.held)
    module = Column("module", lambda one: "" if one.module is None else one.module or "(root)", short)
    columns = [
        *([module] if with_modules else []),
        Column(f"{where}: held by", operator, short, "name", left=True),
        Column("bytes", lambda one: one.bytes, lambda size: si(size, "B"), "bytes"),
        Column("of peak", lambda one: one.bytes / curve.peak_bytes if curve.peak_bytes else None, percent),
        field("allocations", "allocations", sort="calls"),
    ]
    yield table(curve.held, columns, total=lambda one: one.bytes)


def _transfers(report: TraceReport) -> Section:
    def of(clock: str, *, more: bool) -> Table:
        shown = [named(clock), CALLS, field("bytes", "bytes", sort="bytes")]
        sorts: dict[str, Any] = {one.sort: one.of for one in statistics(lambda row: row.device) if one.sort}
        return table(report.transfers, [*shown, *statistics(lambda row: getattr(row, clock))], more=more, **sorts)

    note = "Copies and memsets: the calls that launched them, and they themselves."
    return Section("Memory manipulation", note, [of("host", more=False), of("device", more=True)])


def _scopes(report: TraceReport) -> Section:
    columns = [named("scope"), CALLS, *statistics(lambda row: row.host)]
    if report.user_scopes and report.user_scopes[0].device is not None:
        found = statistics(lambda row: row.device, sorts=False, labels="total ratio")
        columns += [Column("device", found[0].of, us), found[1]]
    note = "record_function and the like; device: work launched in them."
    return Section("User-defined scopes", note, [table(report.user_scopes, columns, least_width=6)])


def _idle(report: TraceReport) -> Section:
    def name(row: Any) -> str:
        return f"device {row.device}" if row.stream is None else f"device {row.device} stream {row.stream}"

    columns = [
        Column("", name, str),
        field("busy", "busy_us", us, "total"),
        field("host", "host_wait_us", us),
        field("kernel gap", "kernel_gap_us", us),
        field("other", "other_us", us),
    ]
    return Section(
        "Idle",
        "Pauses between device events, over the whole trace. Host: what ended the pause was launched after it had "
        f"begun. Kernel gap: launched in time, under {KERNEL_GAP_LIMIT_US} us. Other: the rest.",
        [table(report.idle, columns)],
    )


def _launches(report: TraceReport) -> Section:
    def two(of: str, label: str, *, sorts: bool = False) -> list[Column]:
        mean, most = statistics(lambda row: getattr(row, of), sorts=sorts, labels="mean max")
        return [Column(f"{label} mean", mean.of, us, mean.sort), most]

    columns = [
        Column("", lambda row: row.kind, str, "name"),
        field("calls", "launches", sort="calls"),
        field("launched", "events"),
        *two("host", "call"),
        *two("device", "device", sorts=True),
        *two("delay", "delay"),
        field("shorter than the call", "shorter_than_launch"),
    ]
    note = "Delay: from the end of the call to the start on the device."
    return Section("Launches", note, [table(report.launches, columns, whole=True, least_width=6)])
