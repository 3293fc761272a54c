from __future__ import annotations

import json
import math
import tracemalloc
import zlib
from array import array
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_flops.analysis.rank_record import (
    FORM_LIMIT_BYTES,
    RECORD_LIMIT_BYTES,
    RankRecordError,
    make_rank_record,
    pack,
    unpack,
)
from lightning_flops.analysis.templates import Numbers, Template
from lightning_flops.config import ProfilerConfig
from lightning_flops.records import PhaseFlops
from lightning_flops.schema.communication import CollectiveCalls
from lightning_flops.schema.rank_record import RankRecord
from lightning_flops.schema.ranks import RankAbsence
from lightning_flops.schema.step import PartTiming
from tests.report import windows
from tests.report.traced_windows import clocked, mlp_traced
from tests.report.windows import build_profile

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


def test_forwards_that_a_clock_timed_go_without_backwards() -> None:
    window, traced = clocked()
    record = make_rank_record(build_profile(window, config=ProfilerConfig(), traced=traced))
    assert record.summary.modules_clock == "borders"
    assert dict(zip(record.module_names, record.own_forward_ns, strict=True))["fc1"] == 2_000_000
    assert len(record.own_backward_ns) == 0
    assert unpack(pack(record)) == record


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
counts = st.integers(min_value=0, max_value=2**80)
texts = st.text(max_size=8)


@st.composite
def records(draw: st.DrawFn) -> RankRecord:
    names = draw(st.lists(texts, unique=True, max_size=6))
    times = st.lists(nanoseconds, min_size=len(names), max_size=len(names)).map(lambda found: array("q", found))
    summary = RECORD.summary
    assert summary.timing is not None
    parts = st.builds(
        PartTiming,
        name=texts,
        mean_sec=seconds,
        share=st.none() | seconds,
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
            flops=replace(summary.flops, forward=draw(counts), causal_skipped=-draw(counts)),
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


def test_whole_number_in_the_place_of_a_fraction_arrives_as_that_fraction() -> None:
    # peak_flops_per_sec may be given as an int.
    profile = build_profile(WINDOW, config=ProfilerConfig(peak_flops_per_sec=700))
    arrived = unpack(pack(make_rank_record(profile)))
    assert isinstance(arrived, RankRecord)
    assert arrived.summary.peaks_flops_per_sec["float32"] == 700.0


def test_number_that_is_none_is_not_sent() -> None:
    wrong = replace(RECORD, summary=replace(RECORD.summary, samples=math.nan))
    with pytest.raises(RankRecordError, match=r"cannot be packed: summary\.samples is nan"):
        pack(wrong)


def _without_end(data: bytes) -> bytes:
    return data[:-1]


def _with_a_bit_turned(data: bytes) -> bytes:
    return data[:200] + bytes([data[200] ^ 1]) + data[201:]


def _of_another_version(data: bytes) -> bytes:
    return data[:4] + bytes([data[4] + 1]) + data[5:]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_without_end, "cut or changed"),
        (_with_a_bit_turned, "cut or changed"),
        (_of_another_version, "a record of version 2, and this package reads version 1"),
        (lambda data: b"", "no record of a rank"),
        (lambda data: data[:10], "no record of a rank"),
        (lambda data: b"PK" + data, "no record of a rank"),
        (lambda data: data * 2, "cut or changed"),
    ],
)
def test_damaged_or_foreign_record_says_what_it_is(damage: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(RankRecordError, match=message):
        unpack(damage(pack(RECORD)))


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=200, deadline=None)
def test_nothing_but_a_record_error_comes_of_any_bytes(noise: bytes, after_the_magic: bool) -> None:
    with pytest.raises(RankRecordError):
        unpack(b"LFRR\x01\x00\x01\x00" + noise if after_the_magic else noise)


