"""Energy, memory and the traced step of a profile as sections of a document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_flops.analysis.rates import ratio
from lightning_flops.records import MemoryRecord, PhaseMemory
from lightning_flops.report.document import Column, Figure, Section, Table, table
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TracedStep, TraceReport
from lightning_flops.schema.trace_steps import STEP_PARTS, ModuleTable
from lightning_flops.units import NOT_AVAILABLE, bytes_by_dtype, duration, percent, plain, plural, si

_PHASES = {"forward": "fwd", "backward": "bwd", "optimizer": "optimizer"}
_US = 1e-6


def energy_section(profile: Profile) -> Section | None:
    """Energy and clocks; None if no GPU's counters were read."""
    energy = profile.energy
    if energy is None:
        return None
    bound = " (lower bound)" if profile.lower_bound and energy.flops_per_joule is not None else ""
    clock = NOT_AVAILABLE
    if energy.clock_mhz is not None:
        highest = "" if energy.highest_clock_mhz is None else f" of at most {plain(energy.highest_clock_mhz)}"
        readings = f"{energy.clock_readings} {plural('reading', energy.clock_readings)}"
        clock = f"{plain(round(energy.clock_mhz))}{highest} MHz (mean of {readings})"
    items: list[Figure | Table | str] = [
        Figure("mean power in this time", si(energy.watts, "W")),
        Figure(f"energy of a {profile.step_name} = mean power x its time", si(energy.joules_per_step, "J")),
        Figure("hardware FLOPs per joule", f"{si(energy.flops_per_joule, 'FLOP/J')}{bound}"),
        Figure("energy per sample", si(energy.joules_per_sample, "J")),
        *([] if energy.joules_per_token is None else [Figure("energy per token", si(energy.joules_per_token, "J"))]),
        Figure("clock of the multiprocessors", clock),
        Figure("clock held down by power, share of the time", percent(energy.power_limited_share)),
        Figure("clock held down by heat, share of the time", percent(energy.heat_limited_share)),
    ]
    if energy.reasons:
        shares = ", ".join(f"{words} at {percent(share)} of the readings" for words, share in energy.reasons.items())
        items.append(f"Why the clock was not higher: {shares}.")
    items += [f"{NOT_AVAILABLE}: {reason}." for reason in dict.fromkeys(energy.unavailable.values())]
    note = (
        "By the counters of the whole GPU, whoever used it, read where the timed steps began and ended: "
        f"{duration(energy.measured_sec)}."
    )
    return Section("Energy and clocks of this GPU", note, items)


def memory_section(profile: Profile) -> Section | None:
    """What each phase holds, and what it is for; None if memory was not looked at."""
    memory = profile.memory
    if memory is None:
        return None
    on_device, trains = memory.kind == "allocated", profile.context.trains
    columns = [
        Column("", lambda phase: _PHASES[phase.name], str),
        Column(f"{memory.kind} at its end", lambda phase: si(phase.current_bytes, "B"), str),
    ]
    if on_device:
        columns += [
            Column("peak in it", lambda phase: _peak(phase.peak_bytes, before=memory.run_peak_bytes), str),
            Column("reserved at its end", lambda phase: si(phase.reserved_bytes, "B"), str),
            Column("peak in it", lambda phase: _reserved_peak(phase, memory), str),
        ]
    items: list[Figure | Table | str] = [
        table(memory.phases, columns, whole=True),
        Figure(f"peak {memory.kind}, of this process so far", si(memory.run_peak_bytes, "B")),
    ]
    if on_device:
        items.append(Figure("peak reserved, of this process so far", si(memory.run_reserved_peak_bytes, "B")))
    items.append(Figure("parameters on this rank", si(memory.parameter_bytes, "B")))
    if profile.parameter_bytes:
        items.append(Figure("parameters of the model", bytes_by_dtype(profile.parameter_bytes)))
    items.append(Figure("buffers", si(memory.buffer_bytes, "B")))
    if trains:
        kept = si(memory.kept_by_forward_bytes, "B") if on_device else _kept_on_host(profile.traced)
        items += [
            Figure("gradients", _or_why_not(memory.gradient_bytes, "on no parameter, as under ZeRO")),
            Figure("optimizer states", _or_why_not(memory.optimizer_bytes, "not where torch's optimizers keep them")),
            Figure("activations that a forward keeps, with its outputs", kept),
        ]
    about = (
        "Bytes on the device, as its caching allocator counts them. It keeps one peak, which is not reset here: a "
        "phase that reached a new peak shows it; any other phase stayed at or below the earlier peak."
        if on_device
        else "Bytes of this process on the host, all of it."
    )
    return Section(f"Memory of this rank in the counted {'step' if trains else 'batch'}", about, items)


def _or_why_not(value: int | None, reason: str) -> str:
    return f"{NOT_AVAILABLE} ({reason})" if value is None else si(value, "B")


def _kept_on_host(traced: TracedStep | None) -> str:
    tables = None if traced is None else traced.tables
    if tables is not None and tables.modules is not None:
        calls = next((row.calls for row in tables.modules.rows if not row.name), 0)
        for row in tables.module_memory or ():
            if (row.name, row.part, row.device) == ("", "forward", -1) and calls:
                return f"{si(row.size_increase_bytes / calls, 'B')} (of the traced step)"
    return f"{NOT_AVAILABLE} (set profile_memory to know it)"


