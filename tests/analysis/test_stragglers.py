"""Milliseconds of each rank are given, and who is late, by how much and where, is worked out by hand."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import pytest

from lightning_flops.analysis.rank_record import RankRecord, make_rank_record
from lightning_flops.analysis.stragglers import find_stragglers, straggler_evidence
from lightning_flops.analysis.timing import build_timing
from lightning_flops.config import AdviceThresholds, ProfilerConfig
from lightning_flops.records import PhaseSeconds, StepRecord, StepSignature
from lightning_flops.schema.ranks import Straggler
from lightning_flops.schema.trace import TracedPart, TracedStep
from tests.report import windows
from tests.report.windows import build_profile

MS = 0.001
MODULES = ("", "first", "second")
TIMED = 20


@lru_cache(maxsize=1)
def _blank() -> RankRecord:
    return make_rank_record(build_profile(windows.mlp_window(), config=ProfilerConfig()))


def timed_step(milliseconds: Mapping[str, float]) -> StepRecord:
    return StepRecord(
        index=0,
        signature=StepSignature(batches=(), forwards=1, backwards=1, updates=1),
        micro_steps=1,
        samples=1,
        seconds=PhaseSeconds(**{name: value * MS for name, value in milliseconds.items()}),
    )


def traced_step(parts: Mapping[str, float], exposed: Mapping[str, float]) -> TracedStep:
    return TracedStep(
        index=7,
        like_counted=True,
        files=(),
        tables=None,
        own_forward_sec=None,
        parts=tuple(
            TracedPart(name=name, wall_sec=value * MS, exposed_sec=exposed.get(name, 0.0) * MS)
            for name, value in parts.items()
        ),
    )


def record(
    rank: int,
    timed: Mapping[str, float] | Sequence[Mapping[str, float]],
    *,
    exposed: Mapping[str, float] | None = None,
    traced: Mapping[str, float] | None = None,
    stage: int = 0,
    own_forward: Sequence[float] = (),
    own_backward: Sequence[float] = (),
) -> RankRecord:
    """A rank's record, in milliseconds; its timed steps are alike or given one by one, *exposed* None is no trace."""
    blank = _blank()
    steps = [timed] * TIMED if isinstance(timed, Mapping) else list(timed)
    parts = steps[0] if traced is None else traced
    return replace(
        blank,
        profile=replace(
            blank.profile,
            context=replace(blank.profile.context, rank=rank, world_size=8, pp_rank=stage),
            timing=build_timing([timed_step(one) for one in steps], mixed_phases=()),
            traced=None if exposed is None else traced_step(parts, exposed),
        ),
        module_names=MODULES if own_forward else (),
        own_forward_ns=array("q", [round(one * 1e6) for one in own_forward]),
        own_backward_ns=array("q", [round(one * 1e6) for one in own_backward]),
    )


def only(found: Sequence[Straggler]) -> Straggler:
    (one,) = found
    return one


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds / MS, 6)


HEALTHY = {"data_wait": 1.0, "forward": 30.0, "backward": 60.0, "optimizer": 9.0}
"""A step of 100 ms."""
WAITING = {"backward": 5.0}
"""Of its backward, gradients are exchanged without being hidden."""


def healthy(rank: int) -> RankRecord:
    return record(rank, HEALTHY, exposed=WAITING)


# ---- where it is slow


def test_nobody_is_named_where_all_keep_pace() -> None:
    assert find_stragglers([healthy(rank) for rank in range(4)]) == ()


def test_a_slow_reader_is_named_by_its_waits_for_data() -> None:
    # Rank 2 waits 41 ms for data, the others 1; they wait 40 ms for it in their backwards.
    others = [record(rank, HEALTHY | {"backward": 100}, exposed={"backward": 45}) for rank in (0, 1, 3)]
    found = only(find_stragglers([*others, record(2, HEALTHY | {"data_wait": 41}, exposed=WAITING)]))
    assert (found.rank, found.part, found.module) == (2, "data wait", None)
    assert (milliseconds(found.late_sec), milliseconds(found.part_sec)) == (40, 40)
    assert round(found.share, 6) == round(40 / 140, 6)


