"""Figures and settings of two runs, and conditions on them (``global_step_sec > 1.05``), which may end a CI job."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal

from lightning_flops.analysis.compare_noise import LEAST_STEPS, Floats, noise_factor
from lightning_flops.errors import ComparisonError
from lightning_flops.schema.comparison import Comparison, FigureDifference, SettingDifference
from lightning_flops.schema.profile import Profile
from lightning_flops.units import shown

WALL = ("global_step_sec", "samples_per_sec", "tokens_per_sec", "mfu", "hfu", "data_wait_ratio")
"""Figures of the wall clock, which say little of a run that was starved of processors."""

_NO_NOISE = "single steps are not known, or too few to say what is noise"
_TOO_WIDE = "its single steps stray so far that zero is within its noise"
_SIGNS: Mapping[str, Callable[[float, float], bool]] = {
    ">": operator.gt, ">=": operator.ge, "<": operator.lt, "<=": operator.le
}  # fmt: skip
_FORM = re.compile(r"\s*(\w+)\s*(>=|<=|>|<)\s*(\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+)\s*")
_SHOWN_CHARS = 60


def figure_difference(
    name: str,
    values: tuple[float | None, float | None],
    *,
    unknown: tuple[str | None, str | None],
    steps: tuple[Floats | None, Floats | None] | None = None,
) -> FigureDifference:
    """The figure *name* in both runs.

    Args:
        name: of the figure.
        values: in run A and in B; None if it is not known there.
        unknown: why it is not known in A or in B, in words; None if there are none.
        steps: what it is in each step of both runs, or in proportion to that; None for a count, which is exact.
    """
    (a, b), ratio, factor, reason = values, None, None, ""
    if a is None or b is None:
        which, words = ("A", unknown[0]) if a is None else ("B", unknown[1])
        reason = f"not known in {which}" + (f": {words}" if words else "")
    elif b and not a:
        reason = "0 in A"
    else:
        ratio, (of_a, of_b) = b / a if a else 1.0, steps or (None, None)
        if steps is None or not a:
            factor = 1.0
        elif of_a is None or of_b is None or min(len(of_a), len(of_b)) < LEAST_STEPS:
            reason = _NO_NOISE
        else:
            factor = noise_factor(of_a, of_b)
            reason = "" if factor else _TOO_WIDE
    return FigureDifference(name=name, a=a, b=b, ratio=ratio, noise_factor=factor, reason=reason)


Verdict = Literal["holds", "does not hold", "is inconclusive"]


def judge(comparison: Comparison, condition: str) -> tuple[Verdict, str]:
    """Whether the ratio B / A of a figure keeps *condition* whatever value within its noise is the true one, and why.

    Of a figure by the wall clock that is inconclusive where a run was starved of processors, as it is of any figure
    that strays so far that it may as well be zero.

    Raises:
        ComparisonError: *condition* is none, or the figure, or its noise, is not known.
    """
    found = _FORM.fullmatch(condition)
    if found is None:
        raise ComparisonError(
            "must be a figure, one of > >= < <=, and a number, as 'global_step_sec > 1.05', "
            f"got {shown(condition, chars=_SHOWN_CHARS)}"
        )
    name, sign, limit = found[1], _SIGNS[found[2]], float(found[3])
    figure = next((one for one in comparison.figures if one.name == name), None)
    if figure is None:
        names = ", ".join(one.name for one in comparison.figures)
        raise ComparisonError(f"{condition}: {name} cannot be compared: it is none of {names}")
    ratio, ends = figure.ratio, figure.ends
    words = "" if ratio is None else f"{name} B/A is {ratio:.4g}"
    starved = [which for which, run in (("A", comparison.a), ("B", comparison.b)) if run.starved]
    if words and starved and name in WALL:
        return "is inconclusive", f"{words}, but {' and '.join(starved)} had to wait for processors"
    if figure.reason == _TOO_WIDE:
        return "is inconclusive", f"{words}, but {_TOO_WIDE}"
    if ratio is None or ends is None:
        raise ComparisonError(f"{condition}: {name} cannot be compared: {figure.reason}")
    if figure.noise_factor != 1:
        words += f", by noise between {ends[0]:.4g} and {ends[1]:.4g}"
    if all(sign(one, limit) for one in ends):
        return "holds", words
    return "does not hold", f"{words}: within noise" if sign(ratio, limit) else words


_OF_PROFILES = ("micro_steps", "samples", "tokens", "params", "trainable_params")


def setting_differences(a: Profile, b: Profile) -> tuple[SettingDifference, ...]:
    """What is set up differently: context, model and settings."""
    of_a, of_b = _set_up(a), _set_up(b)
    return tuple(SettingDifference(name=name, a=of_a[name], b=of_b[name]) for name in of_b if of_a[name] != of_b[name])


def _set_up(profile: Profile) -> dict[str, str]:
    found = {f"context.{one.name}": getattr(profile.context, one.name) for one in fields(profile.context)}
    found |= {name: getattr(profile, name) for name in _OF_PROFILES}
    found["dtypes"] = ", ".join(one.dtype for one in profile.dtypes)
    found |= {f"settings.{one.name}": getattr(profile.settings, one.name) for one in fields(profile.settings)}
    return {name: _as_text(value) for name, value in found.items()}


def _as_text(value: Any) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, float):
        return f"{value:,.10g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value) or "(none)"
