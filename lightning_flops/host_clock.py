"""The host's clocks, taken from ``time`` once: a test that puts a list of readings there misses none because of us."""

from time import (
    perf_counter as now,  # seconds, of any beginning
    process_time as processor_sec,  # seconds that the processors have worked for this process
    sleep,
    time as wall_sec,  # seconds since the epoch
)

__all__ = ["now", "processor_sec", "sleep", "wall_sec"]
