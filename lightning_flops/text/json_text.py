"""JSON texts from outside, read within bounds: what is longer or deeper than any real one is one error.

Python's own reader recurses for every bracket, as deep as the program's recursion limit lets it, which some programs
raise to where the process ends; and its time for a whole number of many digits grows with their square.
"""

from __future__ import annotations

import json
import re
from itertools import accumulate
from typing import Any, NoReturn

MOST_DEPTH = 100
"""Most brackets inside one another: a profile has 12, and the configs of frameworks not many more."""

MOST_DIGITS = 1_000
"""Of a whole number: a profile's FLOPs have 20. Python itself writes and reads at most 4,300, and raises beyond."""

_TOO_LONG = 10**MOST_DIGITS
_SHOWN_CHARS = 500
_TEXT = re.compile(r'"[^"]*"')
_NO_BRACKETS = re.compile(r"[^\[\]{}]+")
_LEVEL = {"[": 1, "{": 1, "]": -1, "}": -1}


class JsonTextError(ValueError):
    """What is wrong with a text, in words that follow its name: "the profile" and this make a sentence."""


class JsonSyntaxError(JsonTextError):
    """A text within all bounds that is no JSON."""


def read_json(text: str, *, most_chars: int, constants: bool = False) -> Any:
    """The value that *text* holds; every key stands once in its object.

    Args:
        text: JSON.
        most_chars: length of the longest text that is read.
        constants: NaN and the infinities are numbers, too, as for Python's own reader.

    Raises:
        JsonSyntaxError: it is no JSON.
        JsonTextError: it is longer or nested deeper than it may be, holds a whole number of more than
            ``MOST_DIGITS`` digits, or a key twice.
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
    """The object of *pairs*; a key given twice is a mistake.

    Raises:
        JsonTextError: one is.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise JsonTextError(f"gives {shown(twice)} twice")
    return found


def is_too_long(number: int) -> bool:
    """Whether *number* has more than ``MOST_DIGITS`` digits, so that no file may hold it."""
    return bool(abs(number) >= _TOO_LONG)


def shown(value: object, *, chars: int = _SHOWN_CHARS) -> str:
    """*value* as Python writes it, for a message: cut short, and in words where Python cannot write it."""
    try:
        text = repr(value)
    except Exception:  # nested too deep, a whole number of thousands of digits, or whatever a class of its own raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= chars else text[: chars - 1] + "…"


def _depth(text: str) -> int:
    """How deep brackets are inside one another, those in texts left out."""
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
