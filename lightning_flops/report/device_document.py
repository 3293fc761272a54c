"""Energy, memory and the traced step of a profile as sections of a document."""

from __future__ import annotations

from lightning_flops.analysis.rates import ratio
from lightning_flops.records import MemoryRecord, PhaseMemory
from lightning_flops.report.document import Column, Figure, Section, Table, table
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import TracedStep
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
            if (row.name, row.device) == ("", -1) and calls:
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
    """What was traced, and where all of its tables are; None if no step was traced."""
    traced, timing, word = profile.traced, profile.timing, profile.context.step_word
    if traced is None:
        return None
    if traced.tables is None:
        about = (
            f"No profiler could run. In {traced.named(word)}, a clock was read at each module's hooks, so latencies "
            "are of the fwd alone."
        )
    else:
        wall_sec = traced.tables.step_times.mean.wall_us * _US
        times = None if timing is None else ratio(part=wall_sec, whole=timing.global_step_sec)
        about = (
            f"{traced.named(word).capitalize()} ran under torch.profiler, apart from the counted and the timed "
            f"{plural(word, 2)}, in {duration(wall_sec)} each" + (f": {times:.2f} x their mean." if times else ".")
        )
    if traced.steps > 1:
        about += f" Times of modules and operators are medians over these {plain(traced.steps)}."
    if not traced.like_counted:
        about += " Its batch shapes, or its numbers of forwards, backwards and updates, are not the counted step's."
    return Section(f"Traced {word}", about, [f"Every table: lightning-flops trace {file}" for file in traced.files])
