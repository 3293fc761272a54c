"""Settings: those of DeepSpeed's ``"flops_profiler"`` block, with its names and defaults, and those of this project.

Each setting is written once, as a field of ``ProfilerConfig``: its default, what values it may have, what it does.
"""

from lightning_flops.config.rules import refuse_unknown as refuse_unknown
from lightning_flops.config.settings import ARGUMENTS as ARGUMENTS
from lightning_flops.config.settings import OF_DEEPSPEED as OF_DEEPSPEED
from lightning_flops.config.settings import SETTINGS as SETTINGS
from lightning_flops.config.settings import ProfilerConfig as ProfilerConfig
from lightning_flops.config.settings import SettingArguments as SettingArguments
from lightning_flops.config.settings import TakenBlock as TakenBlock
from lightning_flops.config.settings import config_from as config_from
from lightning_flops.config.settings import given_settings as given_settings
from lightning_flops.config.settings import takes_settings as takes_settings
from lightning_flops.config.settings import with_settings_described as with_settings_described
from lightning_flops.config.values import BLOCK as BLOCK
from lightning_flops.config.values import DTYPE_NAMES as DTYPE_NAMES
from lightning_flops.config.values import OWN_FOLDER as OWN_FOLDER
from lightning_flops.config.values import AdviceThresholds as AdviceThresholds
from lightning_flops.config.values import TraceSchedule as TraceSchedule
