"""FLOPs of a training run: exact counts by module, forward and backward, how fast they ran, and what held them back.

The public names are loaded when they are first used: importing this package imports neither torch nor a framework.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from lightning_flops.schema import shown as _shown

if TYPE_CHECKING:
    from lightning_flops.analysis.compare import compare_profiles as compare_profiles
    from lightning_flops.config import ProfilerConfig as ProfilerConfig
    from lightning_flops.errors import ConfigError as ConfigError
    from lightning_flops.errors import LightningFlopsError as LightningFlopsError
    from lightning_flops.lightning import FlopsProfilerCallback as FlopsProfilerCallback
    from lightning_flops.pytorch import FlopsProfiler as FlopsProfiler
    from lightning_flops.pytorch import count_flops as count_flops
    from lightning_flops.pytorch import count_offline as count_offline
    from lightning_flops.pytorch import flops_formula as flops_formula
    from lightning_flops.pytorch import get_model_profile as get_model_profile
    from lightning_flops.pytorch import profile_training as profile_training
    from lightning_flops.pytorch import register_flop_formula as register_flop_formula
    from lightning_flops.report.deepspeed_units import bytes_to_string as bytes_to_string
    from lightning_flops.report.deepspeed_units import duration_to_string as duration_to_string
    from lightning_flops.report.deepspeed_units import flops_to_string as flops_to_string
    from lightning_flops.report.deepspeed_units import macs_to_string as macs_to_string
    from lightning_flops.report.deepspeed_units import number_to_string as number_to_string
    from lightning_flops.report.deepspeed_units import params_to_string as params_to_string
    from lightning_flops.report.text import render_text as render_text
    from lightning_flops.schema.comparison import Comparison as Comparison
    from lightning_flops.schema.profile import Profile as Profile
    from lightning_flops.transformers import FlopsProfilerTrainerCallback as FlopsProfilerTrainerCallback

__version__ = "0.1.0"

_MODULES = {
    "Comparison": "schema.comparison",
    "ConfigError": "errors",
    "FlopsProfiler": "pytorch",
    "FlopsProfilerCallback": "lightning",
    "FlopsProfilerTrainerCallback": "transformers",
    "LightningFlopsError": "errors",
    "Profile": "schema.profile",
    "ProfilerConfig": "config",
    "bytes_to_string": "report.deepspeed_units",
    "compare_profiles": "analysis.compare",
    "count_flops": "pytorch",
    "count_offline": "pytorch",
    "duration_to_string": "report.deepspeed_units",
    "flops_formula": "pytorch",
    "flops_to_string": "report.deepspeed_units",
    "get_model_profile": "pytorch",
    "macs_to_string": "report.deepspeed_units",
    "number_to_string": "report.deepspeed_units",
    "params_to_string": "report.deepspeed_units",
    "profile_training": "pytorch",
    "register_flop_formula": "pytorch",
    "render_text": "report.text",
}
"""Where each public name lives, below this package."""

__all__ = [
    "Comparison",
    "ConfigError",
    "FlopsProfiler",
    "FlopsProfilerCallback",
    "FlopsProfilerTrainerCallback",
    "LightningFlopsError",
    "Profile",
    "ProfilerConfig",
    "__version__",
    "bytes_to_string",
    "compare_profiles",
    "count_flops",
    "count_offline",
    "duration_to_string",
    "flops_formula",
    "flops_to_string",
    "get_model_profile",
    "macs_to_string",
    "number_to_string",
    "params_to_string",
    "profile_training",
    "register_flop_formula",
    "render_text",
]
for _name, _roots in {
    "FlopsProfilerCallback": ("lightning", "pytorch_lightning"),
    "FlopsProfilerTrainerCallback": ("transformers",),
}.items():
    if not any(map(importlib.util.find_spec, _roots)):
        __all__.remove(_name)  # ``from lightning_flops import *`` takes what is there


def _renderers() -> _shown.Renderers:
    from lightning_flops.report import notebook

    return notebook


_shown.find = _renderers


def __getattr__(name: str) -> Any:
    """The public *name*, from the module that defines it."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    """Public names, loaded or not."""
    return sorted({*globals(), *__all__})
