"""Real ranks, one of which sleeps somewhere in every step: rank 0's report names it, and where."""

from __future__ import annotations

import pytest

from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import RanksProfile
from tests.ranks.launching import launch, profile_in
from tests.ranks.scenarios_stragglers import SLOW_RANK


def report_of(scenario: str) -> Profile:
    """Rank 0's profile, with what the other ranks sent it."""
    return profile_in(launch("scenarios_stragglers", ranks=2)(scenario)[0])


def all_ranks(profile: Profile) -> RanksProfile:
    assert profile.ranks is not None
    assert profile.ranks.answered == 2, profile.ranks.absences
    return profile.ranks


@pytest.mark.parametrize(
    ("scenario", "part", "module"),
    [
        ("slow_data", "data wait", None),
        ("slow_forward", "forward", "layers.2"),
        ("slow_backward", "backward", "layers.2"),
        ("slow_optimizer", "optimizer", None),
    ],
)
def test_the_rank_that_sleeps_is_named_with_the_part_and_the_module(
    scenario: str, part: str, module: str | None
) -> None:
    profile = report_of(scenario)
    (found,) = all_ranks(profile).stragglers
    assert (found.rank, found.part, found.module) == (SLOW_RANK, part, module)
    (advice,) = (one for one in profile.advice if one.rule == "straggler")
    assert f"rank {SLOW_RANK}" in advice.fact


def test_a_sleep_before_a_collective_shows_as_the_others_wait_for_it() -> None:
    communication = all_ranks(report_of("slow_backward")).communication
    assert communication is not None
    waits_us = {row.rank: row.wait_us or 0.0 for row in communication.ranks}
    assert min(waits_us, key=lambda rank: waits_us[rank]) == SLOW_RANK


def test_ranks_that_keep_pace_are_not_named() -> None:
    assert all_ranks(report_of("healthy")).stragglers == ()
