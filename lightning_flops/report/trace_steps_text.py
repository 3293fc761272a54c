"""Where the time of a trace's steps went, as text: parts, devices, kinds of events, phases, idle time, launches."""

from __future__ import annotations

from collections.abc import Callable

from lightning_flops.report.trace_cells import STATISTICS, statistics, us
from lightning_flops.report.trace_view import View
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_events import KERNEL_GAP_LIMIT_US
from lightning_flops.schema.trace_steps import STEP_PARTS, Durations, PhaseRow, StepTime
from lightning_flops.units import NOT_AVAILABLE, percent, plain


def step_lines(report: TraceReport, view: View) -> list[str]:
    """Each step by what filled it."""
    times = report.step_times
    head = ["", "wall", *(label for label, _ in STEP_PARTS)]
    longest = view.sorted(times.steps, total=lambda step: step.wall_us)
    shown = longest[: view.rows] if len(times.steps) > 1 else []
    rows = [_step_row(_step_name(step), step) for step in shown]
    rows.append(_step_row("mean" if len(times.steps) > 1 else _step_name(times.steps[0]), times.mean))
    shares = [_share(times.mean, attribute) for _, attribute in STEP_PARTS]
    rows.append(["ratio", percent(1.0) if times.mean.wall_us else NOT_AVAILABLE, *shares])
    explanation = (
        "Each moment of a step counts once: under the first name from the left that ran then. The parts add up to the "
        "wall time. A step lasts to the end of the last kernel that was launched in it."
    )
    more = view.more(times.steps) if shown else []
    return [*view.section("Step time", explanation), *view.table(head, rows, least_width=8), *more]


def _step_name(step: StepTime) -> str:
    return "whole trace" if step.number is None else f"step {step.number}"


def _step_row(name: str, step: StepTime) -> list[str]:
    return [name, us(step.wall_us), *(us(getattr(step, attribute)) for _, attribute in STEP_PARTS)]


def _share(step: StepTime, attribute: str) -> str:
    value: float | None = getattr(step, attribute)
    return percent(value / step.wall_us) if value is not None and step.wall_us else NOT_AVAILABLE


def device_lines(report: TraceReport, view: View) -> list[str]:
    """How well the devices were used."""
    lines = view.section("Devices", 'Within the steps; from "elapsed" on, over the whole trace.')
    metrics = report.device_metrics
    for device in metrics or ():
        name = f"device {device.device}"
        described = device.name or "not described in the trace"
        lines += view.line(name, described + (f", {device.sm_count} SMs" if device.sm_count else ""))
        lines += view.line(f"{name}: GPU utilization (a kernel ran)", percent(device.utilization))
        lines += view.line(f"{name}: SM efficiency (estimated)", percent(device.sm_efficiency))
        occupancy = None if device.occupancy_percent is None else device.occupancy_percent / 100
        lines += view.line(f"{name}: achieved occupancy (estimated)", percent(occupancy))
        lines += view.line(f"{name}: mean blocks per SM", plain(device.blocks_per_sm))
    if metrics is None:
        lines += view.line("GPU utilization, SM efficiency, occupancy", f"{NOT_AVAILABLE} (no device events)")
    summary = report.device_summary
    lines += view.line("elapsed, first event to last", us(summary.elapsed_us))
    lines += view.line("CPU (process) = CPU time / elapsed", percent(summary.cpu_process_ratio))
    lines += view.line("CPU (system) = busy / (busy + idle)", percent(summary.cpu_system_ratio))
    for use in summary.devices or ():
        lines += view.line(f"GPU {use.device} = kernels / elapsed", percent(use.utilization))
    return lines


