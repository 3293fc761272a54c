"""What a rank sends: it arrives as it was, it fits, and nothing else is taken for it."""

from __future__ import annotations

import tracemalloc
import zlib
from array import array
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops.analysis.rank_record import (
    INFLATED_LIMIT_BYTES,
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

REFUSED = (zlib.error, msgspec.MsgspecError, UnicodeDecodeError)

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


def test_texts_and_numbers_with_a_class_of_their_own_arrive_as_plain_ones() -> None:
    class Version(str):
        """As that of ``torch.__version__``."""

    class Seconds(float):
        """As numpy's."""

    context = replace(RECORD.profile.context, torch_version=Version("2.13.0"))
    arrived = unpack(pack(replace(RECORD, profile=replace(RECORD.profile, context=context, samples=Seconds(7.5)))))
    assert isinstance(arrived, RankRecord)
    assert type(arrived.profile.context.torch_version) is str
    assert (arrived.profile.context.torch_version, arrived.profile.samples) == ("2.13.0", 7.5)


@pytest.mark.parametrize("data", [b"", b"PK", zlib.compress(b""), zlib.compress(b"\x90"), pack(RECORD)[:-20]])
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(REFUSED):
        unpack(data)


@given(st.integers(min_value=0, max_value=10_000), st.binary(min_size=1, max_size=20))
@settings(max_examples=100, deadline=None)
def test_record_that_was_changed_is_refused_or_has_other_numbers(place: int, noise: bytes) -> None:
    body = bytearray(zlib.decompress(pack(RECORD)))
    start = place % len(body)
    body[start : start + len(noise)] = noise
    try:
        arrived = unpack(zlib.compress(bytes(body)))
    except REFUSED:
        return
    assert isinstance(arrived, RankRecord)


def test_little_is_inflated_of_a_record_that_inflates_without_end() -> None:
    bomb = zlib.compress(b"\xdb\xff\xff\xff\xff" + b" " * (60 << 20), 9)  # a text of 4 GB, of which 60 MB are there
    tracemalloc.start()
    try:
        with pytest.raises(REFUSED):
            unpack(bomb)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 3 * INFLATED_LIMIT_BYTES


def test_record_of_a_thousand_modules_and_three_thousand_calls_fits_whole() -> None:
    names = tuple(f"model.layers.{i // 10}.block.projection_{i % 10}" for i in range(1000))
    numbers = array("q", [(i * 7919 * 10_007) % 2**32 for i in range(3000)])  # nothing to compress
    record = replace(RECORD, module_names=names, own_forward_ns=numbers[:1000], own_backward_ns=numbers[1000:2000])
    record = with_calls(record, calls(numbers))
    packed = pack(record)
    assert len(packed) <= RECORD_LIMIT_BYTES
    assert unpack(packed) == record


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


def test_record_that_cannot_fit_is_not_packed() -> None:
    noise = "".join(f"{(i * 2654435761) % 2**32:08x}" for i in range(30_000))
    huge = replace(RECORD, profile=replace(RECORD.profile, context=replace(WINDOW.context, host=noise)))
    with pytest.raises(ValueError, match="still larger than 65,536 bytes"):
        pack(huge)


def test_names_that_ranks_have_in_common_are_one_object() -> None:
    first, second = unpack(pack(RECORD)), unpack(pack(replace(RECORD, left_out=("one",))))
    assert isinstance(first, RankRecord) and isinstance(second, RankRecord)
    assert first.module_names is second.module_names
