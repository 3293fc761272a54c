"""The settings: DeepSpeed's ``"flops_profiler"`` block with its own names and defaults, and the keys that are added."""

from __future__ import annotations

import inspect
import os
import textwrap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from lightning_flops.config.config_file import read_config
from lightning_flops.config.rules import (
    BOOLEAN,
    COUNT_FUNCTION_OR_NONE,
    FULL_OR_HALF,
    INTERVAL_OR_NONE,
    NUMBER_FROM_ZERO,
    PATH_OR_NONE,
    PEAK_OR_NONE,
    STEP_OR_STEPS,
    TAG_PREFIX,
    THRESHOLDS_OR_NONE,
    TRACE_SCHEDULE_OR_NONE,
    Rule,
    has_long_integer,
    integer_from,
)
from lightning_flops.config.unknown_names import clipped, nearest, refuse_unknown
from lightning_flops.config.values import BLOCK, AdviceThresholds, TraceSchedule
from lightning_flops.errors import ConfigError
from lightning_flops.text.json_text import MOST_DIGITS, shown


@dataclass(frozen=True, slots=True)
class Setting:
    """All that is said of one setting; it stands in the metadata of the setting's field."""

    rule: Rule
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
    rule: Rule,
    help: str,
    *,
    read_by_deepspeed: Callable[[Any], Any] | None = None,
    of_the_trace: bool = False,
    in_a_block_only: bool = False,
) -> _T:
    """The field of a setting; typed like ``dataclasses.field``, as what the field holds by default."""
    said = Setting(rule, help, read_by_deepspeed, of_the_trace, in_a_block_only)
    return field(default=default, metadata={"setting": said})


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
        BOOLEAN,
        "Profile at all. A DeepSpeed block that does not say so is not enabled.",
        read_by_deepspeed=_enabled_in_deepspeed,
        in_a_block_only=True,  # it is said by adding the callback
    )
    profile_step: int | tuple[int, ...] = _setting(
        1,
        STEP_OR_STEPS,
        "Count the step that begins after so many steps of this run. A list does so at each of its steps; those that "
        "fall into the window of another are left out, and the log names them.",
        read_by_deepspeed=_integer_in_deepspeed,
    )
    module_depth: int = _setting(
        -1,
        integer_from(-1),
        "The deepest level of modules in the report: 0 is the root, 1 its children; -1 shows all.",
        read_by_deepspeed=_integer_in_deepspeed,
    )
    top_modules: int = _setting(
        1,
        integer_from(1),
        "How many modules the aggregated profile lists at each level.",
        read_by_deepspeed=_integer_in_deepspeed,
    )
    detailed: bool = _setting(
        True, BOOLEAN, "Print every module in a tree, with its parameters and FLOPs.", read_by_deepspeed=bool
    )
    output_file: str | None = _setting(
        None,
        PATH_OR_NONE,
        "A file for the text report, as a path or a URL that fsspec opens. None shows it on the console.",
        read_by_deepspeed=_path_in_deepspeed,
    )
    recompute_fwd_factor: float = _setting(
        0.0,
        NUMBER_FROM_ZERO,
        "How many forward passes the backward repeats. It changes the estimated backward only; what is measured needs "
        "no hint.",
        read_by_deepspeed=_factor_in_deepspeed,
    )
    timing_steps: int = _setting(20, integer_from(1), "How many steps are timed after the counted one.")
    trace: bool = _setting(
        True,
        BOOLEAN,
        "Run one more step under torch.profiler, for the time of each module, operator and kernel.",
    )
    trace_dir: str | None = _setting(
        None,
        PATH_OR_NONE,
        "A folder, as a path or URL, where the trace file of that step is kept, with ``all_ranks`` that of each rank. "
        "None keeps none.",
        of_the_trace=True,
    )
    record_shapes: bool = _setting(
        False, BOOLEAN, "Record the shapes of operators' inputs in the traced step.", of_the_trace=True
    )
    profile_memory: bool = _setting(
        False, BOOLEAN, "Record what is allocated and freed in the traced step.", of_the_trace=True
    )
    with_stack: bool = _setting(
        False,
        BOOLEAN,
        "Record the Python calls of the traced step. It makes that step much slower.",
        of_the_trace=True,
    )
    monitor: bool = _setting(
        True, BOOLEAN, "Log throughput and MFU for as long as training runs, and sum them up at the end."
    )
    batch_size: int | Callable[[Any], int] | None = _setting(
        None,
        COUNT_FUNCTION_OR_NONE,
        "Samples in each batch, or a function that returns the samples of the batch it is given. None takes the first "
        "dimension of the batch's tensors, or else the micro-batch of a DeepSpeed engine.",
    )
    tokens_per_sample: int | Callable[[Any], int] | None = _setting(
        None,
        COUNT_FUNCTION_OR_NONE,
        "Tokens in each sample, or a function that returns the tokens of the whole batch it is given. None: there are "
        "no tokens/s.",
    )
    causal_attention: Literal["full", "half"] = _setting(
        "full",
        FULL_OR_HALF,
        'How much of the score matrix counts where attention is flagged causal: ``"full"`` all of it, ``"half"`` half.',
    )
    peak_flops_per_sec: float | Mapping[str, float] | None = _setting(
        None,
        PEAK_OR_NONE,
        "Dense peak of one device in FLOP/s: one number for all dtypes, or a mapping from dtype names. None looks the "
        "device up.",
    )
    advice_thresholds: Mapping[str, float] | None = _setting(
        None,
        THRESHOLDS_OR_NONE,
        "From where on something is worth a word of advice: a mapping from names of ``AdviceThresholds`` in "
        '``lightning_flops.config``, such as ``{"data_wait": 0.1}``. None: its defaults.',
    )
    every: int | None = _setting(
        None,
        INTERVAL_OR_NONE,
        "Profile again each time so many steps have gone by since the last step that ``profile_step`` names. None: "
        "only at those.",
    )
    timer_only: bool = _setting(
        False, BOOLEAN, "Only the monitor runs: no step is counted, timed in its parts, or traced."
    )
    trace_schedule: TraceSchedule = _setting(
        TraceSchedule(),
        TRACE_SCHEDULE_OR_NONE,
        "Which steps after the timed ones are traced, as ``torch.profiler.schedule`` has it: a mapping from ``wait``, "
        "``warmup``, ``active`` and ``repeat`` to numbers of steps. By default one step, after one to warm up.",
        of_the_trace=True,
    )
    ranks_timeout_sec: float = _setting(
        30.0,
        NUMBER_FROM_ZERO,
        "How many seconds rank 0's report waits for the measurements of the other ranks. Training goes on meanwhile.",
    )
    all_ranks: bool = _setting(
        False,
        BOOLEAN,
        "Every rank writes files of its own profile, too: profile.rank3.json beside rank 0's profile.json.",
    )
    tensorboard_dir: str | None = _setting(
        None,
        PATH_OR_NONE,
        "A folder for TensorBoard's files, for a DeepSpeed engine whose own monitors are off. Under Lightning the "
        "loggers have their own.",
        in_a_block_only=True,
    )
    tag_prefix: str = _setting(BLOCK, TAG_PREFIX, "What the tags of scalars and texts begin with.")

    def __post_init__(self) -> None:
        """Check every setting against its rule, and keep it in the rule's form."""
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            if not setting.rule.holds(value):
                raise ConfigError(f"{BLOCK}.{name} must be {setting.rule.words}, got {shown(value)}")
            kept = setting.rule.kept(value)
            if has_long_integer(kept):
                words = f"must have no integer of more than {MOST_DIGITS:,} digits"
                raise ConfigError(f"{BLOCK}.{name} {words}, got {shown(value)}")
            object.__setattr__(self, name, kept)
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
            config = read_config(config)
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
                    unknown.append(f"{BLOCK}.{named} is not a setting, did you mean {nearest(name, SETTINGS)}?")
                else:
                    settings[name] = _read_as_deepspeed(name, value)
            taken = cls(**{**settings, **given})
        except Exception as error:  # a repr, a comparison or a conversion of somebody's object may raise anything
            wrong = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            taken = cls(**{**given, "enabled": False})
        return TakenBlock(taken, tuple(map(clipped, unknown)), wrong and clipped(wrong), builtin_on)


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
        name: str(value) if SETTINGS[name].rule is PATH_OR_NONE and isinstance(value, Path) else value
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
    section = ["Args:"]
    for name in names:
        default = defaults[name]
        # The help itself says what None means, and what a schedule is.
        told = f" Default {default!r}." if isinstance(default, (int, float, str)) else ""
        section += _ARGUMENT.wrap(f"{name}: {SETTINGS[name].help}{told}")
    before, raises, after = inspect.cleandoc(docstring).partition("Raises:\n")
    return "\n".join([before.rstrip(), "", *section, "", raises + after]).rstrip()


# A line that ends within a word would put a space into it on the command line.
_ARGUMENT = textwrap.TextWrapper(
    110, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False, break_long_words=False
)


ProfilerConfig.__doc__ = with_settings_described(ProfilerConfig.__doc__, SETTINGS)