def overview_lines(report: TraceReport, view: View) -> list[str]:
    """Events by kind."""
    ordered = view.sorted(
        report.overview, name=lambda row: row.kind, calls=lambda row: row.calls, total=lambda row: row.time_us
    )
    rows = [[row.kind, row.side, plain(row.calls), us(row.time_us), percent(row.ratio)] for row in ordered]
    explanation = "Events of one kind are merged: a moment that they share counts once. Kinds overlap."
    table = view.table(["kind", "side", "calls", "time", "of steps"], rows, left=(0, 1))
    return [*view.section("Overview", explanation), *table]


def phase_lines(report: TraceReport, view: View) -> list[str]:
    """The phases of the steps."""
    summary = report.model_summary
    phases: tuple[tuple[str, PhaseRow | None], ...] = (
        ("data loader", summary.data_loader),
        ("forward", summary.forward),
        ("backward", summary.backward),
        ("optimizer", summary.optimizer),
    )

    def rows(times: Callable[[PhaseRow], Durations | None]) -> list[list[str]]:
        timed = [(name, row, None if row is None else times(row)) for name, row in phases]
        ordered = view.sorted(
            timed,
            name=lambda one: one[0],
            calls=lambda one: one[1] and one[1].calls,
            durations=lambda one: one[2],
        )
        found = [["step", plain(summary.step.calls), *statistics(times(summary.step))]]
        for name, row, durations in ordered:
            label = f"{name} *" if row is not None and row.source == "operators" else name
            found.append([label, NOT_AVAILABLE if row is None else plain(row.calls), *statistics(durations)])
        return found

    others = summary.others
    host, device = rows(lambda row: row.host), rows(lambda row: row.device)
    host.append(["others", "", us(others.host_us), "", "", "", percent(others.host_ratio)])
    device.append(["others", "", us(others.device_us), "", "", "", percent(others.device_ratio)])
    explanation = (
        "Phases on the host's clock, and the device work launched in them. A phase with * has no scope in the trace "
        "and is found by its operators. A phase that is n/a cannot be found; its time is in others."
    )
    lines = view.section("Model summary", explanation)
    lines += view.table(["host", "calls", *STATISTICS], host)
    if summary.step.device is not None:
        lines += ["", *view.table(["device", "calls", *STATISTICS], device)]
    return lines


def idle_lines(report: TraceReport, view: View) -> list[str]:
    """Pauses of devices and streams."""
    if report.idle is None:
        return []
    explanation = (
        "Pauses between device events, over the whole trace. Host: what ended the pause was launched after it had "
        f"begun. Kernel gap: launched in time, under {KERNEL_GAP_LIMIT_US} us. Other: the rest."
    )
    rows = [
        [
            f"device {row.device}" if row.stream is None else f"device {row.device} stream {row.stream}",
            us(row.busy_us),
            us(row.host_wait_us),
            us(row.kernel_gap_us),
            us(row.other_us),
        ]
        for row in view.first(report.idle, total=lambda row: row.busy_us)
    ]
    table = view.table(["", "busy", "host", "kernel gap", "other"], rows)
    return [*view.section("Idle", explanation), *table, *view.more(report.idle)]


def launch_lines(report: TraceReport, view: View) -> list[str]:
    """Launches by kind."""
    if not report.launches:
        return []
    explanation = "Delay: from the end of the call to the start on the device."
    rows = [
        [
            row.kind,
            plain(row.launches),
            plain(row.events),
            *(us(value) for value in (row.host.mean_us, row.host.max_us, row.device.mean_us, row.device.max_us)),
            *(us(value) for value in (row.delay.mean_us, row.delay.max_us)),
            plain(row.shorter_than_launch),
        ]
        for row in view.sorted(
            report.launches,
            name=lambda row: row.kind,
            calls=lambda row: row.launches,
            mean=lambda row: row.device.mean_us,
            max=lambda row: row.device.max_us,
        )
    ]
    head = [
        "",
        "calls",
        "launched",
        "call mean",
        "max",
        "device mean",
        "max",
        "delay mean",
        "max",
        "shorter than the call",
    ]
    return [*view.section("Launches", explanation), *view.table(head, rows, least_width=6)]
