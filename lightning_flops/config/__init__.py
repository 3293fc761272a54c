"""Settings: DeepSpeed's ``"flops_profiler"`` block with its own names and defaults, and the keys this project adds.

A setting stands once, as a field of ``ProfilerConfig``: what its values must be, what it does, and its default.
"""

from lightning_flops.config.settings import (
    SETTINGS,
    ProfilerConfig,
    Setting,
    TakenBlock,
    given_settings,
    with_settings_described,
)
from lightning_flops.config.unknown_names import refuse_unknown
from lightning_flops.config.values import BLOCK, DTYPE_NAMES, AdviceThresholds, TraceSchedule

__all__ = [
    "BLOCK",
    "DTYPE_NAMES",
    "SETTINGS",
    "AdviceThresholds",
    "ProfilerConfig",
    "Setting",
    "TakenBlock",
    "TraceSchedule",
    "given_settings",
    "refuse_unknown",
    "with_settings_described",
]
