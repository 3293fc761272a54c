"""What one rank sends to the rank that reports: its profile without its long tables, as compressed msgpack."""

from __future__ import annotations

import math
import zlib
from array import array
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import msgspec

from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace import CollectiveCalls, Integers, Overlap

RECORD_LIMIT_BYTES, _INFLATED_LIMIT_BYTES = 65_536, 4 << 20
"""Most bytes of a packed record, and of one before it is compressed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRank:
    """What the trace of one rank says for a comparison with the others."""

    rank: int | None  #: None where no trace says its rank.
    source: str = ""  #: Where a trace file came from.
    steps: int
    overlap: Overlap
    collectives: tuple[CollectiveCalls, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankRecord:
    """What one rank sends to the one that reports."""

    profile: Profile  #: Without what has a part for each module, operator or collective.
    traced: TracedRank | None  #: None without a traced step that has collectives.
    module_names: tuple[str, ...] = ()  #: Modules with times, in tree order.
    own_forward_ns: Integers  #: Of each of them in the traced step, without the modules below it.
    own_backward_ns: Integers  #: Of their backwards.
    #: Standard error of all modules' times in the traced steps together, where the host's clock has them. None: not.
    modules_error_sec: float | None = None
    left_out: str = ""  #: What did not fit, in words.

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
    timed = {module.name: module.times for module in profile.modules if module.times is not None}
    traced, rank, of_trace, error_sec = profile.traced, profile.context.rank, None, None
    if traced is not None:
        table = traced.tables and traced.tables.modules
        errors_us = [row.own_error_us for row in table.rows] if table and table.clock == "host" else [None]
        error_sec = None if None in errors_us else 1e-6 * math.hypot(*(one or 0.0 for one in errors_us))
        if traced.tables is not None and (overlap := traced.tables.overlap) is not None:
            of_trace = TracedRank(rank=rank, steps=traced.steps, overlap=overlap, collectives=traced.collectives)
        traced = replace(traced, tables=None, own_forward_sec=None, filling=None, collectives=())
    none: dict[str, tuple[()]] = dict.fromkeys(("modules", "operators", "advice", "notes"), ())
    return RankRecord(
        profile=replace(profile, traced=traced, ranks=None, budget=None, lines=None, uncounted={}, **none),  # type: ignore[arg-type]
        traced=of_trace,
        module_names=tuple(timed),
        own_forward_ns=array("q", [round(1e9 * times.own_forward_sec) for times in timed.values()]),
        modules_error_sec=error_sec,
        own_backward_ns=array("q", [round(1e9 * (times.own_backward_sec or 0)) for times in timed.values()]),
    )


def pack(record: RankRecord | RankAbsence) -> bytes:
    """*record* in at most ``RECORD_LIMIT_BYTES``, without modules and single calls where it must, or ValueError."""
    if isinstance(record, RankAbsence):
        record = record._replace(reason=record.reason[:500])
    for sent in (record, _shortened(record)) if isinstance(record, RankRecord) else (record,):
        encoded = _encoder.encode(sent)
        packed = zlib.compress(encoded, 1)
        if len(packed) <= RECORD_LIMIT_BYTES and len(encoded) <= _INFLATED_LIMIT_BYTES:
            return packed
    raise ValueError(f"without modules and calls the record is still larger than {RECORD_LIMIT_BYTES:,} bytes")


def unpack(data: bytes) -> RankRecord | RankAbsence:
    """What ``pack`` made *data* of; raises an error of zlib or msgspec for anything else."""
    answer: RankRecord | RankAbsence = _decoder.decode(zlib.decompressobj().decompress(data, _INFLATED_LIMIT_BYTES))
    return answer if isinstance(answer, RankAbsence) else replace(answer, module_names=_shared(answer.module_names))


def _shortened(record: RankRecord) -> RankRecord:
    none, traced = array("q"), record.traced
    if traced is not None:
        traced = replace(traced, collectives=tuple(replace(one, latency_ns=none) for one in traced.collectives))
    words = "the times of its modules and of each single call of a collective"
    return replace(record, traced=traced, module_names=(), own_forward_ns=none, own_backward_ns=none, left_out=words)
