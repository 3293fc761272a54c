"""A typical step and stalls, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_flops.analysis.timing import build_timing
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import PhaseSeconds, ProcessorLoss
from lightning_flops.report.profile_document import times_section
from lightning_flops.schema.step import Stalls, TimingProfile
from tests.report import windows
from tests.report.drawn import drawn


def timing(*steps: PhaseSeconds) -> TimingProfile:
    found = build_timing([windows.step(at, seconds=seconds) for at, seconds in enumerate(steps)], mixed_phases=())
    assert found is not None
    return found


def forwards(*seconds: float) -> TimingProfile:
    return timing(*(PhaseSeconds(forward=one) for one in seconds))


def test_a_typical_step_is_the_mean_of_the_middle_half_by_wall_time() -> None:
    found = forwards(0.25, 0.5, 0.5, 0.75, 0.75, 1.0, 2.0, 64.0)
    # 0.5, 0.75, 0.75 and 1.0 are the middle: two on each side are left out.
    assert found.global_step.typical_sec == 0.75
    assert found.global_step.mean_sec == 69.75 / 8
    assert found.global_step_sec == 69.75 / 8


def test_parts_of_a_typical_step_are_of_the_same_steps_so_they_add_up() -> None:
    # By wall time the first and the last step are left out, though the last one's forward is the shortest.
    found = timing(
        PhaseSeconds(forward=1.0, backward=0.0),
        PhaseSeconds(forward=1.0, backward=1.0),
        PhaseSeconds(forward=2.0, backward=1.0),
        PhaseSeconds(forward=0.5, backward=8.0),
    )
    assert found.seconds_of("forward", typical=True) == 1.5
    assert found.seconds_of("backward", typical=True) == 1.0
    assert found.seconds_of("forward", "backward", typical=True) == found.global_step.typical_sec == 2.5
    assert found.seconds_of("forward") == 1.125


def test_what_other_steps_took_beyond_a_typical_one_is_a_stall_by_the_part_with_most_of_it() -> None:
    usual = PhaseSeconds(data_wait=0.25, backward=0.75)
    late = PhaseSeconds(data_wait=0.5, backward=1.25)
    found = timing(usual, usual, usual, late, usual, usual, usual, PhaseSeconds(data_wait=0.375, backward=0.875))
    assert found.global_step.typical_sec == 1.0
    # 0.75 and 0.25 s longer; the waits have 0.25 + 0.125 of it.
    assert found.stalls == Stalls(steps=2, seconds=1.0, part="backward")


@pytest.mark.parametrize(("longest", "stalls"), [(1.1, None), (1.125, 1)])
def test_a_step_stalls_from_a_tenth_beyond_a_typical_one(longest: float, stalls: int | None) -> None:
    found = forwards(*[1.0] * 7, longest)
    assert (None if found.stalls is None else found.stalls.steps) == stalls


def test_how_busy_processors_were_while_steps_were_timed() -> None:
    steps = [windows.step(at, seconds=PhaseSeconds(forward=0.5)) for at in range(2)]
    used = ProcessorLoss(seconds=1.0, batches_sec=(0.5, 1.0), waited_share=None, busy_share=0.875)
    found = build_timing(steps, mixed_phases=(), processor=used)
    assert found is not None and found.cpu_system_ratio == 0.875
    profile = replace(windows.build_profile(windows.mlp_window(), config=ProfilerConfig()), timing=found)
    text = " ".join(drawn(times_section(profile, spread=True)))
    assert "CPU (process) 150.00%" in text and "CPU (system) 87.50%" in text
    assert "CPU" not in " ".join(drawn(times_section(profile)))
