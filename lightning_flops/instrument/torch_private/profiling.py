"""torch.profiler: a profiler without a schedule, cheap marks, and whether somebody else's profiler is on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch.profiler import record_function

from lightning_flops.instrument.torch_private.names import Attribute, take, take_later


class SlowMark:
    """Stands for ``_RecordFunctionFast`` in a torch that has none; it takes ten times as long."""

    def __init__(self, name: str) -> None:
        self._scope: Any = record_function(name)

    def __enter__(self) -> None:
        self._scope.__enter__()

    def __exit__(self, *exc: object) -> None:
        self._scope.__exit__(None, None, None)


new_mark: Callable[[str], Any] = take(
    "torch._C:_profiler._RecordFunctionFast",
    SlowMark,
    "has no fast marks for traces: marks around modules make a traced step longer",
    reported=False,
)
"""Makes a mark of this name, to be entered and left."""

new_profiler = take_later(
    "torch.profiler:_KinetoProfile",
    torch.profiler.profile,
    "has no profiler without a schedule: tracing a step counts as a step of every other profiler",
)
"""Answers with the base of torch.profiler.profile: no schedule of its own, and no count of steps that others share."""

_SET_UP_LOSS = (
    "does not show when another profiler is set up: a profiler of the user's that starts while a step is traced fails"
)

_SETTING_UP = {
    name: take_later(f"torch.autograd.profiler:{name}", None, _SET_UP_LOSS)
    for name in ("_prepare_profiler", "_enable_profiler")
}


def functions_that_set_up() -> list[str]:
    """Functions in ``torch.autograd.profiler`` that torch calls to prepare and to start a profiler, by name."""
    return [name for name, function in _SETTING_UP.items() if function() is not None]


_is_on: Callable[[], bool] = take(
    "torch._C:_autograd._profiler_enabled",
    lambda: False,
    "does not tell whether a profiler is running: a step may be traced while the user's profiler is on, and fail",
)

_step_dict = take_later(
    "torch.autograd.profiler:KinetoStepTracker._step_dict",
    None,
    "does not tell whether a torch.profiler.profile is set up: a step may be traced between two steps of the user's",
)

_PLACE = Attribute(
    "torch.profiler:_KinetoProfile",
    "_get_distributed_info",
    "does not tell what a trace file says of ranks and process groups: a trace that is kept does not name them",
)


def profiler_is_recording() -> bool:
    """Whether a profiler of torch's records what runs now on this thread; False where torch does not tell."""
    return bool(_is_on())


def profiler_is_set_up() -> bool:
    """Whether a torch.profiler.profile has been made and its block has not ended; False if that cannot be known.

    Between its warm-up and its first step nothing else shows that it exists.
    """
    return "ProfilerStep" in (_step_dict() or ())


def place_in_run(profiler: Any) -> dict[str, Any]:
    """What the profiler writes into a file about ranks and process groups; nothing if it cannot tell."""
    with suppress(Exception):
        if (info := _PLACE.of(profiler)()) is not None:
            return {"distributedInfo": info}
    return {}
