"""Conditions on a comparison, such as ``global_step_sec > 1.05``: what ends a CI job that got slower."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lightning_flops.errors import ComparisonError, ConfigError
from lightning_flops.schema.comparison import Comparison
from lightning_flops.schema.trace_comparison import TraceComparison
from lightning_flops.text.json_text import shown

SETTING = "fail_if"
"""The setting that a wrong condition is named by."""

FIGURES = (
    "global_step_sec",
    "samples_per_sec",
    "tokens_per_sec",
    "mfu",
    "hfu",
    "forward_flops",
    "backward_flops",
    "hardware_flops",
    "data_wait_ratio",
    "params",
)
"""Numbers of ``Profile.summary()``."""

FIGURES_OF_TRACES = ("exposed_communication_ratio", "device_memory_peak_bytes", "host_memory_peak_bytes")
"""What traces tell beside some of these."""

_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_FORM = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*")
_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class Condition:
    """A figure's ratio B / A held against a number."""

    text: str
    """As it was given."""
    figure: str
    sign: str
    limit: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a condition holds, and its figures in words."""

    holds: bool
    words: str


def parse_condition(text: str) -> Condition:
    """The condition that *text* states.

    Raises:
        ConfigError: it is none; the message names the setting, the rule and the value.
    """
    found = _FORM.fullmatch(text)
    if found is None:
        raise ConfigError(
            f"{SETTING} must be a figure, one of > >= < <=, and a number, as 'global_step_sec > 1.05', "
            f"got {shown(text, chars=_SHOWN_CHARS)}"
        )
    figure, sign, number = found.groups()
    if figure not in (known := (*FIGURES, *FIGURES_OF_TRACES)):
        raise ConfigError(f"{SETTING} must name one of {', '.join(known)}, got {shown(figure, chars=_SHOWN_CHARS)}")
    limit = float(number)
    if not math.isfinite(limit):
        raise ConfigError(f"{SETTING} must compare with a finite number, got {shown(number, chars=_SHOWN_CHARS)}")
    return Condition(text.strip(), figure, sign, limit)


def judge(comparison: Comparison | TraceComparison, condition: Condition) -> Verdict:
    """Whether the ratio B / A of a figure keeps *condition* whatever value within its noise is the true one.

    Raises:
        ComparisonError: the figure, or its noise, is not known.
    """
    figure = next((one for one in comparison.figures if one.name == condition.figure), None)
    if figure is None:
        raise ComparisonError(f"{condition.text}: {condition.figure} cannot be compared: it is no figure of theirs")
    if figure.ratio is None or figure.ratio_low is None or figure.ratio_high is None:
        raise ComparisonError(f"{condition.text}: {figure.name} cannot be compared: {figure.reason}")
    keeps = _SIGNS[condition.sign]
    holds = keeps(figure.ratio_low, condition.limit) and keeps(figure.ratio_high, condition.limit)
    seems = keeps(figure.ratio, condition.limit)
    words = f"{figure.name} B/A is {figure.ratio:.4g}"
    if figure.ratio_low != figure.ratio_high:
        words += f", by noise between {figure.ratio_low:.4g} and {figure.ratio_high:.4g}"
    if seems and not holds:
        words += ": within noise"
    return Verdict(holds, words)
