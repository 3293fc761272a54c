"""Methods that the profiler is made to fail in: each is a hook, or what a hook calls."""

from __future__ import annotations

OF_ADAPTER = (
    "_hooks",
    "_mark",
    "_forward_begins",
    "_step_begins",
    "_step_ends",
    "_batch_ends",
    "_gradients_are_there",
    "_steps_go_on",
)
OF_RUN = (
    "begin",
    "fetch_begins",
    "fetch_ends",
    "batch_begins",
    "enter",
    "leave",
    "outside",
    "inside",
    "claim",
    "batch_done",
    "log",
    "context",
    "finish",
)
PLACES = (*(f"EngineRun.{name}" for name in OF_ADAPTER), *(f"Run.{name}" for name in OF_RUN))
