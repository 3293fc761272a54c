"""What one rank sends to the rank that reports: its profile in few numbers, as compressed msgpack."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import replace
from functools import lru_cache

import msgspec

from lightning_flops.schema.profile import Profile
from lightning_flops.schema.rank_record import RankRecord, RankSummary
from lightning_flops.schema.ranks import RankAbsence

RECORD_LIMIT_BYTES, INFLATED_LIMIT_BYTES = 65_536, 4 << 20
"""Most bytes of a packed record, and of one before it is compressed."""


def _plain(value: object) -> bytes | float | str:  # of ``torch.__version__``, whose class is its own, the text
    return value.tobytes() if isinstance(value, array) else float(value) if isinstance(value, float) else str(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(RankRecord | tuple[int, str], dec_hook=lambda _, data: array("q", data))
_shared = lru_cache(maxsize=8)(tuple[str, ...])  # of thousands of ranks, one copy of their modules' names


def make_rank_record(profile: Profile) -> RankRecord:
    """The record of the rank that *profile* is of."""
    timed = [(module.name, module.times) for module in profile.modules if module.times is not None]
    backward_sec = [times.own_backward_sec for _, times in timed]
    traced, memory = profile.traced, profile.memory
    tables = None if traced is None else traced.tables
    alike = "context profile_step samples tokens params trainable_params local_params flops dtypes lower_bound timing"
    return RankRecord(
        summary=RankSummary(
            **{name: getattr(profile, name) for name in alike.split()},
            peaks_flops_per_sec=profile.peaks_flops_per_sec,
            counted_steps=len(profile.counted_steps),
            peak_memory_bytes=None if memory is None else memory.run_peak_bytes,
            traced_step=None if traced is None else traced.index,
            traced_steps=0 if tables is None else len(tables.step_times.steps),
            traced_parts=() if traced is None else traced.parts,
            overlap=None if tables is None else tables.overlap,
            modules_clock=timed[0][1].clock if timed else None,
            notes=len(profile.notes),
        ),
        module_names=tuple(name for name, _ in timed),
        own_forward_ns=array("q", [round(1e9 * times.own_forward_sec) for _, times in timed]),
        own_backward_ns=array("q", [round(1e9 * (sec or 0)) for sec in backward_sec if {*backward_sec} != {None}]),
        collectives=() if traced is None else traced.collectives,
    )


def pack(answer: RankRecord | RankAbsence) -> bytes:
    """*answer* in at most ``RECORD_LIMIT_BYTES``, which may leave out modules and collective calls, or ValueError."""
    sent = (answer.rank, answer.reason[:500]) if isinstance(answer, RankAbsence) else answer
    for halvings in range(20):
        encoded = _encoder.encode(_halved(sent, times=halvings) if halvings and isinstance(sent, RankRecord) else sent)
        packed = zlib.compress(encoded, 1)
        if len(packed) <= RECORD_LIMIT_BYTES and len(encoded) <= INFLATED_LIMIT_BYTES:
            return packed
    raise ValueError(f"without modules and calls the record is still larger than {RECORD_LIMIT_BYTES:,} bytes")


def unpack(data: bytes) -> RankRecord | RankAbsence:
    """What ``pack`` made *data* of; raises an error of zlib or msgspec for anything else."""
    inflated = zlib.decompressobj().decompress(data, INFLATED_LIMIT_BYTES)
    try:
        answer: RankRecord | tuple[int, str] = _decoder.decode(inflated)
    except RecursionError as error:
        raise msgspec.DecodeError("it nests too deeply") from error
    if isinstance(answer, tuple):
        return RankAbsence(rank=answer[0], reason=answer[1])
    return replace(answer, module_names=_shared(answer.module_names))


def _halved(record: RankRecord, *, times: int) -> RankRecord:
    """*record* with the slowest of its modules, and the first calls of each collective, halved so many *times*."""
    forward, backward = record.own_forward_ns, record.own_backward_ns
    spent = [sum(pair) for pair in zip(forward, backward, strict=True)] if backward else forward
    modules = sorted(sorted(range(len(spent)), key=lambda place: -spent[place])[: len(spent) >> times])
    calls = [one.latency_ns[: len(one.latency_ns) >> times] for one in record.collectives]
    kept, total = sum(map(len, calls)), sum(len(one.latency_ns) for one in record.collectives)
    left = f"the {len(modules):,} slowest of {len(spent):,} modules and {kept:,} of {total:,} collective calls"
    return replace(
        record,
        module_names=tuple(record.module_names[place] for place in modules),
        own_forward_ns=array("q", [forward[place] for place in modules]),
        own_backward_ns=array("q", [backward[place] for place in modules] if backward else []),
        collectives=tuple(replace(one, latency_ns=few) for one, few in zip(record.collectives, calls, strict=True)),
        left_out=(f"all but {left}",),
    )
