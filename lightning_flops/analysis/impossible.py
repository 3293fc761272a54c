"""Figures that no device can reach: FLOPs over a time that is missing, or a peak that is not the device's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from lightning_flops.analysis.rates import MOST_OF_PEAK, ratio
from lightning_flops.schema.modules import ModuleTimes
from lightning_flops.schema.step import OperatorProfile

_NAMED = 4


def possible_times(times: Mapping[str, ModuleTimes]) -> tuple[dict[str, ModuleTimes], tuple[str, ...]]:
    """*times* of modules without rates beyond twice the peak, and a note on those."""
    found, beyond = dict(times), {}
    for name, one in times.items():
        for phase in ("forward", "backward"):
            share = getattr(one, f"{phase}_utilization")
            if share is not None and share > MOST_OF_PEAK:
                without: dict[str, Any] = {f"{phase}_utilization": None, f"{phase}_flops_per_sec": None}
                found[name] = replace(found[name], **without)
                beyond[f"{name or 'the root'}'s {phase}"] = share
    return found, _note(beyond)


def possible_operators(
    operators: Iterable[OperatorProfile], peak_of: Callable[[str], float | None]
) -> tuple[tuple[OperatorProfile, ...], tuple[str, ...]]:
    """*operators* without rates beyond twice the highest peak of their dtypes, and a note on those."""
    found, beyond = [], {}
    for one in operators:
        peaks = [peak_of(dtype) for dtype in one.dtypes]
        achieved = None if one.roofline is None else one.roofline.achieved_flops_per_sec
        share = (
            None if None in peaks else ratio(part=achieved, whole=max((peak or 0.0 for peak in peaks), default=None))
        )
        if one.roofline is not None and share is not None and share > MOST_OF_PEAK:
            one = replace(one, roofline=replace(one.roofline, achieved_flops_per_sec=None))
            beyond[one.operator] = share
        found.append(one)
    return tuple(found), _note(beyond)


def _note(beyond: Mapping[str, float]) -> tuple[str, ...]:
    if not beyond:
        return ()
    listed = [f"{name} ({share:,.1f} times)" for name, share in beyond.items()]
    more = f" and {len(listed) - _NAMED} more" if len(listed) > _NAMED else ""
    return (
        f"Left out, as they would be beyond the device's peak: FLOP/s of {', '.join(listed[:_NAMED])}{more}. Time is "
        "missing in the trace, or the peak is not the device's.",
    )
