"""Reads JSON from outside within bounds: a text that is longer or deeper than any real one is an error.

Python's own reader recurses at every bracket. Some programs raise the recursion limit so far that this ends the
process. For a whole number, its time grows with the square of the digits.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, NoReturn

MOST_DEPTH = 100
"""How deep brackets may be nested. A profile has 12 levels, and configs of frameworks not many more."""

MOST_DIGITS = 1_000
"""Of a whole number: a profile's FLOPs have 20. Python itself writes and reads at most 4,300, and raises beyond."""

_TOO_LONG: int = 10**MOST_DIGITS
_SHOWN_CHARS = 500
_TEXT = re.compile(r'"[^"]*"')
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_LEVEL = {"[": 1, "{": 1, "]": -1, "}": -1}


class JsonTextError(ValueError):
    """What is wrong with a text. The words continue a sentence that begins with its name, such as "the profile"."""


class JsonSyntaxError(JsonTextError):
    """The text is within all bounds, but it is not JSON."""


def read_json(text: str, *, most_chars: int, constants: bool = False) -> Any:
    """The value that *text* holds.

    Args:
        text: JSON.
        most_chars: length of the longest text that is read.
        constants: whether NaN and the infinities are numbers, as for Python's own reader.

    Raises:
        JsonSyntaxError: it is not JSON.
        JsonTextError: it is too long or nested too deep, holds a whole number of more than ``MOST_DIGITS`` digits, or
            has a key twice in one object.
    """
    if len(text) > most_chars:
        raise JsonTextError(f"is longer than {most_chars:,} characters")
    if _depth(text) > MOST_DEPTH:
        raise JsonTextError(f"is nested deeper than {MOST_DEPTH} levels")
    try:
        return json.loads(
            text,
            parse_int=_whole_number,
            parse_constant=None if constants else _no_constant,
            object_pairs_hook=object_of_keys,
        )
    except JsonTextError:
        raise
    except json.JSONDecodeError as error:
        raise JsonSyntaxError(f"is not valid JSON: line {error.lineno} column {error.colno}: {error.msg}") from error
    except RecursionError as error:  # the program itself is in a deep recursion
        raise JsonTextError(f"cannot be read here: {error}") from error


def object_of_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of *pairs*.

    Raises:
        JsonTextError: a key is given twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonTextError(f"gives {shown(twice)} twice")
    return found


def is_too_long(number: int) -> bool:
    """Whether *number* has more than ``MOST_DIGITS`` digits. ``read_json`` would refuse a file that holds it."""
    return bool(abs(number) >= _TOO_LONG)


def shown(value: object, *, chars: int = _SHOWN_CHARS) -> str:
    """*value* as Python writes it, for a message: cut short, and only its type if Python cannot write it."""
    try:
        text = repr(value)
    except Exception:  # nested too deep, a whole number of thousands of digits, or a class whose repr raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= chars else text[: chars - 1] + "…"


def _depth(text: str) -> int:
    """How deep brackets are nested, not counting those inside strings."""
    if text.count("[") + text.count("{") <= MOST_DEPTH:
        return 0
    plain = text.replace("\\\\", "").replace('\\"', "")
    brackets = _NO_BRACKETS.sub("", _TEXT.sub("", plain))
    return max(accumulate(map(_LEVEL.__getitem__, brackets)), default=0)


def _whole_number(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise JsonTextError(f"holds a whole number of {len(text):,} digits")
    return int(text)


def _no_constant(name: str) -> NoReturn:
    raise JsonTextError(f"is not valid JSON: it holds {name}")
