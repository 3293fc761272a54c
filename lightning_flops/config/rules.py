"""Rules: which values a setting may have, and in which form they are kept."""

from __future__ import annotations

import math
import numbers
import posixpath
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

from lightning_flops.config.values import PEAK_DTYPES, AdviceThresholds, TraceSchedule
from lightning_flops.text.json_text import is_too_long


@dataclass(frozen=True, slots=True)
class Rule:
    """Which values a setting may have."""

    words: str
    """The rule in words, for after "must be" in a message."""
    holds: Callable[[Any], bool]
    kept: Callable[[Any], Any] = lambda value: value
    """The form in which an allowed value is kept: Python's own numbers, and copies that nobody else changes."""


def _or_none(rule: Rule, *, kept_as: object = None) -> Rule:
    """*rule*, or None; *kept_as* is the value that stands for None."""
    return Rule(
        f"{rule.words}, or None",
        lambda value: value is None or rule.holds(value),
        lambda value: kept_as if value is None else rule.kept(value),
    )


# ---- numbers


def _is_integer(value: object) -> bool:
    # Sweeps give numpy's integers, which are Integral but not int.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an int that is larger than any float
        return False


def has_long_integer(kept: object) -> bool:
    """Whether a setting, in its form, is or holds an integer that no report could show."""
    parts = astuple(kept) if isinstance(kept, TraceSchedule) else kept if isinstance(kept, tuple) else (kept,)
    return any(isinstance(part, int) and is_too_long(part) for part in parts)


def integer_from(lowest: int) -> Rule:
    """An integer that is *lowest* or more."""
    return Rule(f"an integer >= {lowest}", lambda value: _is_integer(value) and value >= lowest, int)


NUMBER_FROM_ZERO = Rule("a number >= 0", lambda value: _is_number(value) and value >= 0, float)
INTERVAL_OR_NONE = _or_none(integer_from(1))


def _are_steps(value: Any) -> bool:
    steps = value if isinstance(value, (list, tuple)) else [value]
    return bool(steps) and all(_is_integer(step) and step >= 0 for step in steps)


def _ordered_steps(value: Any) -> int | tuple[int, ...]:
    return tuple(sorted({int(step) for step in value})) if isinstance(value, (list, tuple)) else int(value)


STEP_OR_STEPS = Rule("an integer >= 0, or a list of such", _are_steps, _ordered_steps)

COUNT_FUNCTION_OR_NONE = _or_none(
    Rule(
        "an integer > 0, a function of the batch",
        lambda value: callable(value) or (_is_integer(value) and value > 0),
        lambda value: int(value) if _is_integer(value) else value,
    )
)


# ---- numbers by name


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    # A copy, since the caller may change the mapping later.
    return {name: float(value) for name, value in values.items()}


def _is_peak(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(name in PEAK_DTYPES and _is_positive(peak) for name, peak in value.items())
    return _is_positive(value)


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


PEAK_OR_NONE = _or_none(
    Rule(
        f"a number > 0, a mapping from dtype names ({', '.join(PEAK_DTYPES)}) to numbers > 0",
        _is_peak,
        lambda value: _floats(value) if isinstance(value, Mapping) else float(value),
    )
)

POSITIVE_OR_NONE = _or_none(Rule("a number > 0", _is_positive, float))

_THRESHOLDS = tuple(field.name for field in fields(AdviceThresholds))


def _are_thresholds(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        name in _THRESHOLDS and _is_number(limit) and limit >= 0 for name, limit in value.items()
    )


THRESHOLDS_OR_NONE = _or_none(
    Rule(f"a mapping from names ({', '.join(_THRESHOLDS)}) to numbers >= 0", _are_thresholds, _floats)
)

_LEAST_STEPS = {"wait": 0, "warmup": 0, "active": 1, "repeat": 1}
assert list(_LEAST_STEPS) == [field.name for field in fields(TraceSchedule)], "every part of a cycle has its least"


def _is_trace_schedule(value: Any) -> bool:
    if isinstance(value, TraceSchedule):
        value = asdict(value)
    return isinstance(value, Mapping) and all(
        name in _LEAST_STEPS and _is_integer(steps) and steps >= _LEAST_STEPS[name] for name, steps in value.items()
    )


TRACE_SCHEDULE_OR_NONE = _or_none(
    Rule(
        "a mapping from wait, warmup (>= 0), active and repeat (>= 1) to integers",
        _is_trace_schedule,
        lambda value: value if isinstance(value, TraceSchedule) else TraceSchedule(**value),
    ),
    kept_as=TraceSchedule(),
)


# ---- words


BOOLEAN = Rule("true or false", lambda value: isinstance(value, bool))
FULL_OR_HALF = Rule("'full' or 'half'", lambda value: isinstance(value, str) and value in ("full", "half"))
PATH_OR_NONE = _or_none(
    Rule("a path or URL as text", lambda value: isinstance(value, str) and value.strip() != ""),
)


def _is_tag_prefix(value: object) -> bool:
    # MLflow is the strictest of the usual loggers. It takes these characters, in a path that normpath leaves as it is.
    return (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z0-9_/. -]+", value) is not None
        and value.strip() == posixpath.normpath(value) == value
        and value[0] not in "/."
    )


TAG_PREFIX = Rule("letters, digits, spaces and _ - . with single / only between them", _is_tag_prefix)
