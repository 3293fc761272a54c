"""Frozen dataclasses to JSON text and back, by their type annotations alone.

What may stand in a dataclass: int, float, str, bool, ``Literal`` texts, other dataclasses, ``tuple[T, ...]``,
``Mapping[str, T]``, ``array`` (of typecode ``q``) and ``T | None``.
"""

from __future__ import annotations

import json
import math
import re
import types
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lightning_flops.errors import ProfileFormatError
from lightning_flops.text.json_text import JsonTextError, read_json, shown

_T = TypeVar("_T")

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

LONGEST_PROFILE = 1 << 28
"""Most characters of a profile that is read; one of a model with 1,000 modules and a traced step has a million."""

_GREATEST = 1e100
"""Greatest number that is read, integers apart, which have no limit."""

_SHOWN_CHARS = 60
_LINE_CHARS = 100


def dump(value: object, *, indented: bool = True) -> str:
    """JSON of the dataclass *value*, the same text for equal values; ends with a line break.

    Args:
        value: the dataclass.
        indented: for people; else all of it on one line.

    Raises:
        ProfileFormatError: a number in it is not finite, or a value's type is none of those above.
    """
    try:
        plain = _to_plain(value)
    except _Misfit as misfit:
        _fail(str(misfit))
    text = (_text(plain, indent="") if indented else _encode(plain)) + "\n"
    # A lone surrogate, which a module's description may contain, is allowed in JSON only as an escape.
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def load(cls: type[_T], text: str, *, version_field: str, version: int, oldest: int | None = None) -> _T:
    """The dataclass *cls* that ``dump`` wrote as *text*; every field must be there, and no other.

    In a text of an older version a field may be missing if it has a default: that is what it was before it came. Fields
    that have gone since are passed over.

    Args:
        cls: class to build.
        text: JSON.
        version_field: field of *cls* that says which shape the JSON has; it is looked at before any other.
        version: value of that field in what ``dump`` writes today.
        oldest: the oldest version that can be read; None if that is *version*.

    Raises:
        ProfileFormatError: not JSON, another version, or a field that is missing, unknown or of a wrong type.
    """
    oldest = version if oldest is None else oldest
    plain = _parsed(text)
    if not isinstance(plain, dict):
        _fail(f"the profile must be a JSON object, got {shown(plain, chars=_SHOWN_CHARS)}")
    found = plain.get(version_field)
    if type(found) is not int or not oldest <= found <= version:
        known = f"{version}, the version" if oldest == version else f"{oldest} to {version}, the versions"
        _fail(f"{version_field} must be {known} this package reads, got {shown(found, chars=_SHOWN_CHARS)}")
    if found < version:
        there = {one.name for one in fields(cast("Any", cls))}
        return _read(cls, {name: value for name, value in plain.items() if name in there}, fill=True)
    return _read(cls, plain)


def load_part(cls: type[_T], text: str) -> _T:
    """The dataclass *cls* that ``dump`` wrote as *text*, where something else says which version that is.

    Raises:
        ProfileFormatError: not JSON, or a field that is missing, unknown or of a wrong type.
    """
    return _read(cls, _parsed(text))


def _parsed(text: str) -> Any:
    try:
        return read_json(text, most_chars=LONGEST_PROFILE)
    except JsonTextError as error:
        raise ProfileFormatError(f"the profile {error}") from error


def _read(cls: type[_T], plain: Any, *, fill: bool = False) -> _T:
    try:
        return cast("_T", _reader(cast("Any", cls), fill)(plain))
    except _Misfit as misfit:
        _fail(str(misfit))


def _to_plain(value: Any) -> Any:
    """*value* as JSON's own kinds.

    Raises:
        _Misfit: something in it has no JSON form.
    """
    kind: Any = type(value)
    if value is None or kind is int or kind is str or kind is bool:
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _Misfit(f"is {value}, which JSON cannot hold")
        return value
    if isinstance(value, (int, str)):  # of a class that is one of these
        return value
    if isinstance(value, array):
        return value.tolist()
    place = ""
    try:
        if (names := _field_names(kind)) is not None:
            plain = {}
            for name in names:
                place = name
                plain[name] = _to_plain(getattr(value, name))
            return plain
        if isinstance(value, Mapping):
            plain = {}
            for key, item in value.items():
                place = str(key)
                plain[key] = _to_plain(item)
            return plain
        if isinstance(value, (tuple, list)):
            items: list[Any] = []
            for item in value:
                place = f"[{len(items)}]"
                items.append(_to_plain(item))
            return items
    except _Misfit as misfit:
        misfit.inside(place)
        raise
    raise _Misfit(f"is a {kind.__name__}, which has no JSON form here")


@cache
def _field_names(kind: Any) -> tuple[str, ...] | None:
    """Of a dataclass; None of any other class."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else None


def _quoted(plain: Any) -> str:
    """JSON of a number, a text, true, false or null."""
    return str(plain) if type(plain) is int else _encode(plain)  # most values are ints, and this is faster


def _text(plain: Any, *, indent: str) -> str:
    """JSON of *plain*; what fits stands on one line, as a person would write it."""
    if not isinstance(plain, (dict, list)):
        return _quoted(plain)
    deeper = indent + "  "
    if isinstance(plain, dict):
        first, last = "{}"
        items = [f"{_quoted(key)}: {_text(item, indent=deeper)}" for key, item in plain.items()]
    else:
        first, last = "[]"
        items = [_text(item, indent=deeper) for item in plain]
    fits = len(indent) + sum(map(len, items)) + 2 * len(items) <= _LINE_CHARS
    if fits and not any("\n" in item for item in items):
        return f"{first}{', '.join(items)}{last}"
    return f"{first}\n{deeper}" + f",\n{deeper}".join(items) + f"\n{indent}{last}"


_Reader = Callable[[Any], Any]


class _Misfit(Exception):
    """A value of the wrong kind for its place; on the way out, each place adds its name."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.words = words
        self.places: list[str] = []

    def inside(self, place: str) -> None:
        self.places.append(place)

    def __str__(self) -> str:
        where = "".join(place if place.startswith("[") else f".{place}" for place in reversed(self.places))
        return f"{where.removeprefix('.') or 'the value'} {self.words}"


