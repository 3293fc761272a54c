from __future__ import annotations

import tracemalloc
import zlib
from array import array
from dataclasses import replace
from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops.analysis.rank_record import (
    INFLATED_LIMIT_BYTES,
    RECORD_LIMIT_BYTES,
    make_rank_record,
    pack,
    unpack,
)
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import TimePhase
from lightning_flops.schema.communication import CollectiveCalls
from lightning_flops.schema.rank_record import RankRecord
from lightning_flops.schema.ranks import RankAbsence
from lightning_flops.schema.step import PartTiming
from tests.report import windows
from tests.report.traced_windows import mlp_traced
from tests.report.windows import build_profile

REFUSED = (zlib.error, msgspec.MsgspecError, UnicodeDecodeError)

WINDOW, TRACED = mlp_traced()
PROFILE = build_profile(WINDOW, config=ProfilerConfig(peak_flops_per_sec=700e9), traced=TRACED)
RECORD = make_rank_record(PROFILE)


def calls(*latency_ns: int, name: str = "allreduce", group: str = "world") -> CollectiveCalls:
    return CollectiveCalls(
        name=name,
        group=group,
        group_size=2,
        step=8,
        calls=len(latency_ns),
        bytes=4 * len(latency_ns),
        total_ns=sum(latency_ns),
        latency_ns=array("q", latency_ns),
    )


def test_record_says_what_the_profile_says() -> None:
    summary = RECORD.summary
    assert (summary.context, summary.profile_step, summary.counted_steps) == (WINDOW.context, 3, 1)
    assert (summary.flops.forward, summary.flops.backward) == (600_000_000, 800_000_000)
    assert (summary.samples, summary.params, summary.local_params) == (100.0, 3_002_500, 3_002_500)
    assert summary.timing == PROFILE.timing
    assert summary.peak_memory_bytes == 900_000_000
    assert (summary.traced_step, summary.traced_steps) == (8, 1)
    assert summary.peaks_flops_per_sec["float32"] == 700e9


def test_modules_go_with_their_own_times_in_nanoseconds() -> None:
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


def test_absence_arrives_with_its_reason() -> None:
    absence = RankAbsence(rank=3, reason='its profiler failed: RuntimeError: "no" \u2028 memory')
    assert unpack(pack(absence)) == absence


def test_reason_of_any_length_fits() -> None:
    arrived = unpack(pack(RankAbsence(rank=3, reason="why " * 100_000)))
    assert isinstance(arrived, RankAbsence)
    assert arrived.reason == ("why " * 100_000)[:500]


nanoseconds = st.integers(min_value=-(2**62), max_value=2**62)
seconds = st.floats(min_value=-1e100, max_value=1e100)  # what is read of JSON, and more than a run can have
counts = st.integers(min_value=0, max_value=2**63)  # FLOPs of one rank's step, too
texts = st.text(max_size=8)


@st.composite
def records(draw: st.DrawFn) -> RankRecord:
    names = draw(st.lists(texts, unique=True, max_size=6))
    times = st.lists(nanoseconds, min_size=len(names), max_size=len(names)).map(lambda found: array("q", found))
    summary = RECORD.summary
    assert summary.timing is not None
    parts = st.builds(
        PartTiming,
        phases=st.lists(st.sampled_from(get_args(TimePhase)), max_size=3).map(tuple),
        mean_sec=seconds,
        typical_sec=seconds,
        minimum_sec=seconds,
        median_sec=seconds,
        maximum_sec=seconds,
        deviation_sec=seconds,
    )
    timing = replace(
        summary.timing,
        parts=tuple(draw(st.lists(parts, max_size=4))),
        reader_sec=draw(st.none() | seconds),
        excluded_sec=draw(st.dictionaries(texts, seconds, max_size=2)),
    )
    collectives = st.builds(
        CollectiveCalls,
        name=texts,
        group=st.none() | texts,
        group_size=st.none() | counts,
        channel=st.none() | texts,
        step=st.none() | counts,
        calls=counts,
        bytes=st.none() | counts,
        total_ns=nanoseconds,
        latency_ns=st.lists(nanoseconds, max_size=5).map(lambda found: array("q", found)),
    )
    return replace(
        RECORD,
        summary=replace(
            summary,
            context=replace(summary.context, rank=draw(counts), host=draw(texts), device_name=draw(texts)),
            flops=replace(summary.flops, forward=draw(counts), skipped=-draw(counts)),
            samples=draw(st.none() | seconds),
            local_params=draw(st.none() | counts),
            timing=draw(st.none() | st.just(timing)),
            notes=draw(counts),
        ),
        module_names=tuple(names),
        own_forward_ns=draw(times),
        own_backward_ns=draw(times | st.just(array("q"))),
        collectives=tuple(draw(st.lists(collectives, max_size=3))),
        left_out=tuple(draw(st.lists(texts, max_size=2))),
    )