@given(st.integers(min_value=0, max_value=10_000), st.binary(min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
def test_body_that_its_checksum_vouches_for_and_nobody_wrote_is_a_record_error(place: int, noise: bytes) -> None:
    packed = pack(RECORD)
    body = bytearray(packed[24:])
    start = place % len(body)
    body[start : start + len(noise)] = noise
    forged = packed[:8] + zlib.crc32(bytes(body)).to_bytes(4, "little") + packed[12:24] + bytes(body)
    try:
        arrived = unpack(forged)
    except RankRecordError:
        return
    assert isinstance(arrived, RankRecord)  # noise within the numbers is other numbers


NOT_OWN = (b"7", b"[]", b"[7,7,7]", b"[[7],[],[]]", b'[["host"],[1.5],[]]', b'[["host"],[],[["d",1]]]', b"{}", b"\xff")


@pytest.mark.parametrize("own", [*NOT_OWN, b"[" * 30_000])
def test_own_part_that_nobody_wrote_is_a_record_error(own: bytes) -> None:
    packed = pack(RECORD)
    form, before, fractions = (int.from_bytes(packed[at : at + 4], "little") for at in (12, 16, 20))
    body = packed[24 : 24 + form] + own + packed[24 + form + before :]
    head = packed[:8] + zlib.crc32(body).to_bytes(4, "little")
    lengths = b"".join(length.to_bytes(4, "little") for length in (form, len(own), fractions))
    with pytest.raises(RankRecordError):
        unpack(head + lengths + body)


# ---- records that mean harm


def forged(form: bytes, *, own: bytes = b"[[],[],[]]", kind: int = 1, behind: bytes = b"") -> bytes:
    """A record with its checksum and lengths as they should be."""
    body = form + own + behind
    lengths = b"".join(length.to_bytes(4, "little") for length in (len(form), len(own), 0))
    head = b"LFRR" + b"\x01\x00" + kind.to_bytes(2, "little") + zlib.crc32(body).to_bytes(4, "little")
    return head + lengths + body


def deflated(text: str) -> bytes:
    return zlib.compress(text.encode(), 9)


def deflated_spaces(megabytes: int) -> bytes:
    deflater = zlib.compressobj(9)
    return b"".join(deflater.compress(b" " * 2**20) for _ in range(megabytes)) + deflater.flush()


DEEP = '{"module_names": ' + "[" * 100_000 + "]" * 100_000 + "}"
HARMFUL = {
    "inflates to 60 MB": (forged(deflated_spaces(60)), "its form is larger than 1,048,576 bytes"),
    "inflates to 60 MB of reasons": (forged(deflated_spaces(60), kind=2), "its form is larger than 1,048,576 bytes"),
    "a megabyte": (
        forged(deflated("{}"), behind=b"\0" * 2**20),
        "it is larger than any record: 1,048,620 bytes of 65,536",
    ),
    "nested deeply": (forged(deflated(DEEP)), "nested deeper than 100 levels"),
    "a number of 5,000 digits": (
        forged(deflated('{"module_names": ' + "9" * 5000 + "}")),
        "holds a whole number of 5,000 digits",
    ),
    "numbers of 5,000 digits": (
        forged(deflated("{}"), own=b"[[],[" + b"9" * 5000 + b"],[]]"),
        "holds a whole number of 5,000 digits",
    ),
    "a form without an end": (forged(deflated("{}")[:-4]), "its parts do not go together"),
    "a form with more behind": (forged(deflated("{}") + b"more"), "its parts do not go together"),
    "no form": (forged(b""), "its parts do not go together"),
    "no text": (forged(zlib.compress(b"\xff\xfe")), "cannot be read: 'utf-8' codec"),
    "another thing": (forged(deflated("[]")), "cannot be read"),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_record_that_means_harm_is_refused_at_the_price_of_a_small_one(case: str) -> None:
    data, words = HARMFUL[case]
    tracemalloc.start()
    try:
        with pytest.raises(RankRecordError) as caught:
            unpack(data)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert words in str(caught.value)
    assert len(str(caught.value)) < 300
    # The form inflated, and as a text; twice more for what looks through it.
    assert most < 5 * FORM_LIMIT_BYTES


def test_reasons_that_nobody_would_send_are_cut() -> None:
    long = json.dumps({"rank": 3, "reason": "why " * 100_000})
    assert unpack(forged(deflated(long), kind=2)) == RankAbsence(rank=3, reason=("why " * 100_000)[:500])


def test_names_that_do_not_fit_when_they_are_inflated_are_left_out() -> None:
    # 3,000 names of 400 characters compress to some kilobytes, and are 1.2 MB: 2,000 of them are under 1 MiB.
    names = tuple(f"{'block.' * 66}{i:04d}" for i in range(3000))
    times = array("q", range(3000))
    record = replace(RECORD, module_names=names, own_forward_ns=times, own_backward_ns=times, collectives=())
    arrived = unpack(pack(record))
    assert isinstance(arrived, RankRecord)
    assert arrived.module_names == names[1000:]


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


def test_modules_that_take_least_are_left_out_of_a_record_that_is_too_large() -> None:
    # 5,000 names that share nothing: 2,000 of them fit. Times rise with the number, so the first ones go.
    names = tuple(f"{(i * 2654435761) % 2**48:012x}" for i in range(5000))
    times = array("q", range(5000))
    record = replace(RECORD, module_names=names, own_forward_ns=times, own_backward_ns=times, collectives=())
    packed = pack(record)
    assert len(packed) <= RECORD_LIMIT_BYTES
    arrived = unpack(packed)
    assert isinstance(arrived, RankRecord)
    assert arrived.module_names == names[3000:]
    assert arrived.own_forward_ns == times[3000:]
    assert arrived.left_out == ("times of 3,000 of 5,000 modules, those that took least",)


def test_first_calls_of_each_collective_are_kept_where_there_are_too_many() -> None:
    # 20,000 calls of 4 bytes do not fit, 8,000 do: all 1,000 of the small group, and of the two others 3,500 each.
    many = array("q", range(20_000))
    record = replace(
        RECORD,
        collectives=tuple(
            replace(calls(name=name), calls=number, latency_ns=many[:number])
            for name, number in (("allreduce", 10_000), ("broadcast", 1_000), ("all_gather", 9_000))
        ),
    )
    arrived = unpack(pack(record))
    assert isinstance(arrived, RankRecord)
    assert [len(one.latency_ns) for one in arrived.collectives] == [3_500, 1_000, 3_500]
    assert [one.calls for one in arrived.collectives] == [10_000, 1_000, 9_000]
    assert arrived.collectives[0].latency_ns == many[:3_500]
    assert arrived.left_out == ("12,000 of 20,000 collective calls, the last ones of each collective",)


def test_record_that_cannot_fit_is_refused() -> None:
    huge = replace(RECORD, summary=replace(RECORD.summary, context=replace(WINDOW.context, host=_noise(70_000))))
    with pytest.raises(RankRecordError, match="the record is too large: "):
        pack(huge)


def _noise(chars: int) -> str:
    return "".join(f"{(i * 2654435761) % 2**32:08x}" for i in range(chars // 8))


def test_numbers_leave_and_come_back_in_their_order() -> None:
    numbers = array("q", [6, 7])
    value = (PhaseFlops(forward=1, backward=2), {"a": 0.5, "b": 3}, "text", None, True, (4, (1.5, 5)), numbers)
    template = Template(value)
    assert template.empty() == (PhaseFlops(), {"a": 0.0, "b": 0}, "text", None, True, (0, (0.0, 0)), array("q"))
    left = template.split(value)
    assert (sorted(left.integers), sorted(left.floats)) == ([0, 0, 1, 2, 3, 4, 5], [0.5, 1.5])
    assert (left.arrays, left.texts) == ([numbers], [])
    assert Template(template.empty()).fill(left) == value


def test_texts_of_some_fields_can_be_left_open() -> None:
    template = Template(WINDOW.context, open_texts=("host",))
    assert template.empty().host == ""
    assert template.empty().device_name == WINDOW.context.device_name
    left = template.split(replace(WINDOW.context, host="node7"))
    assert left.texts == ["node7"]
    assert template.fill(left).host == "node7"


@pytest.mark.parametrize(("integers", "floats"), [([1], [1.0]), ([1, 2, 3], [1.0]), ([1, 2], []), ([1, 2], [1.0, 2.0])])
def test_more_or_fewer_numbers_than_places_are_refused(integers: list[int], floats: list[float]) -> None:
    with pytest.raises(ValueError, match="not as many numbers as places"):
        Template((1, (2, 1.0))).fill(Numbers(integers=integers, floats=floats, arrays=[], texts=[]))


def test_names_that_ranks_have_in_common_are_one_object() -> None:
    first, second = unpack(pack(RECORD)), unpack(pack(replace(RECORD, summary=replace(RECORD.summary, notes=7))))
    assert isinstance(first, RankRecord) and isinstance(second, RankRecord)
    assert first.module_names is second.module_names


def test_json_of_the_form_has_no_number_but_zero() -> None:
    """What ranks differ in does not stand in what they have in common, or thousands of ranks are read one by one."""
    packed = pack(RECORD)
    length = int.from_bytes(packed[12:16], "little")
    form = json.loads(zlib.decompress(packed[24 : 24 + length]))

    def numbers(part: object) -> set[float]:
        if isinstance(part, dict):
            return set().union(*map(numbers, part.values()))
        if isinstance(part, list):
            return set().union(*map(numbers, part))
        return {part} if isinstance(part, (int, float)) and not isinstance(part, bool) else set()

    assert numbers(form) == {0}
