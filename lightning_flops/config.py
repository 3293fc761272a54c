"""Settings: DeepSpeed's ``"flops_profiler"`` block with its own names and defaults, and the keys this project adds."""

from __future__ import annotations

import difflib
import math
import numbers
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple

import fsspec

from lightning_flops.errors import ConfigError
from lightning_flops.text.json_text import JsonSyntaxError, JsonTextError, object_of_keys, read_json, shown

BLOCK = "flops_profiler"
"""Name of the block in a DeepSpeed config, and of the settings in every message."""

_LONGEST_CONFIG = 1 << 20
"""Bytes; configs of DeepSpeed have some thousand."""

DTYPE_NAMES = ("bfloat16", "float16", "tf32", "float32", "float64", "float8", "int8")
"""Names by which ``peak_flops_per_sec`` may be given for each dtype."""


class _Rule(NamedTuple):
    """What a setting may be: in words for the message, and as a test."""

    words: str
    holds: Callable[[Any], bool]


def _is_integer(value: object) -> bool:
    # numpy's integers, which sweeps hand out, are Integral and no int.
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:  # an int may be larger than any float
        return False


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_number_from_zero(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_count_or_function(value: Any) -> bool:
    return value is None or callable(value) or (_is_integer(value) and value > 0)


def _is_peak(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(key in DTYPE_NAMES and _is_positive(peak) for key, peak in value.items())
    return value is None or _is_positive(value)


def _is_tag_prefix(value: object) -> bool:
    # MLflow, the strictest of the usual loggers, takes these characters, in a path that is written the short way.
    return (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z0-9_/. -]+", value) is not None
        and value.strip() == posixpath.normpath(value) == value
        and value[0] not in "/."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceThresholds:
    """From where on something is worth a word of advice; ``advice_thresholds`` may set each.

    Shares are of the step, 1 being all of it. The values are those of the sources that ``analysis.advice`` names, or
    this project's own.
    """

    data_wait: float = 0.05
    """Waiting for data above this share."""
    exposed_communication: float = 0.10
    """Communication that no computation hides above this share."""
    overlap: float = 0.50
    """Less than this share of the communication hidden."""
    gpu_utilization: float = 0.50
    """Kernels running less than this share."""
    blocks_per_sm: float = 1.0
    """Kernels with fewer blocks per SM ..."""
    blocks_per_sm_share: float = 0.10
    """... holding more than this share of the kernels' time."""
    occupancy: float = 0.15
    """Estimated achieved occupancy below this."""
    tensor_core_eligible: float = 0.05
    """No tensor cores in use, though more than this share of the kernels' time could use them."""
    memory_high: float = 0.90
    """Peak memory above this share of the device's."""
    memory_low: float = 0.50
    """Peak memory below this share ..."""
    memory_low_utilization: float = 0.80
    """... with a GPU utilization below this."""
    float32: float = 0.05
    """float32 products, TF32 off, above this share of the model FLOPs."""
    misaligned: float = 0.05
    """16-bit products with a dimension that is no multiple of 8 above this share of the FLOPs."""
    optimizer: float = 0.15
    """Optimizer that updates tensor by tensor above this share."""
    idle: float = 0.20
    """Idle device above this share, most of it for want of launches."""
    short_kernels: float = 0.50
    """Kernels under 10 us above this share of all kernels ..."""
    short_kernels_idle: float = 0.10
    """... with the device idle above this share."""
    straggler: float = 1.1
    """The slowest rank's own time above this many times the median ..."""
    straggler_sec: float = 0.001
    """... and longer by more than so many seconds a step."""
    waiting: float = 0.10
    """Waiting for other ranks above this share, though none of them is a straggler."""
    mfu: float = 0.30
    """MFU below this."""
    pageable_copies: float = 0.05
    """Copies from pageable host memory above this share."""


_THRESHOLDS = tuple(field.name for field in fields(AdviceThresholds))


def _are_thresholds(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        name in _THRESHOLDS and _is_number(limit) and limit >= 0 for name, limit in value.items()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceSchedule:
    """Which steps after the timed ones are traced, in the terms of ``torch.profiler.schedule``."""

    wait: int = 0
    """Steps left alone before each cycle."""
    warmup: int = 1
    """Steps that run under the profiler and are thrown away."""
    active: int = 1
    """Steps that are kept."""
    repeat: int = 1
    """Cycles of the three."""


_LEAST_STEPS = {"wait": 0, "warmup": 0, "active": 1, "repeat": 1}
assert list(_LEAST_STEPS) == [field.name for field in fields(TraceSchedule)], "every part of a cycle has its least"


def _is_trace_schedule(value: Any) -> bool:
    if isinstance(value, TraceSchedule):
        value = asdict(value)
    return isinstance(value, Mapping) and all(
        name in _LEAST_STEPS and _is_integer(steps) and steps >= _LEAST_STEPS[name] for name, steps in value.items()
    )


def _is_step_or_steps(value: Any) -> bool:
    steps = value if isinstance(value, (list, tuple)) else [value]
    return bool(steps) and all(_is_integer(step) and step >= 0 for step in steps)


def _integer_from(lowest: int) -> _Rule:
    return _Rule(f"an integer >= {lowest}", lambda value: _is_integer(value) and value >= lowest)


_BOOLEAN = _Rule("true or false", lambda value: isinstance(value, bool))
_PATH_OR_NONE = _Rule(
    "a path or URL as text, or None",
    lambda value: value is None or (isinstance(value, str) and value.strip() != ""),
)
_COUNT_OR_FUNCTION = _Rule("an integer > 0, a function of the batch, or None", _is_count_or_function)

_RULES: Mapping[str, _Rule] = {
    "enabled": _BOOLEAN,
    "profile_step": _Rule("an integer >= 0, or a list of such", _is_step_or_steps),
    "module_depth": _integer_from(-1),
    "top_modules": _integer_from(1),
    "detailed": _BOOLEAN,
    "output_file": _PATH_OR_NONE,
    "recompute_fwd_factor": _Rule("a number >= 0", _is_number_from_zero),
    "timing_steps": _integer_from(1),
    "trace": _BOOLEAN,
    "trace_dir": _PATH_OR_NONE,
    "record_shapes": _BOOLEAN,
    "profile_memory": _BOOLEAN,
    "with_stack": _BOOLEAN,
    "monitor": _BOOLEAN,
    "batch_size": _COUNT_OR_FUNCTION,
    "tokens_per_sample": _COUNT_OR_FUNCTION,
    "causal_attention": _Rule("'full' or 'half'", lambda value: isinstance(value, str) and value in ("full", "half")),
    "peak_flops_per_sec": _Rule(
        f"a number > 0, a mapping from dtype names ({', '.join(DTYPE_NAMES)}) to numbers > 0, or None", _is_peak
    ),
    "advice_thresholds": _Rule(
        f"a mapping from names ({', '.join(_THRESHOLDS)}) to numbers >= 0, or None",
        lambda value: value is None or _are_thresholds(value),
    ),
    "every": _Rule("an integer >= 1, or None", lambda value: value is None or (_is_integer(value) and value >= 1)),
    "timer_only": _BOOLEAN,
    "trace_schedule": _Rule(
        "a mapping from wait, warmup (>= 0), active and repeat (>= 1) to integers, or None",
        lambda value: value is None or _is_trace_schedule(value),
    ),
    "ranks_timeout_sec": _Rule("a number >= 0", _is_number_from_zero),
    "all_ranks": _BOOLEAN,
    "tensorboard_dir": _PATH_OR_NONE,
    "tag_prefix": _Rule("letters, digits, spaces and _ - . with single / only between them", _is_tag_prefix),
}


_OF_THE_TRACE: Mapping[str, object] = {
    "trace_dir": None,
    "record_shapes": False,
    "profile_memory": False,
    "with_stack": False,
    "trace_schedule": TraceSchedule(),
}
"""Settings that say something of the traced step alone, with the values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Settings of one profiler; the first seven are DeepSpeed's, with DeepSpeed's defaults except ``enabled``.

    Raises:
        ConfigError: a setting breaks its rule; the message names the setting, the rule and the value.
    """

    enabled: bool = True
    """Profile at all. A DeepSpeed block that does not say so is not enabled."""
    profile_step: int | tuple[int, ...] = 1
    """Profile the global step that starts after this many steps of the fit; a list opens one window after the other."""
    module_depth: int = -1
    """Deepest module level that the report shows; -1 shows all."""
    top_modules: int = 1
    """How many modules the aggregated profile lists at each level."""
    detailed: bool = True
    """Print every module with its parameters and FLOPs."""
    output_file: str | None = None
    """Path or URL the text report is written to; None sends it to the package's logger."""
    recompute_fwd_factor: float = 0.0
    """Forward passes repeated during the backward, for the estimated backward only; the measured one needs no hint."""
    timing_steps: int = 20
    """How many steps to time after the counted one."""
    trace: bool = True
    """Run one step under torch.profiler after the timed ones: device time by module, operators, kernels."""
    trace_dir: str | None = None
    """Path or URL of the folder where the traced step's trace file is kept, with ``all_ranks`` one of each rank.

    None keeps none.
    """
    record_shapes: bool = False
    """Record the shapes of operators' inputs in the traced step."""
    profile_memory: bool = False
    """Record allocations and frees in the traced step."""
    with_stack: bool = False
    """Record the Python calls of the traced step; this slows it down a lot."""
    monitor: bool = True
    """Log throughput and MFU for as long as training runs."""
    batch_size: int | Callable[[Any], int] | None = None
    """Samples in each batch, or a function that returns the samples of the batch it is given."""
    tokens_per_sample: int | Callable[[Any], int] | None = None
    """Tokens in each sample, or a function that returns the tokens of the whole batch it is given."""
    causal_attention: Literal["full", "half"] = "full"
    """Whether attention calls flagged causal count the whole score matrix or half of it."""
    peak_flops_per_sec: float | Mapping[str, float] | None = None
    """Dense peak of one device in FLOP/s, one for all dtypes or by dtype name; None looks the device up."""
    advice_thresholds: Mapping[str, float] | None = None
    """From where on something is worth a word of advice, by the names of ``AdviceThresholds``; None: its defaults."""
    every: int | None = None
    """Profile again each time so many steps have gone by since the last step that ``profile_step`` names."""
    timer_only: bool = False
    """Only the monitor: no step is counted, timed in its parts, or traced."""
    trace_schedule: TraceSchedule = TraceSchedule()
    """Which steps after the timed ones are traced; a mapping will do."""
    ranks_timeout_sec: float = 30.0
    """How long a report waits for the measurements of the other ranks; training does not wait meanwhile."""
    all_ranks: bool = False
    """Have every rank write files of its own profile, too: profile.rank3.json beside rank 0's profile.json."""
    tensorboard_dir: str | None = None
    """Folder for TensorBoard's files of an engine whose own monitors do not show scalars; Lightning has its loggers."""
    tag_prefix: str = BLOCK
    """What the tags of scalars and texts begin with."""

    def __post_init__(self) -> None:
        """Check every setting against its rule."""
        for name, rule in _RULES.items():
            value = getattr(self, name)
            if not rule.holds(value):
                raise ConfigError(f"{BLOCK}.{name} must be {rule.words}, got {shown(value)}")
            if _is_integer(value):
                object.__setattr__(self, name, int(value))  # Python's own: JSON has no other
        if self.timer_only and not self.monitor:
            raise ConfigError(f"{BLOCK}.monitor must be true where timer_only is, got {self.monitor!r}")
        if not isinstance(self.profile_step, int):
            object.__setattr__(self, "profile_step", tuple(sorted({int(step) for step in self.profile_step})))
        if not isinstance(self.trace_schedule, TraceSchedule):
            object.__setattr__(self, "trace_schedule", TraceSchedule(**(self.trace_schedule or {})))
        if not self.trace:
            for name, default in _OF_THE_TRACE.items():
                if getattr(self, name) != default:
                    raise ConfigError(f"{BLOCK}.trace must be true where {name} is given, got {self.trace!r}")
        object.__setattr__(self, "recompute_fwd_factor", float(self.recompute_fwd_factor))
        object.__setattr__(self, "ranks_timeout_sec", float(self.ranks_timeout_sec))
        if isinstance(self.peak_flops_per_sec, Mapping):
            # A copy: the caller's mapping may change later.
            peaks = {name: float(peak) for name, peak in self.peak_flops_per_sec.items()}
            object.__setattr__(self, "peak_flops_per_sec", peaks)
        elif self.peak_flops_per_sec is not None:
            object.__setattr__(self, "peak_flops_per_sec", float(self.peak_flops_per_sec))
        if self.advice_thresholds is not None:
            limits = {name: float(limit) for name, limit in self.advice_thresholds.items()}
            object.__setattr__(self, "advice_thresholds", limits)

    @property
    def thresholds(self) -> AdviceThresholds:
        """The thresholds of advice in force."""
        return AdviceThresholds(**(self.advice_thresholds or {}))

    def next_profile_step(self, *, steps_done: int) -> int | None:
        """The next step to profile, by the number of steps of the fit before it, when so many are done.

        Returns:
            None if no window opens any more.
        """
        if self.timer_only:
            return None
        steps = (self.profile_step,) if isinstance(self.profile_step, int) else self.profile_step
        listed = next((step for step in steps if step >= steps_done), None)
        if listed is not None or self.every is None:
            return listed
        return steps[-1] + -(-(steps_done - steps[-1]) // self.every) * self.every  # rounded up

    def listed_between(self, first: int, last: int) -> tuple[int, ...]:
        """The listed steps to profile that lie between two steps, neither included."""
        steps = () if isinstance(self.profile_step, int) else self.profile_step
        return tuple(step for step in steps if first < step < last)

    @classmethod
    def from_block(cls, block: object) -> ProfilerConfig:
        """Settings from a ``"flops_profiler"`` block as DeepSpeed reads it: not enabled unless it says so.

        Args:
            block: the block's JSON object as a mapping. Besides DeepSpeed's keys it may hold ours.

        Raises:
            ConfigError: not an object, an unknown key, or a setting that breaks its rule.
        """
        if not isinstance(block, Mapping):
            raise ConfigError(f"{BLOCK} must be an object, got {shown(block)}")
        refuse_unknown(block, known=_RULES)
        return cls(**{"enabled": False, **block})

    @classmethod
    def from_deepspeed_config(cls, config: Mapping[str, Any] | str | Path) -> ProfilerConfig:
        """Settings from the ``"flops_profiler"`` block of a DeepSpeed config; DeepSpeed need not be installed.

        Args:
            config: the config as a mapping, or the path or URL (anything fsspec opens) of its JSON file.

        Returns:
            The block's settings; not enabled where the config has no such block.

        Raises:
            ConfigError: the file cannot be read or is no JSON object, or the block is wrong as in ``from_block``.
        """
        if not isinstance(config, Mapping):
            config = _read_json_object(config)
        return cls.from_block(config.get(BLOCK, {}))

    @classmethod
    def taken_over(cls, block: object, *, given: Mapping[str, Any] | None = None, enabled: bool = False) -> TakenBlock:
        """What a ``"flops_profiler"`` block asks for that was written for DeepSpeed, and which DeepSpeed judges.

        What DeepSpeed takes ends no training here: an unknown key is passed over, a value that breaks its rule means
        that nothing is profiled, and both are words for a warning. Values that DeepSpeed takes for a number or a truth
        are taken for it here. Nothing is raised.

        Args:
            block: whatever the config has under the name.
            given: settings from elsewhere, checked already, which win over the block's.
            enabled: what a block means that does not say whether it is enabled.
        """
        builtin_on = False
        unknown: list[str] = []
        wrong: str | None = None
        settings: dict[str, Any] = {"enabled": enabled}
        given = given or {}
        try:
            if not isinstance(block, Mapping):
                raise ConfigError(f"{BLOCK} must be an object, got {shown(block)}")
            builtin_on = _read_as_deepspeed("enabled", block.get("enabled", False)) is True
            for name, value in block.items():
                if name not in _RULES:
                    named = name if isinstance(name, str) and name.isprintable() else shown(name)
                    unknown.append(f"{BLOCK}.{named} is not a setting, did you mean {_nearest(name, _RULES)}?")
                else:
                    settings[name] = _read_as_deepspeed(name, value)
            taken = cls(**{**settings, **given})
        except Exception as error:  # a repr, a comparison or a conversion of somebody's object may raise anything
            wrong = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            taken = cls(**{**given, "enabled": False})
        return TakenBlock(taken, tuple(map(_clipped, unknown)), wrong and _clipped(wrong), builtin_on)


class TakenBlock(NamedTuple):
    """What a block that was written for DeepSpeed asks of this profiler."""

    settings: ProfilerConfig
    """Not enabled where a value is wrong."""
    unknown: tuple[str, ...]
    """Of each key that was passed over: that there is no such setting, and which is the nearest."""
    wrong: str | None
    """Why nothing is profiled by this block: the setting, its rule and the value; None if nothing is wrong."""
    builtin_on: bool
    """Whether the block turns on DeepSpeed's own profiler."""


assert [field.name for field in fields(ProfilerConfig)] == list(_RULES), "every setting has its rule, in the same order"


def _as_integer(value: Any) -> Any:
    return int(value) if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()) else value


def _as_enabled(value: Any) -> Any:
    # DeepSpeed writes `wall_clock_breakdown | enabled`, and refuses what this refuses, before anybody is profiled.
    return bool(False | value)


def _as_path(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value or None


_AS_DEEPSPEED_READS: Mapping[str, Callable[[Any], Any]] = {
    "enabled": _as_enabled,
    "profile_step": _as_integer,
    "module_depth": _as_integer,
    "top_modules": _as_integer,
    "detailed": bool,
    "output_file": _as_path,
    "recompute_fwd_factor": lambda value: float(value) if isinstance(value, bool) else value,
}
"""What DeepSpeed, which checks no value of its block, makes of one where it uses it; others fail there, or do nothing.

Of 0.16 to 0.19: it compares the step, counts up to the depth and the number of modules, asks for the truth of
``detailed`` and ``output_file``, and multiplies by the factor.
"""


def _read_as_deepspeed(name: str, value: Any) -> Any:
    """*value* as DeepSpeed takes it; as it is where DeepSpeed refuses it or does not know the setting."""
    try:
        return _AS_DEEPSPEED_READS[name](value) if name in _AS_DEEPSPEED_READS else value
    except Exception:  # whatever an operator of the value raises: the rule says what is wrong with it
        return value


_LONGEST = 300
"""Characters of a warning about a block: a value may be as long as a file."""


def _clipped(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _nearest(name: object, known: Iterable[str]) -> str:
    """The one of *known* that looks most like *name*, the first of several."""
    text = _clipped(str(name))
    return max(known, key=lambda other: difflib.SequenceMatcher(None, text, other).ratio())


def refuse_unknown(names: Iterable[object], *, known: Iterable[str], owner: str = "") -> None:
    """Do nothing if all *names* are *known* settings.

    Raises:
        ConfigError: one is not; the message has the nearest, and *owner* where that knows only some of the settings.
    """
    known = list(known)
    for name in names:
        if name not in known:
            named = str(name) if isinstance(name, str) and re.fullmatch(r"[ -~]{1,60}", name) else shown(name, chars=60)
            near = difflib.get_close_matches(named, known, n=1)
            hint = f", did you mean {near[0]}?" if near else f"; the settings are {', '.join(known)}"
            raise ConfigError(f"{BLOCK}.{named} is not a setting{f' of {owner}' if owner else ''}{hint}")


def _read_json_object(path: str | Path) -> Mapping[str, Any]:
    """The JSON object in the file at *path*, a path or URL."""
    if not isinstance(path, (str, Path)):
        raise ConfigError(f"a DeepSpeed config must be an object or the path of a JSON file, got {shown(path)}")
    place = str(path)
    try:
        with ExitStack() as stack:
            if "://" in place or "::" in place:
                file_system, name = fsspec.core.url_to_fs(place)
                file = stack.enter_context(file_system.open(name, "rb"))
            else:  # by fsspec, which looks for the end first, no pipe can be read
                file = stack.enter_context(Path(os.path.expanduser(place)).open("rb"))
            content = file.read(_LONGEST_CONFIG + 1)
        if len(content) > _LONGEST_CONFIG:
            raise ConfigError(f"the DeepSpeed config {path} is longer than {_LONGEST_CONFIG:,} bytes")
        text = content.decode("utf-8-sig")
    except ConfigError:
        raise
    except (OSError, ValueError, ImportError) as error:  # ImportError: the URL needs a package that is not installed
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"cannot read the DeepSpeed config {path}: {reason}") from error
    try:
        value = _decoded(text)
    except JsonTextError as error:
        raise ConfigError(f"the DeepSpeed config {path} {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"the DeepSpeed config {path} must hold a JSON object, got {shown(value, chars=80)}")
    return value


def _decoded(text: str) -> object:
    """The JSON in *text*; or, where that is none, the object that DeepSpeed's own reader finds in it, if it is here."""
    try:
        return read_json(text, most_chars=_LONGEST_CONFIG, constants=True)
    except JsonSyntaxError:
        try:
            import hjson  # comes with DeepSpeed: JSON with comments, and commas and quotes that are missing

            value = hjson.loads(text, object_pairs_hook=object_of_keys)
        except JsonTextError:
            raise
        except Exception:  # not here, or not even that
            value = None
        if isinstance(value, dict):
            return value
        raise
