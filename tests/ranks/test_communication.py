"""Communication of real ranks, and of the two whose traces' answers are known, as the merged report has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from lightning_flops.analysis.ranks import (
    RankRecord,
    find_stragglers,
    find_stragglers_in_traces,
    make_rank_record,
    pack,
    unpack,
    with_ranks,
)
from lightning_flops.analysis.trace_report import analyze_trace
from lightning_flops.config import ADVICE_THRESHOLDS, ProfilerConfig
from lightning_flops.records import PhaseSeconds
from lightning_flops.schema.profile import Profile
from lightning_flops.trace.read import load_trace
from lightning_flops.trace.steps import step_parts
from lightning_flops.trace.tables import collective_calls
from tests.analysis.in_memory import known
from tests.ranks import EVERYTHING
from tests.ranks.launching import launch, profile_in
from tests.report import windows
from tests.report.windows import build_profile

TRACES = Path(__file__).parents[1] / "data" / "traces"
US = 1e-6
RANKS = 2


# ---- two ranks whose answers are known, sent as records


def known_profile(rank: int) -> Profile:
    """The profile of a rank that took that trace, and whose timed steps were as long as the traced ones."""
    trace = load_trace(TRACES / f"two_ranks_known_answers.rank{rank}.pt.trace.json")
    window = windows.mlp_window()
    window = replace(
        window,
        context=replace(window.context, rank=rank, world_size=RANKS, dp_size=RANKS),
        timed_steps=tuple(replace(one, seconds=PhaseSeconds(other=9990 * US)) for one in window.timed_steps),
    )
    parts, calls = step_parts(trace), collective_calls(trace)
    traced = windows.traced(tables=analyze_trace(trace), parts=parts, collectives=calls, steps=3)
    return build_profile(window, config=ProfilerConfig(), traced=traced)


def test_records_say_what_is_hidden_what_is_transfer_and_who_waits_for_whom() -> None:
    records = [unpack(pack(make_rank_record(known_profile(rank)))) for rank in range(RANKS)]
    found = known(known(with_ranks(known_profile(0), records).ranks).communication)
    assert found.notes == ()
    first, second = (row.overlap for row in found.ranks)
    assert (first.overlap_ratio, second.overlap_ratio) == (0.50, 0.25)
    steps = 3
    assert (first.wall_us, second.wall_us) == (steps * 9990, steps * 9990)
    assert (first.computation_us, second.computation_us) == (steps * 5000, steps * 5500)
    assert (first.communication_us, second.communication_us) == (steps * 4000, steps * 2000)
    assert (first.exposed_us, second.exposed_us) == (steps * 2000, steps * 1500)
    assert [(row.transfer_us, row.wait_us, row.steps) for row in found.ranks] == [(6000, 6000, 3), (6000, 0, 3)]
    for row in found.ranks:
        (collective,) = row.collectives
        # One call a step of 1,048,576 floats of 4 bytes, in three steps.
        assert (collective.name, collective.calls, collective.matched_calls) == ("allreduce", 3, 3)
        assert collective.bytes == 3 * 1_048_576 * 4
    # 5,500 of work against 5,000; it is a twentieth of the step, below the threshold of a tenth.
    measured = [record for record in records if isinstance(record, RankRecord)]
    assert find_stragglers(measured) == ()
    parts = {one.rank: known(one.profile.traced).parts for one in measured}
    thresholds = {**ADVICE_THRESHOLDS, "straggler": 1.05, "straggler_sec": 0.0}
    (late,) = find_stragglers_in_traces(parts, thresholds=thresholds)  # it marks no parts of a step
    assert (late.rank, round(late.late_sec / US, 9)) == (1, 500)


# ---- real ranks


launched = partial(launch, "tests.ranks.scenarios_communication", ranks=RANKS, imports=EVERYTHING)


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        # One bucket of gradients.
        ("ddp", [("all_reduce", 1)]),
        # Six small parameters, each gathered for itself; all gradients with a norm, and a flag.
        ("zero_3", [("all_gather", 6), ("all_reduce", 2)]),
    ],
)
def test_what_a_strategy_communicates_is_there_call_by_call(scenario: str, expected: Sequence[tuple[str, int]]) -> None:
    for returned in launched()(scenario):
        traced = known(profile_in(returned).traced)
        rows = [(one.name, one.calls) for one in traced.collectives]
        assert sorted(row for row in rows if row[0] != "broadcast") == expected
        assert all(len(one.latency_ns) == one.calls and one.group == "[0, 1]" for one in traced.collectives)


@pytest.mark.parametrize("scenario", ["ddp", "zero_3"])
def test_all_calls_of_real_ranks_are_matched_and_parts_of_a_traced_step_add_up_to_it(scenario: str) -> None:
    profiles = [profile_in(returned) for returned in launched()(scenario)]
    found = known(known(profiles[0].ranks).communication)
    assert found.notes == ()
    assert all(one.matched_calls == one.calls for row in found.ranks for one in row.collectives)
    first, second = found.ranks
    # A call's transfer is the same on both, and no rank transfers longer than it communicates, where calls overlap.
    transfers = [{one.name: one.transfer_us for one in row.collectives} for row in (first, second)]
    assert transfers[0] == transfers[1]
    for row in (first, second):
        assert 0 < known(row.transfer_us) <= row.overlap.communication_us
    # Nobody waits longer than its calls last.
    assert min(row.wait_us for row in found.ranks if row.wait_us is not None) >= 0
    for profile in profiles:
        traced = known(profile.traced)
        share, nanosecond = known(known(traced.tables).overlap), 1e-9
        assert sum(round(part.wall_sec / nanosecond) for part in traced.parts) == round(share.wall_us * 1000)
        exposed_ns = round((share.communication_us - share.overlap_us) * 1000)
        assert sum(round(part.exposed_sec / nanosecond) for part in traced.parts) == exposed_ns > 0
        assert {part.name for part in traced.parts} >= {"forward", "backward", "optimizer"}
