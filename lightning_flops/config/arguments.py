"""The settings as keyword arguments of a function: their types, and what ``help`` shows of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from lightning_flops.config.settings import SETTINGS, ProfilerConfig, given_settings, with_settings_described
from lightning_flops.config.unknown_names import refuse_unknown

F = TypeVar("F", bound=Callable[..., Any])


class SettingArguments(TypedDict, total=False):
    """Every setting that a program gives as an argument. None means that it is not given."""

    profile_step: int | Sequence[int] | None
    module_depth: int | None
    top_modules: int | None
    detailed: bool | None
    output_file: str | Path | None
    recompute_fwd_factor: float | None
    timing_steps: int | None
    trace: bool | None
    trace_dir: str | Path | None
    record_shapes: bool | None
    profile_memory: bool | None
    with_stack: bool | None
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


ARGUMENTS = tuple(name for name, setting in SETTINGS.items() if not setting.in_a_block_only)
"""The names of the settings that are arguments."""


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
