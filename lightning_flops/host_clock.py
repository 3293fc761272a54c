"""The host's clocks, taken from ``time`` once: a test that puts a list of readings there misses none because of us."""

from time import perf_counter as now  # seconds, of any beginning
from time import process_time as processor_sec  # seconds that the processors have worked for this process
from time import sleep
from time import time as wall_sec  # seconds since the epoch

__all__ = ["now", "processor_sec", "sleep", "wall_sec"]
