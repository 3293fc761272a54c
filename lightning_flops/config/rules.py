"""Rules: which values a setting may have, and in which form they are kept; and names that are no settings."""

from __future__ import annotations

import difflib
import math
import numbers
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from lightning_flops.config.values import BLOCK, PEAK_DTYPES, AdviceThresholds, TraceSchedule
from lightning_flops.errors import ConfigError
from lightning_flops.text.printable import shown

_TOO_LARGE = 10**15
"""No run has so many steps or samples, and every report can show an integer below it."""


class Rule(NamedTuple):
    """Which values a setting may have."""

    words: str
    """The rule in words, for after "must be" in a message."""
    kept: Callable[[Any], Any]
    """Returns the form in which a value is kept: Python's own numbers, and copies that no caller changes. It raises a
    ValueError for one that breaks the rule."""


class Hint(ValueError):
    """A value breaks its rule, and the message says what may be meant."""


def _require(holds: object) -> None:
    if not holds:
        raise ValueError


def _or_none(rule: Rule, *, kept_as: object = None) -> Rule:
    """*rule*, or None; *kept_as* is the value that stands for None."""
    return Rule(f"{rule.words}, or None", lambda value: kept_as if value is None else rule.kept(value))


def _checked(words: str, holds: Callable[[Any], object]) -> Rule:
    def kept(value: Any) -> Any:
        _require(holds(value))
        return value

    return Rule(words, kept)


# ---- numbers


def _integer(value: Any, least: int) -> int:
    # Sweeps give numpy's integers, which are Integral but not int.
    _require(isinstance(value, numbers.Integral) and not isinstance(value, bool) and least <= int(value) < _TOO_LARGE)
    return int(value)


def _number(value: Any) -> float:
    _require(isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf)
    return float(value)


def _positive(value: Any) -> float:
    number = _number(value)
    _require(number)
    return number


def integer_from(lowest: int) -> Rule:
    """An integer that is *lowest* or more."""
    return Rule(f"an integer >= {lowest}", lambda value: _integer(value, lowest))


def _steps(value: Any) -> int | tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        return _integer(value, 0)
    _require(value)
    return tuple(sorted({_integer(step, 0) for step in value}))


NUMBER_FROM_ZERO = Rule("a number >= 0", _number)
POSITIVE_OR_NONE = _or_none(Rule("a number > 0", _positive))
INTERVAL_OR_NONE = _or_none(integer_from(1))
STEP_OR_STEPS = Rule("an integer >= 0, or a list of such", _steps)
COUNT_FUNCTION_OR_NONE = _or_none(
    Rule("an integer > 0, a function of the batch", lambda value: value if callable(value) else _integer(value, 1))
)


# ---- numbers by name


def _by_name(value: Any, names: Mapping[str, Any], number: Callable[[Any], Any]) -> dict[str, Any]:
    _require(isinstance(value, Mapping) and all(isinstance(name, str) and name in names for name in value))
    return {name: number(one) for name, one in value.items()}


_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8": "float8",
}
"""Other names of dtypes that have peaks."""


def _peak(value: Any) -> float | dict[str, float]:
    if not isinstance(value, Mapping):
        return _positive(value)
    _require(value)
    for name in value:
        if name in _SHORT:
            raise Hint(f"did you mean {_SHORT[name]}?")
    return _by_name(value, dict.fromkeys(PEAK_DTYPES), _positive)


def _schedule(value: Any) -> TraceSchedule:
    given = asdict(value) if isinstance(value, TraceSchedule) else value
    schedule = TraceSchedule(**_by_name(given, asdict(TraceSchedule()), lambda steps: _integer(steps, 0)))
    _require(schedule.active and schedule.repeat)
    return schedule


PEAK_OR_NONE = _or_none(
    Rule(f"a number > 0, a mapping from dtype names ({', '.join(PEAK_DTYPES)}) to numbers > 0", _peak)
)
_THRESHOLDS = {field.name: field for field in fields(AdviceThresholds)}
THRESHOLDS_OR_NONE = _or_none(
    Rule(
        f"a mapping from names ({', '.join(_THRESHOLDS)}) to numbers >= 0",
        lambda value: _by_name(value, _THRESHOLDS, _number),
    )
)
TRACE_SCHEDULE_OR_NONE = _or_none(
    Rule("a mapping from wait, warmup (>= 0), active and repeat (>= 1) to integers", _schedule), kept_as=TraceSchedule()
)


# ---- words


def _is_tag_prefix(value: object) -> bool:
    # MLflow is the strictest of the usual loggers. It takes these characters, in a path that normpath leaves as it is.
    return (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z0-9_/. -]+", value) is not None
        and value.strip() == posixpath.normpath(value) == value
        and value[0] not in "/."
    )


BOOLEAN = _checked("true or false", lambda value: isinstance(value, bool))
FULL_OR_HALF = _checked("'full' or 'half'", lambda value: isinstance(value, str) and value in ("full", "half"))
PATH_OR_NONE = _or_none(_checked("a path or URL as text", lambda value: isinstance(value, str) and value.strip()))
TAG_PREFIX = _checked("letters, digits, spaces and _ - . with single / only between them", _is_tag_prefix)


# ---- names


_LONGEST = 300
"""Characters of a warning about a block. A value in it may be as long as a file."""


def clipped(text: str) -> str:
    """*text*, cut short where it is too long for a warning."""
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def nearest(name: object, known: Iterable[str]) -> str:
    """The one of *known* that is most like *name*; the first one if several are."""
    text = clipped(name if isinstance(name, str) else shown(name))
    return max(known, key=lambda other: difflib.SequenceMatcher(None, text, other).ratio())


def refuse_unknown(names: Iterable[object], *, known: Iterable[str], owner: str = "") -> None:
    """Raise an error if one of *names* is not in *known*.

    Raises:
        ConfigError: one is not. The message names the nearest setting, and *owner*, which knows only some settings.
    """
    known = list(known)
    for name in names:
        if name not in known:
            named = str(name) if isinstance(name, str) and re.fullmatch(r"[ -~]{1,60}", name) else shown(name, chars=60)
            near = difflib.get_close_matches(named, known, n=1)
            hint = f", did you mean {near[0]}?" if near else f"; the settings are {', '.join(known)}"
            raise ConfigError(f"{BLOCK}.{named} is not a setting{f' of {owner}' if owner else ''}{hint}")
