"""Energy of a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_flops.analysis.profile import build_energy
from lightning_flops.analysis.timing import build_timing
from lightning_flops.records import GpuRecord, PhaseSeconds
from lightning_flops.schema.step import Energy
from tests.analysis.in_memory import known
from tests.report.windows import GPU as RECORD
from tests.report.windows import step


def built(record: GpuRecord, **excluded_sec: float) -> Energy:
    """Of steps of 0.1 s."""
    timed = [step(0, seconds=PhaseSeconds(forward=0.1), excluded_sec=excluded_sec)]
    energy = known(build_energy(record, build_timing(timed, mixed_phases=())))
    return energy


def test_a_steps_energy_is_the_mean_power_times_its_time_and_clocks_are_means_over_the_readings() -> None:
    energy = built(RECORD)
    assert energy.watts == 600.0
    assert energy.joules_per_step == pytest.approx(60.0, rel=1e-12)
    assert energy.no_joules_because == ""
    assert (energy.clock_mhz, energy.highest_clock_mhz) == (1500.0, 1980)
    assert (energy.power_limited_share, energy.heat_limited_share) == (0.4, 0.0)
    assert built(replace(RECORD, power_limited_sec=2.6)).power_limited_share == 1.0


def test_what_could_not_be_read_says_why() -> None:
    energy = built(replace(RECORD, joules=None, no_joules_because="no counter"))
    assert (energy.watts, energy.joules_per_step, energy.no_joules_because) == (None, None, "no counter")
    assert energy.clock_mhz == 1500.0
    untimed = known(build_energy(RECORD, None))
    assert (untimed.joules_per_step, untimed.no_joules_because) == (None, "no step was timed")
    assert build_energy(None, None) is None


@pytest.mark.parametrize(("outside_sec", "known"), [(0.125, True), (0.126, False)])  # 5% of 2.5 s
def test_a_validation_between_the_steps_makes_their_power_another(outside_sec: float, known: bool) -> None:
    energy = built(RECORD, validation=outside_sec)
    assert (energy.joules_per_step is not None) == known
    assert energy.watts == 600.0
    assert known or energy.no_joules_because.startswith("validation took part of the time")
