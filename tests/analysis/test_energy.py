"""Energy of a step, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_flops.analysis.energy import build_energy
from lightning_flops.analysis.timing import build_timing
from lightning_flops.records import GpuRecord, PhaseSeconds
from lightning_flops.schema.energy import Energy
from lightning_flops.schema.step import TimingProfile
from tests.report.windows import GPU as RECORD
from tests.report.windows import step


def timing(**excluded_sec: float) -> TimingProfile:
    """Steps of 0.1 s."""
    found = build_timing([step(0, seconds=PhaseSeconds(forward=0.1), excluded_sec=excluded_sec)], mixed_phases=())
    assert found is not None
    return found


def built(record: GpuRecord, *, samples: float | None = 8.0, tokens: float | None = None, **excluded: float) -> Energy:
    energy = build_energy(record, timing=timing(**excluded), hardware_flops=1200, samples=samples, tokens=tokens)
    assert energy is not None
    return energy


def test_a_steps_energy_is_the_mean_power_times_its_time() -> None:
    energy = built(RECORD, tokens=4000.0)
    assert energy.watts == 600.0
    assert energy.joules_per_step == pytest.approx(60.0, rel=1e-12)
    assert energy.flops_per_joule == pytest.approx(20.0, rel=1e-12)
    assert energy.joules_per_sample == pytest.approx(7.5, rel=1e-12)
    assert energy.joules_per_token == pytest.approx(0.015, rel=1e-12)
    assert energy.unavailable == {}


def test_clocks_are_means_over_the_readings_and_shares_of_the_time() -> None:
    energy = built(RECORD)
    assert (energy.clock_mhz, energy.clock_readings, energy.highest_clock_mhz) == (1500.0, 3, 1980)
    assert (energy.power_limited_share, energy.heat_limited_share) == (0.4, 0.0)


def test_time_held_down_is_never_more_than_the_time() -> None:
    assert built(replace(RECORD, power_limited_sec=2.6)).power_limited_share == 1.0


def test_what_could_not_be_read_says_why() -> None:
    energy = built(replace(RECORD, joules=None, no_joules_because="no counter"))
    assert (energy.joules, energy.watts, energy.joules_per_step, energy.joules_per_sample) == (None,) * 4
    assert set(energy.unavailable.values()) == {"no counter"}
    assert energy.clock_mhz == 1500.0


def test_samples_that_are_not_known_leave_the_energy_of_a_step() -> None:
    energy = built(RECORD, samples=None)
    assert energy.joules_per_step is not None and energy.joules_per_sample is None
    assert energy.unavailable["joules_per_sample"] == "the number of samples is not known"


@pytest.mark.parametrize(("outside_sec", "known"), [(0.125, True), (0.126, False)])  # 5% of 2.5 s
def test_a_validation_between_the_steps_makes_their_power_another(outside_sec: float, known: bool) -> None:
    energy = built(RECORD, validation=outside_sec)
    assert (energy.joules_per_step is not None) == known
    assert energy.watts == 600.0
    if not known:
        assert energy.unavailable["joules_per_step"].startswith("validation took part of the time")


def test_nothing_read_is_nothing_said() -> None:
    assert build_energy(None, timing=timing(), hardware_flops=1, samples=1.0, tokens=1.0) is None


def test_no_timed_step_has_no_energy() -> None:
    energy = build_energy(RECORD, timing=None, hardware_flops=1, samples=1.0, tokens=None)
    assert energy is not None
    assert energy.joules_per_step is None and energy.unavailable["joules_per_step"] == "no step was timed"
