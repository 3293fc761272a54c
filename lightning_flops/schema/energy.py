"""Energy and clocks of a GPU while steps were timed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Energy:
    """Energy of this rank's GPU while steps were timed, and its clock: of the whole GPU, whoever used it."""

    measured_sec: float
    """Over which the GPU's counters were read, on the host."""
    joules: float | None
    """Energy in them, by the GPU's own counter."""
    watts: float | None
    """joules / measured_sec"""
    joules_per_step: float | None
    """watts x global_step_sec"""
    flops_per_joule: float | None
    """hardware FLOPs of a step / joules_per_step"""
    joules_per_sample: float | None
    """joules_per_step / samples of this rank in a step"""
    joules_per_token: float | None
    """joules_per_step / tokens of this rank in a step"""
    clock_mhz: float | None
    """Mean of what the multiprocessors' clock was between timed steps."""
    clock_readings: int
    """How many readings that is the mean of."""
    highest_clock_mhz: int | None
    """The highest that this GPU can have."""
    power_limited_share: float | None
    """Share of measured_sec in which power held the clock below what was asked for."""
    heat_limited_share: float | None
    """Share of measured_sec in which heat did."""
    unavailable: Mapping[str, str]
    """Why a figure (by its field's name) is None, in a few words."""