@cache
def _reader(kind: Any, fill: bool) -> _Reader:
    """The function that makes a value of *kind* from plain JSON or raises _Misfit; made once for each kind.

    With *fill*, a field of a dataclass that is missing has its default.
    """
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _optional_reader(kind, fill)
    if origin is Literal:
        return _choice_reader(get_args(kind))
    if origin is tuple:
        return _list_reader(get_args(kind)[0], fill)
    if kind is array:
        return _read_whole_numbers
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _mapping_reader(get_args(kind)[1], fill)
    if is_dataclass(kind):
        return _object_reader(cast("type", kind), fill)
    return _read_number if kind is float else _exact_reader(kind)


def _optional_reader(kind: Any, fill: bool) -> _Reader:
    (inner,) = (one for one in get_args(kind) if one is not type(None))
    read = _reader(inner, fill)
    return lambda plain: None if plain is None else read(plain)


def _choice_reader(choices: tuple[str, ...]) -> _Reader:
    words = " or ".join(map(repr, choices))

    def read(plain: Any) -> Any:
        return plain if isinstance(plain, str) and plain in choices else _wrong(words, plain)

    return read


def _list_reader(kind: Any, fill: bool) -> _Reader:
    read_item = _reader(kind, fill)

    def read(plain: Any) -> Any:
        if not isinstance(plain, list):
            _wrong("a list", plain)
        items: list[Any] = []
        try:
            for item in plain:
                items.append(read_item(item))  # their number tells which one is wrong
        except _Misfit as misfit:
            misfit.inside(f"[{len(items)}]")
            raise
        return tuple(items)

    return read


def _read_whole_numbers(plain: Any) -> array[int]:
    if not isinstance(plain, list) or not all(type(item) is int for item in plain):
        _wrong("a list of integers", plain)
    try:
        return array("q", plain)
    except OverflowError:
        _wrong("a list of integers of 64 bits", plain)


def _mapping_reader(kind: Any, fill: bool) -> _Reader:
    read_item = _reader(kind, fill)

    def read(plain: Any) -> Any:
        if not isinstance(plain, dict):
            _wrong("an object", plain)
        return _read_items(plain, dict.fromkeys(plain, read_item))

    return read


def _object_reader(cls: type, fill: bool) -> _Reader:
    hints = get_type_hints(cls)
    readers = {field.name: _reader(hints[field.name], fill) for field in fields(cls)}
    may_miss = {field.name for field in fields(cls) if fill and not _must_be_given(field)}

    def read(plain: Any) -> Any:
        if not isinstance(plain, dict):
            _wrong("an object", plain)
        if plain.keys() == readers.keys():
            return cls(**_read_items(plain, readers))
        here = {name: reader for name, reader in readers.items() if name in plain or name not in may_miss}
        if plain.keys() != here.keys():
            _name_difference(cls, expected=here, found=plain)
        return cls(**_read_items(plain, here))

    return read


def _must_be_given(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _read_items(plain: Mapping[str, Any], readers: Mapping[str, _Reader]) -> dict[str, Any]:
    name = ""
    values = {}
    try:
        for name, read in readers.items():
            values[name] = read(plain[name])
    except _Misfit as misfit:
        misfit.inside(_as_place(name))
        raise
    return values


def _name_difference(cls: type, *, expected: Iterable[str], found: Iterable[str]) -> NoReturn:
    for name in expected:
        if name not in found:
            raise _misfit_at(name, "is missing")
    unknown = next(name for name in found if name not in expected)
    raise _misfit_at(_as_place(unknown), f"is not a field of {cls.__name__}")


def _as_place(key: str) -> str:
    """*key*, which may be any text, in the name of a place."""
    return key if key.isidentifier() and len(key) <= _SHOWN_CHARS else shown(key, chars=_SHOWN_CHARS)


def _misfit_at(name: str, words: str) -> _Misfit:
    misfit = _Misfit(words)
    misfit.inside(name)
    return misfit


def _read_number(plain: Any) -> float:
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        _wrong("a number", plain)
    try:
        number = float(plain)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        _wrong("a finite number", plain)
    if abs(number) > _GREATEST:  # the sum or the product of two would not be finite
        _wrong(f"a number of at most {_GREATEST:g}", plain)
    return number


def _exact_reader(kind: type) -> _Reader:
    words = {int: "an integer", str: "a text", bool: "true or false"}[kind]

    def read(plain: Any) -> Any:
        return plain if type(plain) is kind else _wrong(words, plain)

    return read


def _wrong(words: str, plain: Any) -> NoReturn:
    raise _Misfit(f"must be {words}, got {shown(plain, chars=_SHOWN_CHARS)}")


def _fail(message: str) -> NoReturn:
    raise ProfileFormatError(message)
