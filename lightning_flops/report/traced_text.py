"""The traced step as text: a short version of where its time went; the command line prints its whole tables."""

from __future__ import annotations

import math

from lightning_flops.analysis.rates import ratio
from lightning_flops.report.layout import and_more, line, paragraph, shortened, table, title
from lightning_flops.report.memory_text import module_memory_table, operator_memory_table
from lightning_flops.schema.modules import ModuleProfile
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TraceReport
from lightning_flops.schema.trace_steps import STEP_PARTS, ModuleTable, StepTime
from lightning_flops.units import duration, percent, plain, plural, si

_COMMAND = "lightning-flops trace"
_ROWS_SHOWN = 5
_NAME_CHARS = 60
_US = 1e-6


def traced_lines(profile: Profile) -> list[str]:
    """A section of the report; empty if no step was traced."""
    traced = profile.traced
    if traced is None:
        return []
    tables = traced.tables
    word = profile.context.step_word
    lines = [title(f"Traced {word}")]
    if tables is None:
        about = (
            f"No profiler could run. In {word} {traced.index}, a clock was read at each module's borders, so "
            "latencies are of the fwd alone."
        )
    else:
        many = plural(word, 2)
        about = f"{word.title()} {traced.index} ran under torch.profiler, apart from the counted and the timed {many}."
    if not traced.like_counted:
        about += " Its batch shapes, or its numbers of forwards, backwards and updates, are not the counted step's."
    lines += paragraph(about)
    for file in traced.files:
        lines.append(f"Every table: {_COMMAND} {file}")
    if tables is None:
        return [*lines, *_module_lines(profile)]
    lines += _step_lines(tables, profile)
    lines += _device_lines(tables)
    if tables.modules is not None:
        lines += ["", *_phase_lines(tables.modules, profile), *_module_lines(profile)]
    lines += _operator_lines(tables)
    lines += _kernel_lines(tables)
    lines += _scope_lines(tables)
    lines += _memory_lines(tables)
    return lines


def _step_lines(tables: TraceReport, profile: Profile) -> list[str]:
    mean = tables.step_times.mean
    wall = duration(mean.wall_us * _US)
    many = plural(profile.context.step_word, 2)
    if profile.timing is not None and (times := ratio(part=mean.wall_us * _US, whole=profile.timing.global_step_sec)):
        wall += f" ({times:.2f} x the timed {many}' mean)"
    return [
        line("wall time", wall),
        *paragraph(_parts(mean), first="of it, the first that ran at each moment: ", rest="    "),
    ]


def _parts(step: StepTime) -> str:
    known = [(name, getattr(step, field)) for name, field in STEP_PARTS]
    return ", ".join(f"{name} {percent(ratio(part=value, whole=step.wall_us))}" for name, value in known if value)


def _device_lines(tables: TraceReport) -> list[str]:
    lines = []
    for device in tables.device_metrics or ():
        occupancy = None if device.occupancy_percent is None else device.occupancy_percent / 100
        lines.append(line(f"GPU {device.device} utilization (a kernel ran)", percent(device.utilization)))
        lines.append(
            line(
                "SM efficiency, achieved occupancy (estimated), blocks per SM",
                f"{percent(device.sm_efficiency)}, {percent(occupancy)}, {plain(device.blocks_per_sm)}",
            )
        )
    for idle in tables.idle or ():
        if idle.stream is None:
            kinds = (idle.host_wait_us, idle.kernel_gap_us, idle.other_us)
            lines.append(
                line(
                    f"GPU {idle.device} idle: waiting for the host, between kernels, other",
                    ", ".join(duration(time_us * _US) for time_us in kinds),
                )
            )
    if tables.overlap is not None:
        exposed_us = (tables.overlap.communication_us - tables.overlap.overlap_us) / len(tables.step_times.steps)
        share = percent(tables.overlap.overlap_ratio)
        lines.append(line("communication not hidden", f"{duration(exposed_us * _US)} ({share} is hidden)"))
    if tables.kernel_summary is not None:
        lines.append(line("kernel time on tensor cores", percent(tables.kernel_summary.tensor_core_ratio)))
    summary = tables.device_summary
    if summary.cpu_process_ratio is not None:
        lines.append(line("CPU time of this process / wall time", percent(summary.cpu_process_ratio)))
    if summary.cpu_system_ratio is not None:
        lines.append(line("CPU of the machine, busy / (busy + idle)", percent(summary.cpu_system_ratio)))
    return lines


