"""What the commands that read traces read them with."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_flops.records import RecordedCall, RecordedWork


def formulas() -> Callable[[RecordedCall], RecordedWork] | None:
    """What works out the FLOPs of a call in a trace; None without torch."""
    return recorded_work if importlib.util.find_spec("torch") else None


def recorded_work(call: RecordedCall) -> RecordedWork:
    """What a call in a trace spent, by the counter's formulas: the first call imports torch."""
    from lightning_flops.instrument.counting.recorded_calls import recorded_work

    return recorded_work(call)


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
