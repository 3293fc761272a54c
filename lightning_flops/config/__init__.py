"""Settings: those of DeepSpeed's ``"flops_profiler"`` block, with its names and defaults, and those of this project.

Each setting is written once, as a field of ``ProfilerConfig``: its default, what values it may have, what it does.
"""

from lightning_flops.config.arguments import ARGUMENTS, SettingArguments, config_from, takes_settings
from lightning_flops.config.settings import (
    OF_DEEPSPEED,
    SETTINGS,
    ProfilerConfig,
    TakenBlock,
    given_settings,
    with_settings_described,
)
from lightning_flops.config.unknown_names import refuse_unknown
from lightning_flops.config.values import BLOCK, DTYPE_NAMES, OWN_FOLDER, AdviceThresholds, TraceSchedule

__all__ = [
    "ARGUMENTS",
    "BLOCK",
    "DTYPE_NAMES",
    "OF_DEEPSPEED",
    "OWN_FOLDER",
    "SETTINGS",
    "AdviceThresholds",
    "ProfilerConfig",
    "SettingArguments",
    "TakenBlock",
    "TraceSchedule",
    "config_from",
    "given_settings",
    "refuse_unknown",
    "takes_settings",
    "with_settings_described",
]
