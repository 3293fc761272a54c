"""What one rank sends to the rank that reports: its profile in few numbers, small enough for a key-value store.

``make_rank_record`` draws a record from a profile, ``pack`` turns it into bytes and ``unpack`` back. Packed, it is

    magic, version, kind, checksum, lengths of what follows | form | own | fractions | times

The form is the record without its numbers, as compressed JSON. Most ranks have it in common, so that a reader decodes
it once. Own is JSON, too: the rank's host, its whole numbers, and how many times there are. The fractions take 8 bytes
each, and the times, in nanoseconds, 4 where that is enough.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

from lightning_flops.analysis.templates import Numbers, Template
from lightning_flops.errors import LightningFlopsError, ProfileFormatError
from lightning_flops.schema import dataclass_json
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.rank_record import RankRecord, RankSummary
from lightning_flops.schema.ranks import RankAbsence
from lightning_flops.text.json_text import read_json

RECORD_LIMIT_BYTES = 65_536
"""Most bytes of a packed record."""

FORM_LIMIT_BYTES = 1 << 20
"""Most bytes of a record's form when it is inflated."""

RECORD_VERSION = 1
"""Version of the packed form: of the bytes' order, and of every field in the header."""

_NS_PER_SEC = 1e9


class RankRecordError(LightningFlopsError, ValueError):
    """Bytes that are no record of this version, or a record that cannot be packed; the message says why."""


def make_rank_record(profile: Profile) -> RankRecord:
    """The record of the rank that *profile* is of."""
    timed = [module for module in profile.modules if module.times is not None]
    times = [module.times for module in timed if module.times is not None]
    backward_sec = [one.own_backward_sec for one in times]
    traced, memory = profile.traced, profile.memory
    return RankRecord(
        summary=RankSummary(
            context=profile.context,
            profile_step=profile.profile_step,
            counted_steps=len(profile.counted_steps),
            samples=profile.samples,
            tokens=profile.tokens,
            params=profile.params,
            trainable_params=profile.trainable_params,
            local_params=profile.local_params,
            flops=profile.flops,
            dtypes=profile.dtypes,
            peaks_flops_per_sec=profile.peaks_flops_per_sec,
            lower_bound=profile.lower_bound,
            timing=profile.timing,
            peak_memory_bytes=None if memory is None else memory.run_peak_bytes,
            traced_step=None if traced is None else traced.index,
            traced_steps=0 if traced is None or traced.tables is None else len(traced.tables.step_times.steps),
            traced_parts=() if traced is None else traced.parts,
            overlap=None if traced is None or traced.tables is None else traced.tables.overlap,
            modules_clock=times[0].clock if times else None,
            notes=len(profile.notes),
        ),
        module_names=tuple(module.name for module in timed),
        own_forward_ns=_nanoseconds(one.own_forward_sec for one in times),
        own_backward_ns=_nanoseconds(sec or 0.0 for sec in backward_sec)
        if any(sec is not None for sec in backward_sec)
        else array("q"),
        collectives=() if traced is None else traced.collectives,
    )


def _nanoseconds(seconds: Iterable[float]) -> array[int]:
    return array("q", [round(one * _NS_PER_SEC) for one in seconds])


# ---- bytes

_MAGIC = b"LFRR"
_PREFIX = struct.Struct("<4sHHIIII")
_RECORD, _ABSENCE = 1, 2

_REASON_CHARS = 500

_BUDGETS = (
    (sys.maxsize, sys.maxsize),
    (2_000, 8_000),
    (1_000, 4_000),
    (500, 4_000),
    (500, 2_000),
    (250, 1_000),
    (100, 250),
    (0, 0),
)
"""Most modules and most collective calls of a packed record. The first pair with which the record fits is used."""

_OPEN_TEXTS = ("host",)
"""Fields whose texts most ranks do not have in common."""