@given(records())
@settings(max_examples=60, deadline=None)
def test_whatever_a_record_holds_arrives_as_it_was(record: RankRecord) -> None:
    assert unpack(pack(record)) == record


def test_texts_and_numbers_with_a_class_of_their_own_arrive_as_plain_ones() -> None:
    class Version(str):
        """As that of ``torch.__version__``."""

    class Seconds(float):
        """As numpy's."""

    summary = RECORD.summary
    context = replace(summary.context, torch_version=Version("2.13.0"))
    arrived = unpack(pack(replace(RECORD, summary=replace(summary, context=context, samples=Seconds(7.5)))))
    assert isinstance(arrived, RankRecord)
    assert type(arrived.summary.context.torch_version) is str
    assert (arrived.summary.context.torch_version, arrived.summary.samples) == ("2.13.0", 7.5)


def test_whole_number_in_the_place_of_a_fraction_arrives_as_that_fraction() -> None:
    # peak_flops_per_sec may be given as an int.
    profile = build_profile(WINDOW, config=ProfilerConfig(peak_flops_per_sec=700))
    arrived = unpack(pack(make_rank_record(profile)))
    assert isinstance(arrived, RankRecord)
    assert arrived.summary.peaks_flops_per_sec["float32"] == 700.0


@pytest.mark.parametrize("data", [b"", b"PK", zlib.compress(b""), zlib.compress(b"\x90"), pack(RECORD)[:-20]])
def test_bytes_that_are_no_record_are_refused(data: bytes) -> None:
    with pytest.raises(REFUSED):
        unpack(data)


@given(st.integers(min_value=0, max_value=10_000), st.binary(min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
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
    record = replace(
        RECORD,
        module_names=names,
        own_forward_ns=numbers[:1000],
        own_backward_ns=numbers[1000:2000],
        collectives=(replace(calls(), calls=3000, latency_ns=numbers),),
    )
    packed = pack(record)
    assert len(packed) <= RECORD_LIMIT_BYTES
    assert unpack(packed) == record


def test_too_large_a_record_keeps_its_slowest_modules_and_first_calls_and_says_so() -> None:
    # 8,000 names of 12 bytes that share nothing do not fit, and half of them do. Times rise with the number.
    names = tuple(f"{(i * 2654435761 * 40503) % 2**48:012x}" for i in range(8000))
    times = array("q", range(8000))
    collectives = tuple(
        replace(calls(name=name), calls=number, latency_ns=times[:number])
        for name, number in (("allreduce", 1_000), ("broadcast", 11))
    )
    record = replace(RECORD, module_names=names, own_forward_ns=times, own_backward_ns=times, collectives=collectives)
    packed = pack(record)
    arrived = unpack(packed)
    assert len(packed) <= RECORD_LIMIT_BYTES
    assert isinstance(arrived, RankRecord)
    assert arrived.module_names == names[4000:]
    assert arrived.own_forward_ns == arrived.own_backward_ns == times[4000:]
    assert [(one.calls, one.latency_ns) for one in arrived.collectives] == [(1_000, times[:500]), (11, times[:5])]
    assert arrived.left_out == ("all but the 4,000 slowest of 8,000 modules and 505 of 1,011 collective calls",)


def test_record_that_cannot_fit_is_not_packed() -> None:
    noise = "".join(f"{(i * 2654435761) % 2**32:08x}" for i in range(30_000))
    huge = replace(RECORD, summary=replace(RECORD.summary, context=replace(WINDOW.context, host=noise)))
    with pytest.raises(ValueError, match="still larger than 65,536 bytes"):
        pack(huge)


def test_names_that_ranks_have_in_common_are_one_object() -> None:
    first, second = unpack(pack(RECORD)), unpack(pack(replace(RECORD, summary=replace(RECORD.summary, notes=7))))
    assert isinstance(first, RankRecord) and isinstance(second, RankRecord)
    assert first.module_names is second.module_names
