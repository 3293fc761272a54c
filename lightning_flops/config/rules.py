"""Rules: which values a setting may have, and in which form they are kept; and names that are no settings."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from lightning_flops.config.values import BLOCK, PEAK_DTYPES, AdviceThresholds, TraceSchedule
from lightning_flops.errors import ConfigError
from lightning_flops.units import shown

_TOO_LARGE = 10**15  # no run has so many steps or samples, and every report can show an integer below it
_MOST_STEPS = 10**6  # of a list: a range may be as long as it likes


class Rule(NamedTuple):
    """Which values a setting may have."""

    words: str  # for after "must be" in a message
    kept: Callable[[Any], Any]  # returns a value as it is kept, a copy that no caller changes, or raises a ValueError


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


def _number(value: Any, *, zero: bool = True) -> float:
    _require(isinstance(value, numbers.Real) and not isinstance(value, bool) and 0 <= float(value) < math.inf)
    _require(zero or value > 0)
    return float(value)


def integer_from(lowest: int) -> Rule:
    """An integer that is *lowest* or more."""
    return Rule(f"an integer >= {lowest}", lambda value: _integer(value, lowest))


def _steps(value: Any) -> int | tuple[int, ...]:
    if isinstance(value, numbers.Number):
        return _integer(value, 0)
    # By its methods: numpy's arrays are no ``Sequence``.
    _require(hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping)))
    _require(0 < len(value) <= _MOST_STEPS)
    return tuple(sorted({_integer(step, 0) for step in value}))


NUMBER_FROM_ZERO = Rule("a number >= 0", _number)
POSITIVE_OR_NONE = _or_none(Rule("a number > 0", lambda value: _number(value, zero=False)))
INTERVAL_OR_NONE = _or_none(integer_from(1))
STEP_OR_STEPS = Rule("an integer >= 0, or a list of such", _steps)
COUNT_FUNCTION_OR_NONE = _or_none(
    Rule("an integer > 0, a function of the batch", lambda value: value if callable(value) else _integer(value, 1))
)


# ---- numbers by name


def _by_name(value: Any, names: Iterable[str], number: Callable[[Any], Any]) -> dict[str, Any]:
    _require(isinstance(value, Mapping) and all(isinstance(name, str) and name in names for name in value))
    return {name: number(one) for name, one in value.items()}


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8"}


def _peak(value: Any) -> float | dict[str, float]:
    if not isinstance(value, Mapping):
        return _number(value, zero=False)
    _require(value)
    found = _by_name(value, (*PEAK_DTYPES, *_SHORT), lambda one: _number(one, zero=False))
    return {_SHORT.get(name, name): one for name, one in found.items()}


def _schedule(value: Any) -> TraceSchedule:
    given = asdict(value) if isinstance(value, TraceSchedule) else value
    schedule = TraceSchedule(**_by_name(given, asdict(TraceSchedule()), lambda steps: _integer(steps, 0)))
    _require(schedule.active and schedule.repeat)
    return schedule


PEAK_OR_NONE = _or_none(
    Rule(f"a number > 0, a mapping from dtype names ({', '.join(PEAK_DTYPES)}) to numbers > 0", _peak)
)
_THRESHOLDS = asdict(AdviceThresholds())
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


# MLflow is the strictest of the usual loggers: these characters, in a path without dots for folders.
_TAG_PREFIX = re.compile(r"(?! )[A-Za-z0-9_ -][A-Za-z0-9_. -]*(/[A-Za-z0-9_ -][A-Za-z0-9_. -]*)*(?<! )")


def _path(value: Any) -> str:
    path = os.fspath(value)
    _require(isinstance(path, str) and path.strip())
    return str(path)


BOOLEAN = _checked("true or false", lambda value: isinstance(value, bool))
FULL_OR_HALF = _checked("'full' or 'half'", lambda value: isinstance(value, str) and value in ("full", "half"))
PATH_OR_NONE = _or_none(Rule("a path or URL", _path))
TAG_PREFIX = _checked(
    "letters, digits, spaces and _ - . with single / only between them",
    lambda value: isinstance(value, str) and _TAG_PREFIX.fullmatch(value),
)


# ---- names


def unknown_setting(name: object, known: Iterable[str], *, owner: str = "") -> str:
    """Words for a *name* that is none of the settings *known* to *owner*, and which of them is most like it."""
    named = name if isinstance(name, str) and re.fullmatch(r"[ -~]{1,60}", name) else shown(name, chars=60)
    near = max(known, key=lambda other: difflib.SequenceMatcher(None, named, other).ratio())
    return f"{BLOCK}.{named} is not a setting{f' of {owner}' if owner else ''}, did you mean {near}?"


def refuse_unknown(names: Iterable[object], *, known: Iterable[str], owner: str = "") -> None:
    """Raise a ConfigError if one of *names* is not in *known*."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ConfigError(unknown_setting(name, known, owner=owner))