def _phase_lines(modules: ModuleTable, profile: Profile) -> list[str]:
    """Each phase as it was traced, beside the mean of the timed steps."""
    seconds = _US / max(1, modules.steps)
    where = "on the device" if modules.clock == "device" else "on the host"

    timing = profile.timing

    def spent(time_us: float, timed_sec: float | None) -> str:
        beside = "" if timed_sec is None else f", {duration(timed_sec)} timed"
        return f"{duration(time_us * seconds)} traced{beside}"

    def unattributed(time_us: float, lost_us: float) -> list[str]:
        share = percent(ratio(part=lost_us, whole=time_us))
        return [line("  of it unattributed", f"{duration(lost_us * seconds)} ({share})")] if lost_us else []

    inside = (
        ("gradient accumulation", modules.gradient_accumulation_us),
        ("communication", modules.backward_communication_us),
        ("operators outside of autograd's nodes", modules.backward_outside_nodes_us),
    )
    lines = [
        line(f"forward {where}", spent(modules.forward_us, None if timing is None else timing.forward_sec)),
        *unattributed(modules.forward_us, modules.unattributed_forward_us),
    ]
    if not profile.has_backward:
        return lines
    return [
        *lines,
        line(f"backward {where}", spent(modules.backward_us, None if timing is None else timing.backward_sec)),
        *unattributed(modules.backward_us, modules.unattributed_backward_us),
        *(line(f"  of it {name}", duration(time_us * seconds)) for name, time_us in inside if time_us),
        line(f"optimizer {where}", spent(modules.optimizer_us, None if timing is None else timing.optimizer_sec)),
    ]


def _module_lines(profile: Profile) -> list[str]:
    """The modules that took longest themselves."""

    def own_sec(module: ModuleProfile) -> float:
        return module.times.own_forward_sec + (module.times.own_backward_sec or 0.0) if module.times else 0.0

    timed = [module for module in profile.modules if own_sec(module)]
    longest = sorted(timed, key=own_sec, reverse=True)[:_ROWS_SHOWN]
    whole = math.fsum(map(own_sec, profile.modules))
    backward = profile.has_backward
    on_device = any(module.times is not None and module.times.clock == "device" for module in longest)
    rows = []
    for module in longest:
        times = module.times
        if times is None:
            continue
        rows.append(
            [
                _short(module.name or "(root)"),
                duration(times.own_forward_sec),
                *([duration(times.own_backward_sec)] if backward else []),
                percent(ratio(part=own_sec(module), whole=whole)),
                *([plain(times.forward_kernels)] if on_device else []),
                *([plain(times.backward_kernels)] if on_device and backward else []),
                si(times.forward_flops_per_sec, "FLOP/s"),
                *([si(times.backward_flops_per_sec, "FLOP/s")] if backward else []),
            ]
        )
    sides = ["fwd", "bwd"] if backward else ["fwd"]
    kernels = [f"{side} kernels" for side in sides] if on_device else []
    head = ["module", *(f"own {side}" for side in sides), "of modules", *kernels, *sides]
    least = (
        ["FLOP/s of modules in which something could not be counted are lower bounds."] if profile.lower_bound else []
    )
    return ["", *table(head, rows), *and_more(len(timed) - len(rows)), *least] if rows else []


def _operator_lines(tables: TraceReport) -> list[str]:
    rows = [
        [
            _short(row.name),
            plain(row.calls),
            duration((row.device_self or row.host_self).total_us * _US),
            percent((row.device_self or row.host_self).ratio),
            duration((row.device or row.host).total_us * _US),
        ]
        for row in (tables.operators or ())[:_ROWS_SHOWN]
    ]
    head = ["operator", "calls", "self", "of operators", "total"]
    return ["", *table(head, rows), *and_more(len(tables.operators or ()) - len(rows))] if rows else []


def _kernel_lines(tables: TraceReport) -> list[str]:
    rows = [
        [
            _short(row.name),
            plain(row.calls),
            duration(row.device.total_us * _US),
            percent(row.device.ratio),
            duration(row.device.mean_us * _US),
        ]
        for row in (tables.kernels or ())[:_ROWS_SHOWN]
    ]
    head = ["kernel", "calls", "total", "of kernels", "mean"]
    return ["", *table(head, rows), *and_more(len(tables.kernels or ()) - len(rows))] if rows else []


def _scope_lines(tables: TraceReport) -> list[str]:
    rows = [
        [
            _short(row.name),
            plain(row.calls),
            duration(row.host.total_us * _US),
            duration(None if row.device is None else row.device.total_us * _US),
            percent(row.host.ratio),
        ]
        for row in (tables.user_scopes or ())[:_ROWS_SHOWN]
    ]
    head = ["user-defined scope", "calls", "host", "device", "of the step"]
    return ["", *table(head, rows), *and_more(len(tables.user_scopes or ()) - len(rows))] if rows else []


def _memory_lines(tables: TraceReport) -> list[str]:
    lines = []
    if tables.module_memory:
        lines += ["", *module_memory_table(tables.module_memory[:_ROWS_SHOWN])]
        lines += and_more(len(tables.module_memory) - _ROWS_SHOWN)
    if tables.memory:
        lines += ["", *operator_memory_table(tables.memory[:_ROWS_SHOWN])]
        lines += and_more(len(tables.memory) - _ROWS_SHOWN)
    about = "Bytes. Size increase: allocated less freed. Self: without what is inside, or was called."
    return [*lines, *paragraph(about)] if lines else []


def _short(name: str) -> str:
    return shortened(name, chars=_NAME_CHARS)
