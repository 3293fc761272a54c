"""Frozen dataclasses to JSON text and back, by their type annotations alone.

What may stand in a dataclass: int, float, str, bool, ``Literal`` texts, other dataclasses, ``tuple[T, ...]``,
``Mapping[str, T]`` and ``T | None``.
"""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, NoReturn, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from lightning_flops.errors import ProfileFormatError

_T = TypeVar("_T")

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode

_SHOWN_CHARS = 60
_LINE_CHARS = 100


def dump(value: object) -> str:
    """Indented JSON of the dataclass *value*, the same text for equal values; ends with a line break.

    Raises:
        ProfileFormatError: a number in it is not finite, or a value's type is none of those above.
    """
    text = _text(_to_plain(value, ""), indent="") + "\n"
    # A lone surrogate, which a module may have in its description, can stand in JSON as an escape only.
    return re.sub("[\ud800-\udfff]", lambda match: f"\\u{ord(match[0]):04x}", text)


def load(cls: type[_T], text: str, *, version_field: str, version: int) -> _T:
    """The dataclass *cls* that ``dump`` wrote as *text*; every field must be there, and no other.

    Args:
        cls: class to build.
        text: JSON.
        version_field: field of *cls* that says which shape the JSON has; it is looked at before any other.
        version: the only value of that field that can be read.

    Raises:
        ProfileFormatError: not JSON, another version, or a field that is missing, unknown or of a wrong type.
    """
    try:
        plain = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except ProfileFormatError:
        raise
    except json.JSONDecodeError as error:
        _fail(f"the profile is not valid JSON: line {error.lineno} column {error.colno}: {error.msg}")
    except (ValueError, RecursionError) as error:  # a number or a nesting that Python refuses to read
        _fail(f"the profile is not valid JSON: {error}")
    if not isinstance(plain, dict):
        _fail(f"the profile must be a JSON object, got {_shown(plain)}")
    found = plain.get(version_field)
    if type(found) is not int or found != version:
        _fail(f"{version_field} must be {version}, the version this package reads, got {_shown(found)}")
    return cast("_T", _from_plain(cls, plain, ""))


def _to_plain(value: Any, where: str) -> Any:
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            _fail(f"{where or 'the value'} is {value}, which JSON cannot hold")
        return value
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_plain(getattr(value, field.name), _join(where, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: _to_plain(item, _join(where, str(key))) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    _fail(f"{where or 'the value'} is a {type(value).__name__}, which has no JSON form here")


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


@cache
def _hints(cls: type) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {field.name: hints[field.name] for field in fields(cls)}


def _from_plain(kind: Any, plain: Any, where: str) -> Any:
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _from_optional(kind, plain, where)
    if origin is Literal:
        if not isinstance(plain, str) or plain not in get_args(kind):
            _wrong(where, " or ".join(map(repr, get_args(kind))), plain)
        return plain
    if origin is tuple:
        if not isinstance(plain, list):
            _wrong(where, "a list", plain)
        return tuple(_from_plain(get_args(kind)[0], item, f"{where}[{i}]") for i, item in enumerate(plain))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(plain, dict):
            _wrong(where, "an object", plain)
        return {key: _from_plain(get_args(kind)[1], item, _join(where, key)) for key, item in plain.items()}
    if is_dataclass(kind):
        return _from_object(cast("type", kind), plain, where)
    return _from_scalar(kind, plain, where)


def _from_optional(kind: Any, plain: Any, where: str) -> Any:
    (inner,) = (one for one in get_args(kind) if one is not type(None))
    return None if plain is None else _from_plain(inner, plain, where)


def _from_object(cls: type, plain: Any, where: str) -> Any:
    if not isinstance(plain, dict):
        _wrong(where, "an object", plain)
    hints = _hints(cls)
    for name in hints:
        if name not in plain:
            _fail(f"{_join(where, name)} is missing")
    for name in plain:
        if name not in hints:
            _fail(f"{_join(where, name)} is not a field of {cls.__name__}")
    return cls(**{name: _from_plain(kind, plain[name], _join(where, name)) for name, kind in hints.items()})


def _from_scalar(kind: Any, plain: Any, where: str) -> Any:
    if kind is float:
        if isinstance(plain, bool) or not isinstance(plain, (int, float)):
            _wrong(where, "a number", plain)
        try:
            number = float(plain)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            _wrong(where, "a finite number", plain)
        return number
    if type(plain) is not kind:
        _wrong(where, {int: "an integer", str: "a text", bool: "true or false"}[kind], plain)
    return plain


def _no_constant(name: str) -> NoReturn:
    _fail(f"the profile is not valid JSON: it holds {name}")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            _fail(f"{key} stands twice in one object")
        found[key] = value
    return found


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _shown(plain: Any) -> str:
    text = repr(plain)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"


def _wrong(where: str, words: str, plain: Any) -> NoReturn:
    _fail(f"{where} must be {words}, got {_shown(plain)}")


def _fail(message: str) -> NoReturn:
    raise ProfileFormatError(message)
