"""What one rank sends to the rank that reports: its profile without its long tables, as compressed msgpack."""

from __future__ import annotations

import zlib
from array import array
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import msgspec

from lightning_flops.schema.profile import Profile
from lightning_flops.schema.ranks import Integers, Overlap

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


class RankAbsence(NamedTuple):
    """A rank whose measurements are missing in the merged report, and why, as the end of a sentence."""

    rank: int
    reason: str


def _plain(value: object) -> bytes | float | str:  # of ``torch.__version__``, whose class is its own, the text
    return value.tobytes() if isinstance(value, array) else float(value) if isinstance(value, float) else str(value)


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(RankRecord | RankAbsence, dec_hook=lambda _, data: array("q", data))
_shared = lru_cache(maxsize=8)(tuple[str, ...])  # of thousands of ranks, one copy of their modules' names


def make_rank_record(profile: Profile) -> RankRecord:
    """The record of the rank that *profile* is of."""
    timed = [(module.name, module.times) for module in profile.modules if module.times is not None]
    backward_sec = [times.own_backward_sec for _, times in timed]
    traced, tables = profile.traced, None if profile.traced is None else profile.traced.tables
    if traced is not None:
        traced = replace(traced, tables=None, own_forward_sec=None, filling=None, operators_sec={})
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
    """*answer* in at most ``RECORD_LIMIT_BYTES``, without modules and single calls where it must, or ValueError."""
    if isinstance(answer, RankAbsence):
        answer = answer._replace(reason=answer.reason[:500])
    tries = [answer, _shortened(answer)] if isinstance(answer, RankRecord) else [answer]
    for sent in tries:
        encoded = _encoder.encode(sent)
        packed = zlib.compress(encoded, 1)
        if len(packed) <= RECORD_LIMIT_BYTES and len(encoded) <= INFLATED_LIMIT_BYTES:
            return packed
    raise ValueError(f"without modules and calls the record is still larger than {RECORD_LIMIT_BYTES:,} bytes")


def unpack(data: bytes) -> RankRecord | RankAbsence:
    """What ``pack`` made *data* of; raises an error of zlib or msgspec for anything else."""
    inflated = zlib.decompressobj().decompress(data, INFLATED_LIMIT_BYTES)
    try:
        answer: RankRecord | RankAbsence = _decoder.decode(inflated)
    except RecursionError as error:
        raise msgspec.DecodeError("it nests too deeply") from error
    return answer if isinstance(answer, RankAbsence) else replace(answer, module_names=_shared(answer.module_names))


def _shortened(record: RankRecord) -> RankRecord:
    none, traced = array("q"), record.profile.traced
    if traced is not None:
        traced = replace(traced, collectives=tuple(replace(one, latency_ns=none) for one in traced.collectives))
    return replace(
        record,
        profile=replace(record.profile, traced=traced),
        module_names=(),
        own_forward_ns=none,
        own_backward_ns=none,
        left_out=("the times of its modules and of each single call of a collective",),
    )
