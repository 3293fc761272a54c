"""Which values settings may have, and in which form they are kept; the names in them; names that are no settings."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final, NamedTuple

from lightning_flops.errors import ConfigError
from lightning_flops.units import shown

BLOCK = "flops_profiler"  # the block in a DeepSpeed config; every message about a setting begins with it
OWN_FOLDER = "lightning_flops"  # of our files: in that of a run's logs, or by itself where a run has none

# Dtypes whose peak a profile names whether they ran or not; and all that the counter names, which may have peaks.
DTYPE_NAMES = ("bfloat16", "float16", "tf32", "float32", "float64", "float8", "int8")
PEAK_DTYPES = (*DTYPE_NAMES, "float4", "uint8", "int16", "int32", "int64", "complex32", "complex64", "complex128")


#: The limits from which on advice is given; the setting ``advice_thresholds`` changes them. A share is a share of the
#: step; 1 is the whole step. The values come from the sources that the rules of advice name, or are this project's own.
ADVICE_THRESHOLDS: Final[Mapping[str, float]] = {
    "data_wait": 0.05,  # waiting for data above this share
    "exposed_communication": 0.10,  # communication that no computation hides above this share
    "tensor_core_eligible": 0.05,  # no tensor cores, though more than this share of kernels' time could use them
    "float32": 0.05,  # float32 products, TF32 off, above this share of the model FLOPs
    "misaligned": 0.05,  # 16-bit products with a dimension that is no multiple of 8 above this share of FLOPs
    "optimizer": 0.15,  # optimizer that updates tensor by tensor above this share
    "idle": 0.20,  # idle device above this share, the wait for data left out
    "straggler": 1.1,  # the slowest rank's own time above this many times the median
    "straggler_sec": 0.001,  # ... and longer by more than so many seconds a step
    "waiting": 0.10,  # waiting for other ranks above this share, though none of them is a straggler
    "padding": 0.20,  # padding above this share of the tokens
    "pageable_copies": 0.05,  # copies from pageable host memory above this share
    "dropout": 0.10,  # dropout above this share
    "norm": 0.10,  # norms that are written out in Python above this share
    "line": 0.10,  # a line or callback of the program around the model above this share
    "line_in_module": 0.25,  # many short operations of one function inside a module above this share
    "calls": 0.10,  # a module that a batch calls many times above this share
    "unused_forward": 0.05,  # forwards whose output no backward used above this share
    "metric_forward": 0.05,  # forwards without gradients of the model that trains above this share
    "attention": 0.10,  # attention that is written out above this share
    "rollout": 0.20,  # generation at less than half of the training's FLOP/s above this share
    "scoring": 0.05,  # a model that is only asked, in float32 where bfloat16 is faster, above this share
    "recompute": 0.10,  # forwards that the backward repeats above this share
    "closure": 3.0,  # runs of the model that a batch has in an LBFGS's closure above this number
    "host_wait": 0.05,  # idle device above this share where numbers are read from it
    "other_operators": 0.25,  # operators without products above this share
    "part": 0.25,  # a part of the step that no other rule explains above this share
    "float64": 0.05,  # products in float64 above this share
    "tf32": 0.05,  # products in TF32 where bfloat16 is faster above this share of the model FLOPs
    "heat_limited": 0.05,  # heat held the GPU's clock down above this share of the timed steps
    "starved": 0.05,  # a thread of this process was ready and had no processor above this share of the timed steps
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSchedule:
    """Which steps after the timed ones are traced; the names are those of ``torch.profiler.schedule``."""

    wait: int = 0  # steps before each cycle that run without the profiler
    warmup: int = 1  # steps that run under the profiler and are not kept
    active: int = 5  # steps that are kept: times of modules and operators are medians over them
    repeat: int = 1  # how many cycles of the three


_TOO_LARGE = 10**15  # no run has so many steps or samples, and every report can show an integer below it
_MOST_STEPS = 10**6  # of a list: a range may be as long as it likes


class Rule(NamedTuple):
    """Which values a setting may have: in words, and as the function that checks and keeps one."""

    words: str  # for after "must be" in a message
    kept: Callable[[Any], Any]  # returns a value as it is kept, a copy that no caller changes, or raises a ValueError


def _if(value: Any, holds: object) -> Any:
    """*value*, for which this *holds*."""
    if not holds:
        raise ValueError
    return value


def _or_none(rule: Rule, *, kept_as: object = None) -> Rule:
    """*rule*, or None; *kept_as* is the value that stands for None."""
    return Rule(f"{rule.words}, or None", lambda value: kept_as if value is None else rule.kept(value))


# ---- numbers


def _integer(value: Any, least: int) -> int:
    # Sweeps give numpy's integers, which are Integral but not int.
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return int(_if(value, is_integer and least <= int(value) < _TOO_LARGE))


def _number(value: Any, *, zero: bool = True) -> float:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return float(_if(value, is_number and 0 <= float(value) < math.inf and (zero or value > 0)))


def integer_from(lowest: int) -> Rule:
    """An integer that is *lowest* or more."""
    return Rule(f"an integer >= {lowest}", lambda value: _integer(value, lowest))


def _steps(value: Any) -> int | tuple[int, ...]:
    if isinstance(value, numbers.Number):
        return _integer(value, 0)
    # By its methods: numpy's arrays are no ``Sequence``.
    several = hasattr(value, "__getitem__") and not isinstance(value, (str, bytes, Mapping))
    steps = _if(value, several and 0 < len(value) <= _MOST_STEPS)
    return tuple(sorted({_integer(step, 0) for step in steps}))


NUMBER_FROM_ZERO = Rule("a number >= 0", _number)
POSITIVE_OR_NONE = _or_none(Rule("a number > 0", lambda value: _number(value, zero=False)))
INTERVAL_OR_NONE = _or_none(integer_from(1))
STEP_OR_STEPS = Rule("an integer >= 0, or a list of such", _steps)
COUNT_FUNCTION_OR_NONE = _or_none(
    Rule("an integer > 0, a function of the batch", lambda value: value if callable(value) else _integer(value, 1))
)


# ---- numbers by name


def _by_name(value: Any, names: Iterable[str], number: Callable[[Any], Any]) -> dict[str, Any]:
    named = isinstance(value, Mapping) and all(isinstance(name, str) and name in names for name in value)
    return {name: number(one) for name, one in _if(value, named).items()}


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64", "fp8": "float8"}


def _peak(value: Any) -> float | dict[str, float]:
    if not isinstance(value, Mapping):
        return _number(value, zero=False)
    found = _by_name(_if(value, value), (*PEAK_DTYPES, *_SHORT), lambda one: _number(one, zero=False))
    return {_SHORT.get(name, name): one for name, one in found.items()}


def _schedule(value: Any) -> Any:
    given = asdict(value) if isinstance(value, TraceSchedule) else value
    schedule = TraceSchedule(**_by_name(given, asdict(TraceSchedule()), lambda steps: _integer(steps, 0)))
    return _if(schedule, schedule.active and schedule.repeat)


PEAK_OR_NONE = _or_none(
    Rule(f"a number > 0, a mapping from dtype names ({', '.join(PEAK_DTYPES)}) to numbers > 0", _peak)
)
THRESHOLDS_OR_NONE = _or_none(
    Rule(
        f"a mapping from names ({', '.join(ADVICE_THRESHOLDS)}) to numbers >= 0",
        lambda value: _by_name(value, ADVICE_THRESHOLDS, _number),
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
    return str(_if(path, isinstance(path, str) and path.strip()))


BOOLEAN = Rule("true or false", lambda value: _if(value, isinstance(value, bool)))
FULL_OR_HALF = Rule("'full' or 'half'", lambda value: _if(value, isinstance(value, str) and value in ("full", "half")))
PATH_OR_NONE = _or_none(Rule("a path or URL", _path))
TAG_PREFIX = Rule(
    "letters, digits, spaces and _ - . with single / only between them",
    lambda value: _if(value, isinstance(value, str) and _TAG_PREFIX.fullmatch(value)),
)


# ---- names


def unknown_setting(name: object, known: Iterable[str], *, owner: str = "") -> str:
    """Words for a *name* that is none of the settings *known* to *owner*, and which of them is most like it."""
    named = name if isinstance(name, str) and re.fullmatch(r"[ -~]{1,60}", name) else shown(name, chars=60)
    near = max(known, key=lambda other: difflib.SequenceMatcher(None, named, other).ratio())
    return f"{BLOCK}.{named} is not a setting{f' of {owner}' if owner else ''}, did you mean {near}?"


def refuse_unknown(names: Iterable[object], *, known: Collection[str], owner: str = "") -> None:
    """Raise a ConfigError if one of *names* is not in *known*."""
    for name in names:
        if name not in known:
            raise ConfigError(unknown_setting(name, known, owner=owner))
