"""The host's clocks, also where somebody has replaced those of the module ``time``.

Tests do that. Some put a list of readings there: if we took one, the test would miss it. Others put a clock there that
stands still: our times would be wrong. And a module of ours that is first imported meanwhile would keep that clock for
the rest of the process. So these are the functions of a copy of ``time`` that nobody else has.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from types import ModuleType
from typing import Final


def _own_copy(module: ModuleType) -> ModuleType:
    """*module* made anew, which is written in C, from where Python has it."""
    spec = module.__spec__
    if spec is None or spec.loader is None:
        return module
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


_time = _own_copy(time)

now: Final[Callable[[], float]] = _time.perf_counter
"""Seconds, of any beginning."""
processor_sec: Final[Callable[[], float]] = _time.process_time
"""Seconds that the processors have worked for this process."""
wall_sec: Final[Callable[[], float]] = _time.time
"""Seconds since the epoch."""
sleep: Final[Callable[[float], None]] = _time.sleep
"""Waits so many seconds."""
