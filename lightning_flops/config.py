"""Settings: DeepSpeed's ``"flops_profiler"`` block with its own names and defaults, and the keys this project adds."""

from __future__ import annotations

import difflib
import inspect
import math
import numbers
import os
import posixpath
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import fsspec

from lightning_flops.errors import ConfigError
from lightning_flops.text.json_text import JsonSyntaxError, JsonTextError, object_of_keys, read_json, shown

BLOCK = "flops_profiler"
"""Name of the block in a DeepSpeed config, and of the settings in every message."""

_LONGEST_CONFIG = 1 << 20
"""Bytes; configs of DeepSpeed have some thousand."""

DTYPE_NAMES = ("bfloat16", "float16", "tf32", "float32", "float64", "float8", "int8")
"""Names by which ``peak_flops_per_sec`` may be given for each dtype."""


@dataclass(frozen=True, slots=True)
class _Rule:
    """What a setting may be."""

    words: str
    """For the message, after "must be"."""
    holds: Callable[[Any], bool]
    kept: Callable[[Any], Any] = lambda value: value
    """The form in which a value that holds is kept: Python's own numbers, and copies, which nobody else changes."""


@dataclass(frozen=True, slots=True)
class Setting:
    """All that is said of one setting; it stands in the metadata of the setting's field."""

    rule: _Rule
    help: str
    """What it does, in sentences for the callback's docstring, the command line's help and the docs' table."""
    read_by_deepspeed: Callable[[Any], Any] | None = None
    """Of DeepSpeed's own settings: what DeepSpeed makes of a value where it uses it.

    DeepSpeed checks no value of its block; others fail there, or do nothing. Of 0.16 to 0.19: it compares the step,
    counts up to the depth and the number of modules, asks for the truth of ``detailed`` and ``output_file``, and
    multiplies by the factor.
    """
    of_the_trace: bool = False
    """It says something of the traced step alone; its default asks for nothing."""
    in_a_block_only: bool = False
    """The callback has no such argument."""


_T = TypeVar("_T")


def _setting(
    default: _T,
    rule: _Rule,
    help: str,
    *,
    read_by_deepspeed: Callable[[Any], Any] | None = None,
    of_the_trace: bool = False,
    in_a_block_only: bool = False,
) -> _T:
    """The field of a setting; typed like ``dataclasses.field``, as what the field holds by default."""
    said = Setting(rule, help, read_by_deepspeed, of_the_trace, in_a_block_only)
    return field(default=default, metadata={"setting": said})


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


def _is_peak(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(key in DTYPE_NAMES and _is_positive(peak) for key, peak in value.items())
    return value is None or _is_positive(value)


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    # A copy: the caller's mapping may change later.
    return {name: float(value) for name, value in values.items()}


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


def _whole_trace_schedule(value: Any) -> TraceSchedule:
    return value if isinstance(value, TraceSchedule) else TraceSchedule(**(value or {}))


def _is_step_or_steps(value: Any) -> bool:
    steps = value if isinstance(value, (list, tuple)) else [value]
    return bool(steps) and all(_is_integer(step) and step >= 0 for step in steps)


def _step_or_steps(value: Any) -> int | tuple[int, ...]:
    return tuple(sorted({int(step) for step in value})) if isinstance(value, (list, tuple)) else int(value)


def _integer_from(lowest: int) -> _Rule:
    return _Rule(f"an integer >= {lowest}", lambda value: _is_integer(value) and value >= lowest, int)


_BOOLEAN = _Rule("true or false", lambda value: isinstance(value, bool))
_NUMBER_FROM_ZERO = _Rule("a number >= 0", lambda value: _is_number(value) and value >= 0, float)
_STEP_OR_STEPS = _Rule("an integer >= 0, or a list of such", _is_step_or_steps, _step_or_steps)
_INTERVAL = _Rule(
    "an integer >= 1, or None",
    lambda value: value is None or (_is_integer(value) and value >= 1),
    lambda value: value if value is None else int(value),
)
_COUNT_OR_FUNCTION = _Rule(
    "an integer > 0, a function of the batch, or None",
    lambda value: value is None or callable(value) or (_is_integer(value) and value > 0),
    lambda value: int(value) if _is_integer(value) else value,
)
_PATH_OR_NONE = _Rule(
    "a path or URL as text, or None",
    lambda value: value is None or (isinstance(value, str) and value.strip() != ""),
)
_CAUSAL = _Rule("'full' or 'half'", lambda value: isinstance(value, str) and value in ("full", "half"))
_PEAK = _Rule(
    f"a number > 0, a mapping from dtype names ({', '.join(DTYPE_NAMES)}) to numbers > 0, or None",
    _is_peak,
    lambda value: _floats(value) if isinstance(value, Mapping) else value if value is None else float(value),
)
_LIMITS = _Rule(
    f"a mapping from names ({', '.join(_THRESHOLDS)}) to numbers >= 0, or None",
    lambda value: value is None or _are_thresholds(value),
    lambda value: value if value is None else _floats(value),
)
_TRACE_SCHEDULE = _Rule(
    "a mapping from wait, warmup (>= 0), active and repeat (>= 1) to integers, or None",
    lambda value: value is None or _is_trace_schedule(value),
    _whole_trace_schedule,
)
_TAG_PREFIX = _Rule("letters, digits, spaces and _ - . with single / only between them", _is_tag_prefix)


def _integer_in_deepspeed(value: Any) -> Any:
    return int(value) if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()) else value


