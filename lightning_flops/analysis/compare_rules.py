"""Figures and settings of two runs, and conditions on them (``global_step_sec > 1.05``), which may end a CI job."""

from __future__ import annotations

import math
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from lightning_flops.errors import ComparisonError, ConfigError
from lightning_flops.schema.comparison import Comparison, FigureDifference, SettingDifference
from lightning_flops.schema.profile import Profile
from lightning_flops.schema.trace_comparison import TraceComparison
from lightning_flops.text.printable import shown

SETTING = "--fail-if"
"""The option that a wrong condition is named by."""

FIGURES = (
    "global_step_sec", "samples_per_sec", "tokens_per_sec", "mfu", "hfu", "forward_flops", "backward_flops",
    "hardware_flops", "data_wait_ratio", "cpu_time_sec", "params",
)  # fmt: skip
"""Numbers of ``Profile.summary()``."""

WALL = ("global_step_sec", "samples_per_sec", "tokens_per_sec", "mfu", "hfu", "data_wait_ratio")
"""Figures of the wall clock, which say little of a run that was starved of processors."""

TIMED = (*WALL, "cpu_time_sec")
"""Figures that have noise; the others are exact."""

FIGURES_OF_TRACES = ("exposed_communication_ratio", "device_memory_peak_bytes", "host_memory_peak_bytes")
"""What traces say of some of these in addition."""

NO_NOISE = "single steps are not known, or too few to say what is noise"
TOO_WIDE = "its single steps stray so far that zero is within its noise"
EXACT = (1.0, 1.0)
"""The noise of a count."""
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le
}  # fmt: skip
_FORM = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*")
_SHOWN_CHARS = 60


def figure_difference(
    name: str,
    a: float | None,
    b: float | None,
    *,
    noise: Callable[[], tuple[float, float] | str],
    unknown: Callable[[str], str | None],
) -> FigureDifference:
    """The figure *name* in both runs.

    Args:
        name: of the figure.
        a: its value in run A; None if it is not known.
        b: its value in run B.
        noise: factors from the ratio to the ends of its noise, or why that is not known.
        unknown: why the figure is not known in the run "A" or "B"; None if there are no words for it.
    """
    ratio = low = high = None
    reason = ""
    if a is None or b is None:
        which = "A" if a is None else "B"
        words = unknown(which)
        reason = f"not known in {which}" + (f": {words}" if words else "")
    elif not a and b:
        reason = "0 in A"
    elif a and abs(b) / sys.float_info.max >= abs(a):
        reason = "too far apart"
    else:
        ratio = b / a if a else 1.0
        ends = noise() if ratio != 1.0 or a else EXACT
        if isinstance(ends, str):
            reason = ends
        else:
            low, high = ratio * ends[0], ratio * ends[1]
    return FigureDifference(name=name, a=a, b=b, ratio=ratio, ratio_low=low, ratio_high=high, reason=reason)


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
    inconclusive: bool
    """A run was starved of processors, so its wall clock says nothing of the program; or its steps stray too far."""
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

    Of a figure by the wall clock that is inconclusive where a run was starved of processors, as it is of any figure
    that strays so far that it may as well be zero.

    Raises:
        ComparisonError: the figure, or its noise, is not known.
    """
    figure = next((one for one in comparison.figures if one.name == condition.figure), None)
    if figure is None:
        raise ComparisonError(f"{condition.text}: {condition.figure} cannot be compared: it is no figure of theirs")
    starved = [which for which, run in (("A", comparison.a), ("B", comparison.b)) if getattr(run, "starved", "")]
    if figure.ratio is not None and starved and condition.figure in WALL:
        waited = f"{' and '.join(starved)} had to wait for processors"
        return Verdict(False, True, f"{figure.name} B/A is {figure.ratio:.4g}, but {waited}")
    if figure.ratio is not None and figure.reason == TOO_WIDE:
        return Verdict(False, True, f"{figure.name} B/A is {figure.ratio:.4g}, but {TOO_WIDE}")
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
    return Verdict(holds, False, words)


_SETTINGS_FIRST = tuple(
    "context.device_type context.device_name context.world_size context.micro_batch_size context.accumulate "
    "micro_steps samples tokens context.precision dtypes context.torch_version context.framework "
    "context.framework_version params trainable_params".split()
)
"""What bears most on speed; whatever else of the context and the settings differs comes after these."""


def setting_differences(a: Profile, b: Profile) -> tuple[SettingDifference, ...]:
    """What is set up differently."""
    of_a, of_b = _set_up(a), _set_up(b)
    names = dict.fromkeys((*_SETTINGS_FIRST, *of_b))
    return tuple(
        SettingDifference(name=name, a=_as_text(of_a[name]), b=_as_text(of_b[name]))
        for name in names
        if of_a[name] != of_b[name]
    )


def _set_up(profile: Profile) -> dict[str, Any]:
    found = {name: getattr(profile, name) for name in _SETTINGS_FIRST if "." not in name}
    found["dtypes"] = ", ".join(one.dtype for one in profile.dtypes)
    for above, record in (("context", profile.context), ("settings", profile.settings)):
        found |= {f"{above}.{one.name}": getattr(record, one.name) for one in fields(record)}
    return found


def _as_text(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:,.10g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value) or "(none)"
