"""Energy and clocks of a GPU while steps were timed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of this rank's GPU while steps were timed, and its clock: of the whole GPU, whoever used it."""

    measured_sec: float
    """Over which the GPU's counters were read, on the host."""
    watts: float | None
    """Joules by the GPU's own counter / measured_sec"""
    joules_per_step: float | None
    """watts x global_step_sec"""
    no_joules_because: str
    """Why one of these is None, in a few words; empty if none is."""
    clock_mhz: float | None
    """Mean of what the multiprocessors' clock was between timed steps."""
    highest_clock_mhz: int | None
    """The highest that this GPU can have."""
    power_limited_share: float | None
    """Share of measured_sec in which power held the clock below what was asked for."""
    heat_limited_share: float | None
    """Share of measured_sec in which heat did."""
