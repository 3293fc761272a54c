"""Energy, memory and the traced step of a profile as sections of a document."""

from __future__ import annotations

from lightning_flops.analysis.rates import ratio
from lightning_flops.records import PhaseMemory
from lightning_flops.report.document import Column, Figure, Section, Table
from lightning_flops.schema.profile import Profile
from lightning_flops.units import NOT_AVAILABLE, bytes_by_dtype, duration, percent, plain, plural, si

_PHASES = {"forward": "fwd", "backward": "bwd", "optimizer": "optimizer"}


def energy_section(profile: Profile) -> Section | None:
    """Energy and clocks; None if no GPU's counters were read."""
    energy = profile.energy
    if energy is None:
        return None
    joules = energy.joules_per_step
    bound = " (lower bound)" if profile.lower_bound and joules is not None else ""
    highest = "" if energy.highest_clock_mhz is None else f" of at most {plain(energy.highest_clock_mhz)}"
    clock = NOT_AVAILABLE if energy.clock_mhz is None else f"{plain(round(energy.clock_mhz))}{highest} MHz"
    figures = {
        "mean power in this time": si(energy.watts, "W"),
        f"energy of a {profile.step_name} = mean power x its time": si(joules, "J"),
        "hardware FLOPs per joule": f"{si(ratio(part=profile.flops.hardware, whole=joules), 'FLOP/J')}{bound}",
        "energy per sample": si(ratio(part=joules, whole=profile.samples), "J"),
        "clock of the multiprocessors": clock,
        "clock held down by power, share of the time": percent(energy.power_limited_share),
        "clock held down by heat, share of the time": percent(energy.heat_limited_share),
    }
    why = [f"{NOT_AVAILABLE}: {energy.no_joules_because}."] if energy.no_joules_because else []
    note = (
        "By the counters of the whole GPU, whoever used it, read where the timed steps began and ended: "
        f"{duration(energy.measured_sec)}."
    )
    return Section("Energy and clocks of this GPU", note, [*_figures(figures), *why])


def _figures(values: dict[str, str]) -> list[Figure]:
    return [Figure(label, value) for label, value in values.items()]


def memory_section(profile: Profile) -> Section | None:
    """What each phase holds, and what it is for; None if memory was not looked at."""
    memory, word = profile.memory, profile.context.step_word
    if memory is None:
        return None

    def peak(phase: PhaseMemory) -> str:
        """The peak that a phase reached, or the earlier peak that it did not exceed."""
        value, before = phase.peak_bytes, memory.run_peak_bytes
        return f"<= {si(before, 'B')}" if value is None and before is not None else si(value, "B")

    columns = [
        Column("", lambda phase: _PHASES[phase.name], str),
        Column(f"{memory.kind} at its end", lambda phase: si(phase.current_bytes, "B"), str),
    ]
    figures = {f"peak {memory.kind}, of this process so far": si(memory.run_peak_bytes, "B")}
    about = "Bytes of this process on the host, all of it."
    if memory.kind == "allocated":
        columns.append(Column("peak in it", peak, str))
        figures["peak reserved, of this process so far"] = si(memory.run_reserved_peak_bytes, "B")
        about = (
            "Bytes on the device, as its caching allocator counts them. It keeps one peak, which is not reset here: a "
            "phase that reached a new peak shows it; any other phase stayed at or below the earlier peak."
        )
    figures["parameters on this rank"] = si(memory.parameter_bytes, "B")
    if profile.parameter_bytes:
        figures["parameters of the model"] = bytes_by_dtype(profile.parameter_bytes)
    figures["buffers"] = si(memory.buffer_bytes, "B")
    if profile.context.trains:
        figures["gradients"] = _or_why_not(memory.gradient_bytes, "on no parameter, as under ZeRO")
        figures["optimizer states"] = _or_why_not(memory.optimizer_bytes, "not where torch's optimizers keep them")
        figures["activations that a forward keeps, with its outputs"] = _or_why_not(
            memory.kept_by_forward_bytes, "Memory by module has it, with profile_memory"
        )
    table = Table(memory.phases, columns, whole=True)
    return Section(f"Memory of this rank in the counted {word}", about, [table, *_figures(figures)])


def _or_why_not(value: float | None, reason: str) -> str:
    return f"{NOT_AVAILABLE} ({reason})" if value is None else si(value, "B")


def traced_section(profile: Profile) -> Section | None:
    """What was traced, and where all of its tables are; None if no step was traced."""
    traced, word = profile.traced, profile.context.step_word
    if traced is None or traced.tables is None:
        return None
    about = (
        f"{traced.named(word).capitalize()} ran under torch.profiler, apart from the counted and the timed "
        f"{plural(word, 2)}, in {duration(traced.tables.step_times.mean.wall_us * 1e-6)} each."
    )
    if traced.steps > 1:
        about += " Times of modules and operators are medians over them."
    if not traced.like_counted:
        about += " It was not like the counted step: FLOP/s are estimates, by the elements of the batches."
    return Section(f"Traced {word}", about, [f"Every table: lightning-flops trace {file}" for file in traced.files])
