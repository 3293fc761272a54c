"""Energy and clocks as text."""

from __future__ import annotations

from lightning_flops.report.layout import line, paragraph, title
from lightning_flops.schema.energy import Energy
from lightning_flops.units import NOT_AVAILABLE, duration, percent, plain, plural, si


def energy_lines(energy: Energy | None, *, step_name: str = "global step", lower_bound: bool = False) -> list[str]:
    """A section of the report; empty if no GPU's counters were read.

    Args:
        energy: what was read.
        step_name: what a step is called.
        lower_bound: FLOPs are lower bounds.
    """
    if energy is None:
        return []
    lines = [
        title("Energy and clocks of this GPU"),
        *paragraph(
            f"By the counters of the whole GPU, whoever used it, read where the timed steps began and ended: "
            f"{duration(energy.measured_sec)}."
        ),
        line("mean power in this time", si(energy.watts, "W")),
        line(f"energy of a {step_name} = mean power x its time", si(energy.joules_per_step, "J")),
        line("hardware FLOPs per joule", _bounded(si(energy.flops_per_joule, "FLOP/J"), energy, lower_bound)),
        line("energy per sample", si(energy.joules_per_sample, "J")),
    ]
    if energy.joules_per_token is not None:
        lines.append(line("energy per token", si(energy.joules_per_token, "J")))
    lines += [
        line("clock of the multiprocessors", _clock(energy)),
        line("clock held down by power, share of the time", percent(energy.power_limited_share)),
        line("clock held down by heat, share of the time", percent(energy.heat_limited_share)),
    ]
    if energy.reasons:
        shares = ", ".join(f"{words} at {percent(share)} of the readings" for words, share in energy.reasons.items())
        lines += paragraph(f"Why the clock was not higher: {shares}.", rest="  ")
    for reason in dict.fromkeys(energy.unavailable.values()):
        lines += paragraph(f"{NOT_AVAILABLE}: {reason}.", rest="     ")
    return lines


def _bounded(text: str, energy: Energy, lower_bound: bool) -> str:
    return f"{text} (lower bound)" if lower_bound and energy.flops_per_joule is not None else text


def _clock(energy: Energy) -> str:
    if energy.clock_mhz is None:
        return NOT_AVAILABLE
    highest = "" if energy.highest_clock_mhz is None else f" of at most {plain(energy.highest_clock_mhz)}"
    readings = f"{energy.clock_readings} {plural('reading', energy.clock_readings)}"
    return f"{plain(round(energy.clock_mhz))}{highest} MHz (mean of {readings})"
