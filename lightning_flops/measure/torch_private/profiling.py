"""torch.profiler: a profiler without a schedule, cheap marks, and whether another program's profiler is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import record_function

from lightning_flops.measure.torch_private.names import optional

new_mark: Callable[[str], Any] = optional("torch._C:_profiler._RecordFunctionFast", record_function)()
"""Makes a mark of this name, to be entered and left. Torch's public one takes ten times as long."""

new_profiler = optional("torch.profiler:_KinetoProfile", torch.profiler.profile)
"""Answers with the base of torch.profiler.profile: no schedule of its own, and no count of steps that others share."""

_is_on: Callable[[], bool] = optional("torch._C:_autograd._profiler_enabled", lambda: False)()
_step_dict = optional("torch.autograd.profiler:KinetoStepTracker._step_dict", {})


def functions_that_set_up() -> list[str]:
    """Functions in ``torch.autograd.profiler`` that torch calls to prepare and to start a profiler, by name."""
    return [name for name in ("_prepare_profiler", "_enable_profiler") if hasattr(torch.autograd.profiler, name)]


def profiler_is_recording() -> bool:
    """Whether a profiler of torch's records what runs now on this thread; False where torch does not say."""
    return bool(_is_on())


def profiler_is_set_up() -> bool:
    """Whether a torch.profiler.profile has been made and its block has not ended; False if that cannot be known.

    Between its warm-up and its first step nothing else shows that it exists.
    """
    return "ProfilerStep" in _step_dict()