def _enabled_in_deepspeed(value: Any) -> Any:
    # DeepSpeed writes `wall_clock_breakdown | enabled`, and refuses what this refuses, before anybody is profiled.
    return bool(False | value)


def _path_in_deepspeed(value: Any) -> Any:
    return os.fspath(value) if isinstance(value, os.PathLike) else value or None


def _factor_in_deepspeed(value: Any) -> Any:
    return float(value) if isinstance(value, bool) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Settings of one profiler; the first seven are DeepSpeed's, with DeepSpeed's defaults except ``enabled``.

    Raises:
        ConfigError: a setting breaks its rule; the message names the setting, the rule and the value.
    """

    enabled: bool = _setting(
        True,
        _BOOLEAN,
        "Profile at all. A DeepSpeed block that does not say so is not enabled.",
        read_by_deepspeed=_enabled_in_deepspeed,
        in_a_block_only=True,  # it is said by adding the callback
    )
    profile_step: int | tuple[int, ...] = _setting(
        1,
        _STEP_OR_STEPS,
        "Count the step that begins after so many steps of this run. A list does so at each of its steps; those that "
        "fall into the window of another are left out, and the log names them.",
        read_by_deepspeed=_integer_in_deepspeed,
    )
    module_depth: int = _setting(
        -1,
        _integer_from(-1),
        "The deepest level of modules in the report: 0 is the root, 1 its children; -1 shows all.",
        read_by_deepspeed=_integer_in_deepspeed,
    )
    top_modules: int = _setting(
        1,
        _integer_from(1),
        "How many modules the aggregated profile lists at each level.",
        read_by_deepspeed=_integer_in_deepspeed,
    )
    detailed: bool = _setting(
        True, _BOOLEAN, "Print every module in a tree, with its parameters and FLOPs.", read_by_deepspeed=bool
    )
    output_file: str | None = _setting(
        None,
        _PATH_OR_NONE,
        "A file for the text report, as a path or a URL that fsspec opens. None shows it on the console.",
        read_by_deepspeed=_path_in_deepspeed,
    )
    recompute_fwd_factor: float = _setting(
        0.0,
        _NUMBER_FROM_ZERO,
        "How many forward passes the backward repeats. It changes the estimated backward only; what is measured needs "
        "no hint.",
        read_by_deepspeed=_factor_in_deepspeed,
    )
    timing_steps: int = _setting(20, _integer_from(1), "How many steps are timed after the counted one.")
    trace: bool = _setting(
        True,
        _BOOLEAN,
        "Run one more step under torch.profiler, for the time of each module, operator and kernel.",
    )
    trace_dir: str | None = _setting(
        None,
        _PATH_OR_NONE,
        "A folder, as a path or URL, where the trace file of that step is kept, with ``all_ranks`` that of each rank. "
        "None keeps none.",
        of_the_trace=True,
    )
    record_shapes: bool = _setting(
        False, _BOOLEAN, "Record the shapes of operators' inputs in the traced step.", of_the_trace=True
    )
    profile_memory: bool = _setting(
        False, _BOOLEAN, "Record what is allocated and freed in the traced step.", of_the_trace=True
    )
    with_stack: bool = _setting(
        False,
        _BOOLEAN,
        "Record the Python calls of the traced step. It makes that step much slower.",
        of_the_trace=True,
    )
    monitor: bool = _setting(
        True, _BOOLEAN, "Log throughput and MFU for as long as training runs, and sum them up at the end."
    )
    batch_size: int | Callable[[Any], int] | None = _setting(
        None,
        _COUNT_OR_FUNCTION,
        "Samples in each batch, or a function that returns the samples of the batch it is given. None takes the first "
        "dimension of the batch's tensors, or else the micro-batch of a DeepSpeed engine.",
    )
    tokens_per_sample: int | Callable[[Any], int] | None = _setting(
        None,
        _COUNT_OR_FUNCTION,
        "Tokens in each sample, or a function that returns the tokens of the whole batch it is given. None: there are "
        "no tokens/s.",
    )
    causal_attention: Literal["full", "half"] = _setting(
        "full",
        _CAUSAL,
        'How much of the score matrix counts where attention is flagged causal: ``"full"`` all of it, ``"half"`` half.',
    )
    peak_flops_per_sec: float | Mapping[str, float] | None = _setting(
        None,
        _PEAK,
        "Dense peak of one device in FLOP/s: one number for all dtypes, or a mapping from dtype names. None looks the "
        "device up.",
    )
    advice_thresholds: Mapping[str, float] | None = _setting(
        None,
        _LIMITS,
        "From where on something is worth a word of advice: a mapping from names of ``AdviceThresholds`` in "
        '``lightning_flops.config``, such as ``{"data_wait": 0.1}``. None: its defaults.',
    )
    every: int | None = _setting(
        None,
        _INTERVAL,
        "Profile again each time so many steps have gone by since the last step that ``profile_step`` names. None: "
        "only at those.",
    )
    timer_only: bool = _setting(
        False, _BOOLEAN, "Only the monitor runs: no step is counted, timed in its parts, or traced."
    )
    trace_schedule: TraceSchedule = _setting(
        TraceSchedule(),
        _TRACE_SCHEDULE,
        "Which steps after the timed ones are traced, as ``torch.profiler.schedule`` has it: a mapping from ``wait``, "
        "``warmup``, ``active`` and ``repeat`` to numbers of steps. By default one step, after one to warm up.",
        of_the_trace=True,
    )
    ranks_timeout_sec: float = _setting(
        30.0,
        _NUMBER_FROM_ZERO,
        "How many seconds rank 0's report waits for the measurements of the other ranks. Training goes on meanwhile.",
    )
    all_ranks: bool = _setting(
        False,
        _BOOLEAN,
        "Every rank writes files of its own profile, too: profile.rank3.json beside rank 0's profile.json.",
    )
    tensorboard_dir: str | None = _setting(
        None,
        _PATH_OR_NONE,
        "A folder for TensorBoard's files, for a DeepSpeed engine whose own monitors are off. Under Lightning the "
        "loggers have their own.",
        in_a_block_only=True,
    )
    tag_prefix: str = _setting(BLOCK, _TAG_PREFIX, "What the tags of scalars and texts begin with.")

    def __post_init__(self) -> None:
        """Check every setting against its rule, and keep it in the rule's form."""
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if not setting.rule.holds(value):
                raise ConfigError(f"{BLOCK}.{name} must be {setting.rule.words}, got {shown(value)}")
            object.__setattr__(self, name, setting.rule.kept(value))
        if self.timer_only and not self.monitor:
            raise ConfigError(f"{BLOCK}.monitor must be true where timer_only is, got {self.monitor!r}")
        for one in fields(self) if not self.trace else ():
            if SETTINGS[one.name].of_the_trace and getattr(self, one.name) != one.default:
                raise ConfigError(f"{BLOCK}.trace must be true where {one.name} is given, got {self.trace!r}")

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
        refuse_unknown(block, known=SETTINGS)
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
                if name not in SETTINGS:
                    named = name if isinstance(name, str) and name.isprintable() else shown(name)
                    unknown.append(f"{BLOCK}.{named} is not a setting, did you mean {_nearest(name, SETTINGS)}?")
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


