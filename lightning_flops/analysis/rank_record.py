"""What one rank sends to the rank that reports: its profile without its long tables, as compressed msgpack."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, replace
from functools import lru_cache

import msgspec

from lightning_flops.schema.communication import Integers, Overlap
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import RankAbsence

RECORD_LIMIT_BYTES, INFLATED_LIMIT_BYTES = 65_536, 4 << 20
"""Most bytes of a packed record, and of one before it is compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank sends to the one that reports."""

    profile: Profile
    """Without what has a part for each module or operator."""
    overlap: Overlap | None
    """Of the traced step; None without collectives."""
    module_names: tuple[str, ...] = ()
    """Modules with times, in tree order."""
    own_forward_ns: Integers
    """Of each of them in the traced step, without the modules below it."""
    own_backward_ns: Integers
    """Of their backwards; empty if backwards were not timed."""
    clock: str = ""
    """Of these times."""
    left_out: tuple[str, ...] = ()
    """What did not fit, in sentences."""

    @property
    def rank(self) -> int:
        """Number of the rank in the job."""
        return self.profile.context.rank


def _plain(value: object) -> bytes | float | str:  # of ``torch.__version__``, whose class is its own, the text
    return value.tobytes() if isinstance(value, array) else float(value) if isinstance(value, float) else str(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(RankRecord | tuple[int, str], dec_hook=lambda _, data: array("q", data))
_shared = lru_cache(maxsize=8)(tuple[str, ...])  # of thousands of ranks, one copy of their modules' names


def make_rank_record(profile: Profile) -> RankRecord:
    """The record of the rank that *profile* is of."""
    timed = [(module.name, module.times) for module in profile.modules if module.times is not None]
    backward_sec = [times.own_backward_sec for _, times in timed]
    traced, tables = profile.traced, None if profile.traced is None else profile.traced.tables
    if traced is not None:
        traced = replace(traced, tables=None, own_forward_sec=None, filling=None, operators={})
    none: dict[str, tuple[()]] = dict.fromkeys(("modules", "operators", "advice", "notes"), ())
    return RankRecord(
        profile=replace(profile, traced=traced, ranks=None, budget=None, uncounted={}, **none),  # type: ignore[arg-type]
        overlap=None if tables is None else tables.overlap,
        module_names=tuple(name for name, _ in timed),
        own_forward_ns=array("q", [round(1e9 * times.own_forward_sec) for _, times in timed]),
        own_backward_ns=array("q", [round(1e9 * (sec or 0)) for sec in backward_sec if {*backward_sec} != {None}]),
        clock=timed[0][1].clock if timed else "",
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
    forward, backward, traced = record.own_forward_ns, record.own_backward_ns, record.profile.traced
    spent = [sum(pair) for pair in zip(forward, backward, strict=True)] if backward else forward
    kept = sorted(sorted(range(len(spent)), key=lambda place: -spent[place])[: len(spent) >> times])
    left_out = f"all but the {len(kept):,} slowest of {len(spent):,} modules"
    if traced is not None and traced.collectives:
        calls = [replace(one, latency_ns=one.latency_ns[: one.calls >> times]) for one in traced.collectives]
        traced = replace(traced, collectives=tuple(calls))
        left_out += f", and all but the first of each {2**times} calls of collectives"
    return replace(
        record,
        profile=replace(record.profile, traced=traced),
        module_names=tuple(record.module_names[place] for place in kept),
        own_forward_ns=array("q", [forward[place] for place in kept]),
        own_backward_ns=array("q", [backward[place] for place in kept] if backward else []),
        left_out=(left_out,),
    )
