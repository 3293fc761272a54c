"""Every table that a torch trace file yields, for CPU and GPU traces alike.

Needs numpy, and neither torch nor a framework. A trace is loaded once, with ``load_trace``; each table is then a pure
function of it. Steps, in all tables, are the profiler's, each extended to the last device event that was launched in
it. Times are in microseconds, as in the file; what a trace does not contain is None.

The names here are loaded when they are first used: a process that only reads a file needs few of them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_flops.analysis.trace.compare import compare_traces as compare_traces
    from lightning_flops.analysis.trace.counters import counter_tracks as counter_tracks
    from lightning_flops.analysis.trace.counters import flops_by_part as flops_by_part
    from lightning_flops.analysis.trace.files import analyze_each as analyze_each
    from lightning_flops.analysis.trace.files import analyze_files as analyze_files
    from lightning_flops.analysis.trace.filling import step_filling as step_filling
    from lightning_flops.analysis.trace.one_trace import analyze_trace as analyze_trace
    from lightning_flops.analysis.trace.parts import step_parts as step_parts
    from lightning_flops.analysis.trace.ranks import collective_calls as collective_calls
    from lightning_flops.analysis.trace.reading import load_trace as load_trace
    from lightning_flops.analysis.trace.recorded import trace_from_columns as trace_from_columns

_MODULES = {
    "analyze_each": "files",
    "analyze_files": "files",
    "analyze_trace": "one_trace",
    "collective_calls": "ranks",
    "compare_traces": "compare",
    "counter_tracks": "counters",
    "flops_by_part": "counters",
    "load_trace": "reading",
    "step_filling": "filling",
    "step_parts": "parts",
    "trace_from_columns": "recorded",
}
"""Where each name lives, below this package."""


def __getattr__(name: str) -> Any:
    """The *name*, from the module that defines it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