SETTINGS: Mapping[str, Setting] = {one.name: one.metadata["setting"] for one in fields(ProfilerConfig)}
"""Every setting by its name, in the order of the fields."""


def _read_as_deepspeed(name: str, value: Any) -> Any:
    """*value* as DeepSpeed takes it; as it is where DeepSpeed refuses it or does not know the setting."""
    read = SETTINGS[name].read_by_deepspeed
    try:
        return value if read is None else read(value)
    except Exception:  # whatever an operator of the value raises: the rule says what is wrong with it
        return value


def given_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that a callback's *arguments* give: None gives nothing, and a ``Path`` is given as text."""
    return {
        name: str(value) if SETTINGS[name].rule is _PATH_OR_NONE and isinstance(value, Path) else value
        for name, value in arguments.items()
        if value is not None
    }


def with_settings_described(docstring: str | None, names: Iterable[str]) -> str | None:
    """*docstring* with a section that says of each setting in *names* what it does, before it says what is raised.

    None, which every docstring is under ``python -OO``, stays None.
    """
    if docstring is None:
        return None
    defaults = {one.name: one.default for one in fields(ProfilerConfig)}
    lines = ["Args:"]
    for name in names:
        default = defaults[name]
        # The help itself says what None means, and what a schedule is.
        told = f" Default {default!r}." if isinstance(default, (int, float, str)) else ""
        lines += textwrap.wrap(
            f"{name}: {SETTINGS[name].help}{told}", 110, initial_indent=" " * 4, subsequent_indent=" " * 8
        )
    before, raises, after = inspect.cleandoc(docstring).partition("Raises:\n")
    return f"{before}{chr(10).join(lines)}\n\n{raises}{after}"


ProfilerConfig.__doc__ = with_settings_described(ProfilerConfig.__doc__, SETTINGS)


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