def pack(answer: RankRecord | RankAbsence) -> bytes:
    """*answer* as at most ``RECORD_LIMIT_BYTES`` bytes.

    If it would be larger, the modules that take least time and the last calls of each collective are left out; the
    record says so.

    Raises:
        RankRecordError: it is too large without any of them, or a number in it is not finite.
    """
    if isinstance(answer, RankAbsence):
        shortened = replace(answer, reason=answer.reason[:_REASON_CHARS])
        return _framed(_ABSENCE, _Sent(form=zlib.compress(_json(shortened).encode())))
    for modules, calls in _BUDGETS:
        packed, form_bytes = _packed(_with_calls(_with_modules(answer, modules), calls))
        if len(packed) <= RECORD_LIMIT_BYTES and form_bytes <= FORM_LIMIT_BYTES:
            return packed
    raise RankRecordError(f"the record is too large: {len(packed):,} bytes of {RECORD_LIMIT_BYTES:,}")


def unpack(data: bytes) -> RankRecord | RankAbsence:
    """What ``pack`` made *data* of.

    At most ``FORM_LIMIT_BYTES`` of it are inflated, whatever it says.

    Raises:
        RankRecordError: *data* is damaged, of another version, larger than any record, or something else.
    """
    try:
        return _unpacked(data)
    except RankRecordError:
        raise
    except (ValueError, zlib.error) as error:  # ProfileFormatError is a ValueError
        raise RankRecordError(f"the record cannot be read: {error}") from error


def _with_modules(record: RankRecord, most: int) -> RankRecord:
    """*record* with at most *most* modules: those that took most time."""
    total = len(record.module_names)
    if total <= most:
        return record
    backward = record.own_backward_ns or array("q", bytes(8 * total))
    spent = [forward + back for forward, back in zip(record.own_forward_ns, backward, strict=True)]
    kept = sorted(sorted(range(total), key=lambda index: -spent[index])[:most])
    return replace(
        record,
        module_names=tuple(record.module_names[index] for index in kept),
        own_forward_ns=array("q", [record.own_forward_ns[index] for index in kept]),
        own_backward_ns=array("q", [record.own_backward_ns[index] for index in kept] if record.own_backward_ns else []),
        left_out=(*record.left_out, f"times of {total - most:,} of {total:,} modules, those that took least"),
    )


def _with_calls(record: RankRecord, most: int) -> RankRecord:
    """*record* with the latencies of at most *most* collective calls: the first ones of each, equally many.

    Ranks that make the same calls leave out the same ones, so those that are left still have their counterparts.
    """
    lengths = sorted(len(calls.latency_ns) for calls in record.collectives)
    total = sum(lengths)
    if total <= most:
        return record
    each, left = 0, most
    for place, length in enumerate(lengths):
        each = left // (len(lengths) - place)
        if each < length:
            break
        left -= length
    kept = tuple(replace(calls, latency_ns=calls.latency_ns[:each]) for calls in record.collectives) if most else ()
    gone = total - sum(len(calls.latency_ns) for calls in kept)
    return replace(
        record,
        collectives=kept,
        left_out=(*record.left_out, f"{gone:,} of {total:,} collective calls, the last ones of each collective"),
    )


def _packed(record: RankRecord) -> tuple[bytes, int]:
    """*record* as bytes, and how many its form has when it is inflated."""
    # Through JSON once, so that an int in the place of a float becomes a float.
    typed = dataclass_json.load_part(RankRecord, _json(record))
    template = Template(typed, open_texts=_OPEN_TEXTS)
    numbers = template.split(typed)
    arrays = [_narrowed(one) for one in numbers.arrays]
    shapes = [[one.typecode, len(one)] for one in arrays]
    own = json.dumps([list(numbers.texts), list(numbers.integers), shapes], separators=(",", ":"))
    form = _json(template.empty()).encode()
    packed = _framed(
        _RECORD,
        _Sent(
            form=zlib.compress(form),
            own=own.encode(),
            fractions=_little_endian(array("d", numbers.floats)),
            times=b"".join(map(_little_endian, arrays)),
        ),
    )
    return packed, len(form)


def _unpacked(data: bytes) -> RankRecord | RankAbsence:
    kind, sent = _taken_apart(data)
    if kind == _ABSENCE:
        absence = dataclass_json.load_part(RankAbsence, _inflated(sent.form))
        return replace(absence, reason=absence.reason[:_REASON_CHARS])
    own = read_json(sent.own.decode(), most_chars=RECORD_LIMIT_BYTES)
    if not isinstance(own, list) or len(own) != 3 or any(not isinstance(part, list) for part in own):
        _not_as_written()
    texts, integers, shapes = own
    if not set(map(type, texts)) <= {str} or not set(map(type, integers)) <= {int}:
        _not_as_written()
    numbers = Numbers(
        integers=integers, floats=_fractions(sent.fractions), arrays=_times(shapes, sent.times), texts=texts
    )
    record = _template(sent.form).fill(numbers)
    modules = len(record.module_names)
    if len(record.own_forward_ns) != modules or len(record.own_backward_ns) not in (0, modules):
        _not_as_written()
    return record


