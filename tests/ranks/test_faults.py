"""Whatever befalls a rank, or how it was launched: training does not notice, no rank hangs, and rank 0 reports.

Losses, weights, random state and collectives of a fit are compared with those of the same fit without the profiler.
"""

from __future__ import annotations

import functools

import pytest

from lightning_flops.config import OWN_FOLDER
from tests.lightning.nets import batch_flops
from tests.ranks.launching import absences, launch, profile_in
from tests.ranks.scenarios_faults import BATCHES, SCENARIOS

pytestmark = pytest.mark.timeout(290)

on_two = functools.partial(launch, "tests.ranks.scenarios_faults", ranks=2)

COMPARED = ("losses", "weights", "random", "footprint", "collectives")


@pytest.mark.parametrize("scenario", [name for name in SCENARIOS if name != "plain"])
def test_training_is_bit_for_bit_what_it_is_without_the_profiler_and_nothing_is_left(scenario: str) -> None:
    for plain, profiled in zip(on_two()("plain"), on_two()(scenario), strict=True):
        assert len(plain["losses"]) == BATCHES
        for name in COMPARED:
            assert profiled[name] == plain[name], name
        # The store and the group are as before; the sum is of an all-reduce afterwards.
        assert (profiled["ours"], profiled["sum"]) == ([], 1 + 2)


def test_no_collective_is_ours_and_the_count_would_show_one() -> None:
    for plain, healthy in zip(on_two()("plain"), on_two()("healthy"), strict=True):
        # For each batch a gradient's all-reduce, and what Lightning asks for.
        assert plain["collectives"] == healthy["collectives"] >= BATCHES


def test_every_rank_is_in_the_report_of_rank_0_and_the_others_have_their_own_profile() -> None:
    first, second = on_two()("healthy")
    profile, own = profile_in(first), profile_in(second)
    assert absences(profile) == {}
    assert profile.ranks is not None and profile.ranks.flops.forward == 2 * batch_flops().forward
    assert (own.context.rank, own.ranks) == (1, None)
    assert own.flops.forward == batch_flops().forward
    assert first["logged"] == second["logged"] == []


def test_a_rank_whose_profiler_fails_is_named_long_before_training_ends() -> None:
    first, second = on_two()("profiler_fails")
    profile, failure = profile_in(first), "RuntimeError: broken on purpose"
    reason = f"its profiler failed: {failure}"
    assert absences(profile) == {1: reason}
    assert profile.report_step < BATCHES
    assert first["logged"] == [f"the report of step 1 is of 1 of 2 ranks; rank 1: {reason}"]
    (own,) = second["logged"]
    assert own.endswith(f": {failure}")


def test_rank_0_alone_leaves_files() -> None:
    for returned in on_two()("rank_0_alone_writes"):
        *files, trace = returned["files"]
        names = ("profile.html", "profile.json", "profile.txt", "throughput.json")
        assert files == [f"logs0/{OWN_FOLDER}/{name}" for name in names]
        assert trace.startswith("traces/rank0_step")


def test_all_ranks_leave_files_if_they_are_asked_to() -> None:
    for returned in on_two()("all_ranks"):
        *files, trace_0, trace_1 = returned["files"]
        assert trace_0.startswith("traces/rank0_step") and trace_1.startswith("traces/rank1_step")
        assert files == [
            "flops.rank1.txt",
            "flops.txt",
            f"logs0/{OWN_FOLDER}/profile.html",
            f"logs0/{OWN_FOLDER}/profile.json",
            f"logs0/{OWN_FOLDER}/throughput.json",
            f"logs1/{OWN_FOLDER}/profile.rank1.json",
            f"logs1/{OWN_FOLDER}/throughput.rank1.json",
        ]
