"""The settings: DeepSpeed's ``"flops_profiler"`` block with its own names and defaults, and the keys that are added."""

from __future__ import annotations

import inspect
import json
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, TypeVar

from lightning_flops.config import rules
from lightning_flops.config.rules import ADVICE_THRESHOLDS, BLOCK, TraceSchedule, refuse_unknown, unknown_setting
from lightning_flops.errors import ConfigError
from lightning_flops.units import shown

if TYPE_CHECKING:
    from typing_extensions import Unpack

_T = TypeVar("_T")
F = TypeVar("F", bound=Callable[..., Any])

_IN_A_BLOCK_ONLY = ("enabled", "tensorboard_dir")  # keys of a DeepSpeed block that are no arguments of the callback
# Settings of the traced steps only, whose defaults ask for nothing.
_OF_THE_TRACE = ("trace_dir", "record_shapes", "profile_memory", "with_stack", "trace_schedule")


class Setting(NamedTuple):
    """What is known of one setting, kept in the metadata of its field."""

    rule: rules.Rule
    help: str  # what it does, in sentences: for the callback's docstring, LightningCLI's help and the table in the docs


def _setting(default: _T, help: str, rule: rules.Rule = rules.BOOLEAN) -> _T:
    """The field of a setting. For type checkers it is its default, as with ``dataclasses.field``."""
    return field(default=default, metadata={"setting": Setting(rule, help)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """Settings of one profiler. The first seven are DeepSpeed's and have its defaults, except ``enabled``.

    Raises:
        ConfigError: a setting breaks its rule; the message names the setting, the rule and the value.
    """

    enabled: bool = _setting(True, "Whether to profile at all. A DeepSpeed block without this key is not enabled.")
    profile_step: int | tuple[int, ...] = _setting(
        1,
        "The step to profile, given as the number of steps of this run before it. A list profiles each of its steps; "
        "one that falls into the window of another is left out, and the log names it.",
        rules.STEP_OR_STEPS,
    )
    module_depth: int = _setting(
        -1,
        "The deepest level of modules in the report: 0 is the root, 1 its children; -1 shows all.",
        rules.integer_from(-1),
    )
    top_modules: int = _setting(
        1, "How many modules the aggregated profile lists at each level.", rules.integer_from(1)
    )
    detailed: bool = _setting(
        False,
        "Append DeepSpeed's summary, every other table and the tree of modules to the report. In a DeepSpeed config it "
        "is true unless the block says otherwise, as there.",
    )
    output_file: str | None = _setting(
        None,
        "A file for the text report, as a path or a URL that fsspec opens. None shows it on the console.",
        rules.PATH_OR_NONE,
    )
    recompute_fwd_factor: float = _setting(
        0.0,
        "How many forward passes the backward repeats. It changes only the estimated backward; the measured one needs "
        "no hint.",
        rules.NUMBER_FROM_ZERO,
    )
    timing_steps: int = _setting(
        20,
        "How many steps are timed after the counted one; from 16 on, half of them without marks.",
        rules.integer_from(1),
    )
    trace: bool = _setting(
        True, "Run some more steps under torch.profiler, for the time of each module, operator and kernel."
    )
    trace_dir: str | None = _setting(
        None,
        "A folder, as a path or URL, for the trace file of those steps; with ``all_ranks``, for the files of all "
        "ranks. None keeps no file.",
        rules.PATH_OR_NONE,
    )
    record_shapes: bool = _setting(False, "Record the shapes of operators' inputs in the traced steps.")
    profile_memory: bool = _setting(False, "Record what is allocated and freed in the traced steps.")
    with_stack: bool = _setting(False, "Record the Python calls of the traced steps. It makes them much slower.")
    lines: bool = _setting(
        True,
        "Sample the lines of your program in some steps after the traced ones, by a timer signal on the main thread.",
    )
    monitor: bool = _setting(True, "Log throughput and MFU as long as training runs, and a summary at the end.")
    batch_size: int | Callable[[Any], int] | None = _setting(
        None,
        "Samples in each batch, or a function that returns the samples of the batch it is given. None takes the first "
        "dimension of the batch's tensors, or else the micro-batch of a DeepSpeed engine.",
        rules.COUNT_FUNCTION_OR_NONE,
    )
    tokens_per_sample: int | Callable[[Any], int] | None = _setting(
        None,
        "Tokens in each sample, or a function that returns the tokens of the whole batch it is given. None: tokens are "
        "read from the batches, where these show them.",
        rules.COUNT_FUNCTION_OR_NONE,
    )
    causal_attention: Literal["full", "half"] = _setting(
        "full",
        'How attention with the causal flag counts: ``"full"`` is the whole score matrix, ``"half"`` is half of it.',
        rules.FULL_OR_HALF,
    )
    peak_flops_per_sec: float | Mapping[str, float] | None = _setting(
        None,
        "Dense peak of one device in FLOP/s: one number for all dtypes, or a mapping from dtype names. None looks the "
        "device up.",
        rules.PEAK_OR_NONE,
    )
    memory_bytes_per_sec: float | None = _setting(
        None,
        "Bandwidth of one device's memory in bytes/s, for the roofline and for what a byte weighs where runs are "
        "compared. None looks the device up.",
        rules.POSITIVE_OR_NONE,
    )
    advice_thresholds: Mapping[str, float] | None = _setting(
        None,
        "The limits from which on advice is given: a mapping from names of ``ADVICE_THRESHOLDS`` in "
        '``lightning_flops.config`` to numbers, such as ``{"data_wait": 0.1}``. None means the defaults there.',
        rules.THRESHOLDS_OR_NONE,
    )
    every: int | None = _setting(
        None,
        "After the last step of ``profile_step``, profile again each time this many steps have passed. None does not "
        "profile again.",
        rules.INTERVAL_OR_NONE,
    )
    timer_only: bool = _setting(False, "Run the monitor only: no step is counted, timed in its parts, or traced.")
    trace_schedule: TraceSchedule = _setting(
        TraceSchedule(),
        "Which steps after the timed ones are traced, as ``torch.profiler.schedule`` has it: a mapping from ``wait``, "
        "``warmup``, ``active`` and ``repeat`` to numbers of steps. By default five steps, after one to warm up.",
        rules.TRACE_SCHEDULE_OR_NONE,
    )
    ranks_timeout_sec: float = _setting(
        30.0,
        "How many seconds the report of rank 0 waits for the measurements of other ranks. Training goes on meanwhile.",
        rules.NUMBER_FROM_ZERO,
    )
    all_ranks: bool = _setting(False, "Let every rank write files of its own profile, such as profile.rank3.json.")
    html: bool = _setting(
        True,
        "Write the report also as a page to look at, profile.html, beside the profile.json of rank 0, and "
        "for TensorBoard's tab FLOPs.",
    )
    tensorboard_dir: str | None = _setting(
        None,
        "A folder for the TensorBoard files of a DeepSpeed engine whose own monitors are off. Lightning's loggers have "
        "folders of their own.",
        rules.PATH_OR_NONE,
    )
    tag_prefix: str = _setting(BLOCK, "The prefix of the tags of scalars and texts.", rules.TAG_PREFIX)

    if TYPE_CHECKING:  # what the fields are is what is kept; more is taken

        def __init__(
            self,
            *,
            enabled: bool = True,
            tensorboard_dir: str | os.PathLike[str] | None = None,
            **settings: Unpack[SettingArguments],
        ) -> None: ...

    def __post_init__(self) -> None:
        """Check every setting against its rule, and keep it in the form that the rule gives it."""
        wrong = []
        for name, setting in SETTINGS.items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, setting.rule.kept(value))
            except (ValueError, ArithmeticError, TypeError):
                wrong.append(f"{BLOCK}.{name} must be {setting.rule.words}, got {shown(value)}")
        if wrong:
            raise ConfigError("; ".join(wrong))
        if self.timer_only and not self.monitor:
            raise ConfigError(f"{BLOCK}.monitor must be true where timer_only is, got {self.monitor!r}")
        for one in fields(self) if not self.trace else ():
            if one.name in _OF_THE_TRACE and getattr(self, one.name) != one.default:
                raise ConfigError(f"{BLOCK}.trace must be true where {one.name} is given, got {self.trace!r}")

    @property
    def thresholds(self) -> Mapping[str, float]:
        """The thresholds of advice in force."""
        return {**ADVICE_THRESHOLDS, **(self.advice_thresholds or {})}

    def next_profile_step(self, *, steps_done: int) -> int | None:
        """The next step to profile, given as the number of steps before it, after *steps_done*; None: there is none."""
        if self.timer_only:
            return None
        steps = (self.profile_step,) if isinstance(self.profile_step, int) else self.profile_step
        listed = next((step for step in steps if step >= steps_done), None)
        if listed is not None or self.every is None:
            return listed
        return steps[-1] + -(-(steps_done - steps[-1]) // self.every) * self.every  # rounded up

    @classmethod
    def from_block(cls, block: object) -> ProfilerConfig:
        """Settings from a ``"flops_profiler"`` block, or a ConfigError. As in DeepSpeed, off unless it says enabled."""
        if not isinstance(block, Mapping):
            raise ConfigError(f"{BLOCK} must be an object, got {shown(block)}")
        refuse_unknown(block, known=SETTINGS)
        return cls(**{"enabled": False, "detailed": True, **block})

    @classmethod
    def from_deepspeed_config(cls, config: Mapping[str, Any] | str | os.PathLike[str]) -> ProfilerConfig:
        """Settings from the ``"flops_profiler"`` block of a DeepSpeed config; not enabled if it has none.

        *config* is a mapping, or the path of a JSON file; a ConfigError says what is wrong in it.
        """
        whole: Any = config
        if isinstance(config, (str, os.PathLike)):
            try:
                whole = json.loads(Path(config).expanduser().read_bytes())
            except (OSError, ValueError, RecursionError) as error:
                raise ConfigError(
                    f"cannot read the DeepSpeed config {config}: {getattr(error, 'strerror', None) or error}"
                ) from error
        if not isinstance(whole, Mapping):
            raise ConfigError(
                f"a DeepSpeed config must be a JSON object or the path of one, got {shown(whole, chars=80)}"
            )
        return cls.from_block(whole.get(BLOCK, {}))

    @classmethod
    def taken_over(
        cls, block: object, *, given: Mapping[str, Any] | None = None, enabled: bool = False
    ) -> tuple[ProfilerConfig, list[str], str | None]:
        """Settings from a ``"flops_profiler"`` block that was written for DeepSpeed. Nothing is raised.

        A block that DeepSpeed accepts must not end the training here. An unknown key is ignored. A value that breaks
        its rule means that nothing is profiled. The caller warns of both: returned, too, are a message for each ignored
        key, which names the nearest setting, and what is wrong with a value, if any is. Settings *given* elsewhere win
        over the block's; without the key ``enabled`` it is *enabled* or not.
        """
        given, unknown, wrong = given or {}, list[str](), None
        try:
            if not isinstance(block, Mapping):
                raise ConfigError(f"{BLOCK} must be an object, got {shown(block)}")
            unknown = [unknown_setting(name, SETTINGS) for name in block if name not in SETTINGS]
            # As DeepSpeed takes an empty ``output_file``.
            known = {name: None if value == "" else value for name, value in block.items() if name in SETTINGS}
            taken = cls(**{"enabled": enabled, "detailed": bool(block), **known, **given})
        except Exception as error:  # comparing, converting or showing a user's object may raise anything
            wrong = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            taken = cls(**{**given, "enabled": False})
        # A value in a block may be as long as a file.
        return taken, unknown, wrong and wrong[:300]


#: Every setting by its name, in the order of the fields.
SETTINGS: Mapping[str, Setting] = {one.name: one.metadata["setting"] for one in fields(ProfilerConfig)}
OF_DEEPSPEED = tuple(SETTINGS)[:7]
#: The names of the settings that are arguments.
ARGUMENTS = tuple(name for name in SETTINGS if name not in _IN_A_BLOCK_ONLY)


def given_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The settings among a callback's *arguments*: those that are not None."""
    return {name: value for name, value in arguments.items() if value is not None}


def with_settings_described(docstring: str | None, names: Iterable[str]) -> str | None:
    """*docstring* with the settings in *names* last in its section ``Args``, which is made if there is none.

    None stays None: under ``python -OO`` there are no docstrings.
    """
    if docstring is None:
        return None
    defaults = {one.name: one.default for one in fields(ProfilerConfig)}
    section: list[str] = []
    for name in names:
        default = defaults[name]
        # What None means, and what the default schedule is, stands in the help.
        default_text = f" Default {default!r}." if isinstance(default, (int, float, str)) else ""
        section += _ARGUMENT.wrap(f"{name}: {SETTINGS[name].help}{default_text}")
    before, *after = re.split(r"\n+(?=(?:Returns|Raises):\n)", inspect.cleandoc(docstring), maxsplit=1)
    title = () if "\nArgs:\n" in before else ("", "Args:")
    return "\n".join([before, *title, *section, *(f"\n{one}" for one in after)])


# jsonargparse joins the lines with spaces, so no line may end inside a word.
_ARGUMENT = textwrap.TextWrapper(
    110, initial_indent=" " * 4, subsequent_indent=" " * 8, break_on_hyphens=False, break_long_words=False
)


class SettingArguments(TypedDict, total=False):
    """Every setting that a program gives as an argument, for type checkers. None means that it is not given."""

    profile_step: int | Sequence[int] | None
    module_depth: int | None
    top_modules: int | None
    detailed: bool | None
    output_file: str | os.PathLike[str] | None
    recompute_fwd_factor: float | None
    timing_steps: int | None
    trace: bool | None
    trace_dir: str | os.PathLike[str] | None
    record_shapes: bool | None
    profile_memory: bool | None
    with_stack: bool | None
    lines: bool | None
    monitor: bool | None
    batch_size: int | Callable[[Any], int] | None
    tokens_per_sample: int | Callable[[Any], int] | None
    causal_attention: Literal["full", "half"] | None
    peak_flops_per_sec: float | Mapping[str, float] | None
    memory_bytes_per_sec: float | None
    advice_thresholds: Mapping[str, float] | None
    every: int | None
    timer_only: bool | None
    trace_schedule: Mapping[str, int] | None
    ranks_timeout_sec: float | None
    all_ranks: bool | None
    html: bool | None
    tag_prefix: str | None


def takes_settings(function: F) -> F:
    """Show each setting in the signature and the docstring of *function*, which takes them as ``**settings``."""
    function.__doc__ = with_settings_described(function.__doc__, ARGUMENTS)
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    settings = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in ARGUMENTS]
    function.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
    return function


def config_from(arguments: Mapping[str, Any], *, owner: str) -> ProfilerConfig:
    """The settings that *owner* was given as *arguments*; None has not been given.

    Raises:
        ConfigError: an argument is not a setting, or breaks its rule.
    """
    refuse_unknown(arguments, known=ARGUMENTS, owner=owner)
    return ProfilerConfig(**given_settings(arguments))


ProfilerConfig.__doc__ = with_settings_described(ProfilerConfig.__doc__, SETTINGS)
