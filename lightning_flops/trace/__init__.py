"""Trace files of torch.profiler, of CPU or GPU: read into numpy columns once, every table a function of these.

Steps, in all tables, are the profiler's, each extended to the last device event that was launched in it. Times are
whole nanoseconds in here, and microseconds in the reports; what a trace does not contain is None.
"""

from lightning_flops.trace.columns import Trace, TraceFormatError
from lightning_flops.trace.flops import Peaks
from lightning_flops.trace.modules import module_table
from lightning_flops.trace.read import load_trace
from lightning_flops.trace.steps import step_filling, step_parts, steps_of
from lightning_flops.trace.structure import by_process
from lightning_flops.trace.tables import collective_calls

__all__ = [
    "Peaks", "Trace", "TraceFormatError", "by_process", "collective_calls", "load_trace",
    "module_table", "step_filling", "step_parts", "steps_of",
]  # fmt: skip
