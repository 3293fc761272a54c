"""What a rank sends: it arrives as it was, it fits, and nothing else is taken for it."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from lightning_flops.analysis.rank_record import (
    RECORD_LIMIT_BYTES,
    RankRecord,
    make_rank_record,
    pack,
    unpack,
)
from lightning_flops.config import ProfilerConfig
from lightning_flops.schema.communication import CollectiveCalls
from lightning_flops.schema.ranks import RankAbsence
from tests.report import windows
from tests.report.traced_windows import mlp_traced
from tests.report.windows import build_profile

WINDOW, TRACED = mlp_traced()
PROFILE = build_profile(WINDOW, config=ProfilerConfig(peak_flops_per_sec=700e9), traced=TRACED)
RECORD = make_rank_record(PROFILE)


def with_calls(record: RankRecord, *calls: CollectiveCalls) -> RankRecord:
    traced = record.profile.traced
    assert traced is not None
    return replace(record, profile=replace(record.profile, traced=replace(traced, collectives=calls)))


def calls(latency_ns: array[int], name: str = "allreduce") -> CollectiveCalls:
    return CollectiveCalls(
        name=name,
        group="world",
        group_size=2,
        step=8,
        calls=len(latency_ns),
        bytes=4 * len(latency_ns),
        total_ns=sum(latency_ns),
        latency_ns=latency_ns,
    )


def test_record_has_the_profile_without_its_long_tables_and_the_modules_own_times_in_nanoseconds() -> None:
    mine = RECORD.profile
    for name in ("context", "profile_step", "counted_steps", "flops", "samples", "params", "timing", "memory", "rates"):
        assert getattr(mine, name) == getattr(PROFILE, name)
    assert (mine.modules, mine.operators, mine.traced and mine.traced.tables) == ((), (), None)
    assert mine.peaks_flops_per_sec["float32"] == 700e9
    # mlp_traced: fc1 takes 2 ms forward and 3 backward, act 0.5 and 1, fc2 1 and 4, the root 1.5 forward.
    found = dict(zip(RECORD.module_names, zip(RECORD.own_forward_ns, RECORD.own_backward_ns, strict=True), strict=True))
    assert found == {
        "": (1_500_000, 0),
        "fc1": (2_000_000, 3_000_000),
        "act": (500_000, 1_000_000),
        "fc2": (1_000_000, 4_000_000),
    }


@pytest.mark.parametrize("name", windows.WINDOWS)
def test_record_of_any_window_arrives_as_it_was(name: str) -> None:
    record = make_rank_record(build_profile(windows.WINDOWS[name](), config=ProfilerConfig()))
    assert unpack(pack(record)) == record


def test_absence_arrives_with_as_much_of_its_reason_as_fits() -> None:
    absence = RankAbsence(rank=3, reason='its profiler failed: RuntimeError: "no" \u2028 memory')
    assert unpack(pack(absence)) == absence
    long = RankAbsence(rank=3, reason="why " * 100_000)
    assert unpack(pack(long)) == replace(long, reason=long.reason[:500])


def test_too_large_a_record_goes_without_modules_and_single_calls_and_says_so() -> None:
    # 8,000 names of 12 bytes that share nothing do not fit.
    names = tuple(f"{(i * 2654435761 * 40503) % 2**48:012x}" for i in range(8000))
    times = array("q", range(8000))
    record = replace(RECORD, module_names=names, own_forward_ns=times, own_backward_ns=times)
    packed = pack(with_calls(record, calls(times[:1_000])))
    arrived = unpack(packed)
    assert len(packed) <= RECORD_LIMIT_BYTES
    assert isinstance(arrived, RankRecord) and arrived.profile.traced is not None
    assert (arrived.module_names, len(arrived.own_forward_ns), len(arrived.own_backward_ns)) == ((), 0, 0)
    assert [(one.calls, len(one.latency_ns)) for one in arrived.profile.traced.collectives] == [(1_000, 0)]
    assert arrived.left_out == ("the times of its modules and of each single call of a collective",)