def _reserved_peak(phase: PhaseMemory, memory: MemoryRecord) -> str:
    return _peak(phase.reserved_peak_bytes, before=memory.run_reserved_peak_bytes)


def _peak(value: int | None, *, before: int | None) -> str:
    """The peak that a phase reached, or the earlier peak that it did not exceed."""
    if value is not None:
        return si(value, "B")
    return NOT_AVAILABLE if before is None else f"<= {si(before, 'B')}"


def traced_section(profile: Profile) -> Section | None:
    """The traced step in a few figures, and where all of its tables are; None if no step was traced."""
    traced, word = profile.traced, profile.context.step_word
    if traced is None:
        return None
    tables = traced.tables
    if tables is None:
        about = (
            f"No profiler could run. In {traced.named(word)}, a clock was read at each module's hooks, so latencies "
            "are of the fwd alone."
        )
    else:
        about = (
            f"{traced.named(word).capitalize()} ran under torch.profiler, apart from the counted and the timed "
            f"{plural(word, 2)}."
        )
    if traced.steps > 1:
        about += f" Times of modules and operators are medians over these {plain(traced.steps)}."
    if not traced.like_counted:
        about += " Its batch shapes, or its numbers of forwards, backwards and updates, are not the counted step's."
    items: list[Figure | Table | str] = [f"Every table: lightning-flops trace {file}" for file in traced.files]
    if tables is not None:
        items += [*_wall(tables, profile), *_devices(tables)]
        if tables.modules is not None:
            items += _phases(tables.modules, profile)
    return Section(f"Traced {word}", about, items)


def _wall(tables: TraceReport, profile: Profile) -> Iterator[Figure | str]:
    mean = tables.step_times.mean
    wall = duration(mean.wall_us * _US)
    if profile.timing is not None and (times := ratio(part=mean.wall_us * _US, whole=profile.timing.global_step_sec)):
        wall += f" ({times:.2f} x the timed {plural(profile.context.step_word, 2)}' mean)"
    yield Figure("wall time", wall)
    known = [(name, getattr(mean, name_of)) for name, name_of in STEP_PARTS]
    parts = ", ".join(f"{name} {percent(ratio(part=value, whole=mean.wall_us))}" for name, value in known if value)
    yield f"Of it, the first that ran at each moment: {parts}."


def _devices(tables: TraceReport) -> Iterator[Figure]:
    for device in tables.device_metrics or ():
        occupancy = None if device.occupancy_percent is None else device.occupancy_percent / 100
        yield Figure(f"GPU {device.device} utilization (a kernel ran)", percent(device.utilization))
        figures = f"{percent(device.sm_efficiency)}, {percent(occupancy)}, {plain(device.blocks_per_sm)}"
        yield Figure("SM efficiency, achieved occupancy (estimated), blocks per SM", figures)
    for idle in tables.idle or ():
        if idle.stream is None:
            kinds = (idle.host_wait_us, idle.kernel_gap_us, idle.other_us)
            times = ", ".join(duration(time_us * _US) for time_us in kinds)
            yield Figure(f"GPU {idle.device} idle: waiting for the host, between kernels, other", times)
    if tables.overlap is not None:
        exposed_us = (tables.overlap.communication_us - tables.overlap.overlap_us) / len(tables.step_times.steps)
        hidden = percent(tables.overlap.overlap_ratio)
        yield Figure("communication not hidden", f"{duration(exposed_us * _US)} ({hidden} is hidden)")
    if tables.kernel_summary is not None:
        yield Figure("kernel time on tensor cores", percent(tables.kernel_summary.tensor_core_ratio))
    summary = tables.device_summary
    if summary.cpu_process_ratio is not None:
        yield Figure("CPU time of this process / wall time", percent(summary.cpu_process_ratio))
    if summary.cpu_system_ratio is not None:
        yield Figure("CPU of the machine, busy / (busy + idle)", percent(summary.cpu_system_ratio))


def _phases(modules: ModuleTable, profile: Profile) -> Iterator[Figure]:
    """Each phase as it was traced, beside the mean of the timed steps."""
    seconds, timing = _US / max(1, modules.steps), profile.timing
    where = "on the device" if modules.clock == "device" else "on the host"
    phases: list[tuple[str, Any, Any, Any]] = [
        ("forward", modules.forward_us, timing and timing.forward_sec, modules.unattributed_forward_us)
    ]
    if profile.has_backward:
        phases += [
            ("backward", modules.backward_us, timing and timing.backward_sec, modules.unattributed_backward_us),
            ("  of it gradient accumulation", modules.gradient_accumulation_us, None, 0),
            ("  of it communication", modules.backward_communication_us, None, 0),
            ("  of it operators outside of autograd's nodes", modules.backward_outside_nodes_us, None, 0),
            ("optimizer", modules.optimizer_us, timing and timing.optimizer_sec, 0),
        ]
    for name, time_us, timed_sec, lost_us in phases:
        if name.startswith("  "):
            if time_us:
                yield Figure(name, duration(time_us * seconds))
            continue
        timed = "" if timed_sec is None else f", {duration(timed_sec)} timed"
        yield Figure(f"{name} {where}", f"{duration(time_us * seconds)} traced{timed}")
        if lost_us:
            share = percent(ratio(part=lost_us, whole=time_us))
            yield Figure("  of it unattributed", f"{duration(lost_us * seconds)} ({share})")