@lru_cache(maxsize=64)
def _template(form: bytes) -> Template[RankRecord]:
    """Of the form that many ranks send alike."""
    empty = dataclass_json.load_part(RankRecord, _inflated(form))
    return Template(empty, open_texts=_OPEN_TEXTS)


class _Sent(NamedTuple):
    """A packed record, taken apart."""

    form: bytes
    own: bytes = b""
    fractions: bytes = b""
    times: bytes = b""


def _framed(kind: int, sent: _Sent) -> bytes:
    body = b"".join(sent)
    return _PREFIX.pack(_MAGIC, RECORD_VERSION, kind, zlib.crc32(body), *map(len, sent[:-1])) + body


def _inflated(form: bytes) -> str:
    """The text of which *form* was made."""
    inflater = zlib.decompressobj()
    text = inflater.decompress(form, FORM_LIMIT_BYTES + 1)
    if len(text) > FORM_LIMIT_BYTES:
        raise RankRecordError(f"its form is larger than {FORM_LIMIT_BYTES:,} bytes")
    if not inflater.eof or inflater.unused_data:
        _not_as_written()
    return text.decode()


def _taken_apart(data: bytes) -> tuple[int, _Sent]:
    """Kind and parts of a packed record."""
    if len(data) > RECORD_LIMIT_BYTES:
        raise RankRecordError(f"it is larger than any record: {len(data):,} bytes of {RECORD_LIMIT_BYTES:,}")
    if len(data) < _PREFIX.size or not data.startswith(_MAGIC):
        raise RankRecordError("it is no record of a rank")
    _, version, kind, checksum, *lengths = _PREFIX.unpack_from(data)
    if version != RECORD_VERSION:
        raise RankRecordError(f"it is a record of version {version}, and this package reads version {RECORD_VERSION}")
    if kind not in (_RECORD, _ABSENCE) or zlib.crc32(memoryview(data)[_PREFIX.size :]) != checksum:
        raise RankRecordError("it was cut or changed on its way")
    parts, start = [], _PREFIX.size
    for length in lengths:
        parts.append(data[start : start + length])
        start += length
    form, own, fractions = parts
    return kind, _Sent(form=form, own=own, fractions=fractions, times=data[start:])


def _json(value: RankRecord | RankAbsence) -> str:
    try:
        return dataclass_json.dump(value, indented=False)
    except ProfileFormatError as error:
        raise RankRecordError(f"the record cannot be packed: {error}") from error


def _fractions(data: bytes) -> array[float]:
    numbers = array("d")
    numbers.frombytes(data)
    if sys.byteorder == "big":
        numbers.byteswap()
    if not all(map(math.isfinite, numbers)):
        _not_as_written()
    return numbers


def _narrowed(numbers: array[int]) -> array[int]:
    fits = not numbers or (min(numbers) >= 0 and max(numbers) < 2**32)
    return array("I", numbers) if fits else numbers


def _little_endian(numbers: array[int] | array[float]) -> bytes:
    if sys.byteorder == "big":
        numbers = numbers[:]
        numbers.byteswap()
    return numbers.tobytes()


def _times(shapes: Iterable[Any], data: bytes) -> list[array[int]]:
    found, start = [], 0
    for shape in shapes:
        typecode, length = shape if isinstance(shape, list) and len(shape) == 2 else _not_as_written()
        if typecode not in ("I", "q") or type(length) is not int or not 0 <= length <= len(data):
            _not_as_written()
        numbers = array(typecode)
        end = start + length * numbers.itemsize
        numbers.frombytes(data[start:end])
        if sys.byteorder == "big":
            numbers.byteswap()
        found.append(numbers)
        start = end
    if start != len(data):
        _not_as_written()
    return found


def _not_as_written() -> NoReturn:
    raise RankRecordError("its parts do not go together")