def test_a_slow_module_is_named_with_its_forward() -> None:
    usual, slow = (2, 8, 20), (2, 8, 50)
    other = record(0, HEALTHY | {"backward": 90}, exposed={"backward": 35}, own_forward=usual, own_backward=usual)
    mine = record(1, HEALTHY | {"forward": 60}, exposed=WAITING, own_forward=slow, own_backward=usual)
    found = only(find_stragglers([mine, other]))
    assert (found.rank, found.part, milliseconds(found.late_sec)) == (1, "forward", 30)
    assert found.module == "second"
    assert straggler_evidence(found) == (
        "The other ranks wait 30 ms a step (23.08% of it) for rank 1: its forward takes 30 ms longer than theirs, "
        "mostly in second."
    )


def test_a_slow_forward_under_sharding_is_told_from_the_waits_of_the_others_in_it() -> None:
    # Weights are gathered in the forward, so there the others wait, and all forwards take as long.
    parts = HEALTHY | {"forward": 60}
    found = only(
        find_stragglers([record(0, parts, exposed={"forward": 40}), record(1, parts, exposed={"forward": 10})])
    )
    assert (found.rank, found.part, milliseconds(found.late_sec)) == (1, "forward", 30)


# ---- what is no straggler


def test_a_hiccup_of_the_traced_step_names_nobody() -> None:
    # Rank 1 came 50 ms late in that one step, which therefore took 150; no timed step took more than 100.
    late = HEALTHY | {"forward": 80.0}
    waited = HEALTHY | {"backward": 110.0}
    mine = record(1, HEALTHY, exposed=WAITING, traced=late)
    assert find_stragglers([record(0, HEALTHY, exposed={"backward": 55}, traced=waited), mine]) == ()


def test_parts_that_differ_by_chance_name_nobody() -> None:
    # Forwards of 10 and 60 ms in turn, on rank 1 one more of the long ones: its mean is 2.6 ms above the other's.
    def unsteady(long: int) -> list[dict[str, float]]:
        return [HEALTHY | {"forward": 60.0}] * long + [HEALTHY | {"forward": 10.0}] * (TIMED - long)

    tight = AdviceThresholds(straggler=1.0)
    ranks = [record(0, unsteady(10), exposed=WAITING), record(1, unsteady(11), exposed=WAITING)]
    assert find_stragglers(ranks, thresholds=tight) == ()
    steady = [healthy(0), record(1, HEALTHY | {"forward": 32.6}, exposed=WAITING)]
    assert only(find_stragglers(steady, thresholds=tight)).rank == 1


@pytest.mark.parametrize(("late_ms", "named"), [(10.0, []), (12.0, [1])])
def test_a_straggler_is_later_than_a_tenth_of_the_others_step(late_ms: float, named: list[int]) -> None:
    slow = record(1, HEALTHY | {"data_wait": 1.0 + late_ms}, exposed=WAITING)
    assert [one.rank for one in find_stragglers([healthy(0), slow])] == named


def test_without_traces_only_waits_for_data_and_transfers_tell() -> None:
    reads = [record(0, HEALTHY), record(1, HEALTHY | {"data_wait": 41})]
    found = only(find_stragglers(reads))
    assert (found.rank, found.part) == (1, "data wait")
    # A long forward may well be a wait for the others.
    assert find_stragglers([record(0, HEALTHY), record(1, HEALTHY | {"forward": 70})]) == ()


def test_stages_of_a_pipeline_are_held_against_their_own_ranks() -> None:
    # The second stage's forward is three times the first's: unbalanced, and nobody's fault.
    first = [record(rank, HEALTHY, exposed=WAITING) for rank in (0, 1)]
    second = [record(rank, HEALTHY | {"forward": 90}, exposed=WAITING, stage=1) for rank in (2, 3)]
    assert find_stragglers([*first, *second]) == ()
    late = record(3, HEALTHY | {"forward": 90, "data_wait": 41}, exposed=WAITING, stage=1)
    assert only(find_stragglers([*first, second[0], late])).rank == 3


def test_a_rank_alone_or_untimed_is_held_against_nobody() -> None:
    slow = record(1, HEALTHY | {"data_wait": 41}, exposed=WAITING)
    untimed = replace(healthy(0), profile=replace(healthy(0).profile, timing=None))
    assert find_stragglers([]) == find_stragglers([slow]) == find_stragglers([slow, untimed]) == ()
