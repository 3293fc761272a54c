"""Settings: those of DeepSpeed's ``"flops_profiler"`` block, with its names and defaults, and those of this project.

Each setting is written once, as a field of ``ProfilerConfig``: its default, what values it may have, what it does.
"""

from lightning_flops.config.rules import (
    ADVICE_THRESHOLDS as ADVICE_THRESHOLDS,
    BLOCK as BLOCK,
    DTYPE_NAMES as DTYPE_NAMES,
    OWN_FOLDER as OWN_FOLDER,
    TraceSchedule as TraceSchedule,
    refuse_unknown as refuse_unknown,
)
from lightning_flops.config.settings import (
    ARGUMENTS as ARGUMENTS,
    OF_DEEPSPEED as OF_DEEPSPEED,
    SETTINGS as SETTINGS,
    ProfilerConfig as ProfilerConfig,
    SettingArguments as SettingArguments,
    config_from as config_from,
    given_settings as given_settings,
    takes_settings as takes_settings,
    with_settings_described as with_settings_described,
)
