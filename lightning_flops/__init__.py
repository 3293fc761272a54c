"""FLOPs of a training run: exact counts by module, forward and backward, how fast they ran, and what held them back.

The public names are loaded when they are first used: importing this package imports neither torch nor a framework.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_flops.adapters.planning import plan_job as plan_job
    from lightning_flops.adapters.standalone import (
        FlopsProfiler as FlopsProfiler,
        get_model_profile as get_model_profile,
    )
    from lightning_flops.analysis.compare import compare_profiles as compare_profiles
    from lightning_flops.analysis.plan import MemoryPrediction as MemoryPrediction
    from lightning_flops.config import ProfilerConfig as ProfilerConfig
    from lightning_flops.errors import ConfigError as ConfigError, LightningFlopsError as LightningFlopsError
    from lightning_flops.lightning import FlopsProfilerCallback as FlopsProfilerCallback
    from lightning_flops.measure.counting.formulas.registry import register_flop_formula as register_flop_formula
    from lightning_flops.pytorch import (
        count_flops as count_flops,
        count_offline as count_offline,
        flops_formula as flops_formula,
        predict_memory as predict_memory,
        profile_training as profile_training,
    )
    from lightning_flops.report.module_text import (
        bytes_to_string as bytes_to_string,
        duration_to_string as duration_to_string,
        flops_to_string as flops_to_string,
        macs_to_string as macs_to_string,
        number_to_string as number_to_string,
        params_to_string as params_to_string,
    )
    from lightning_flops.report.text import render_text as render_text
    from lightning_flops.schema.comparison import Comparison as Comparison
    from lightning_flops.schema.plan import Plan as Plan
    from lightning_flops.schema.profile import Profile as Profile
    from lightning_flops.transformers import FlopsProfilerTrainerCallback as FlopsProfilerTrainerCallback

__version__ = "0.1.0"

# The public names of each module below this package.
_NAMES = {
    "adapters.planning": "plan_job",
    "adapters.standalone": "FlopsProfiler get_model_profile",
    "analysis.compare": "compare_profiles",
    "analysis.plan": "MemoryPrediction",
    "config": "ProfilerConfig",
    "errors": "ConfigError LightningFlopsError",
    "measure.counting.formulas.registry": "register_flop_formula",
    "lightning": "FlopsProfilerCallback",
    "pytorch": "count_flops count_offline flops_formula predict_memory profile_training",
    "report.module_text": (
        "bytes_to_string duration_to_string flops_to_string macs_to_string number_to_string params_to_string"
    ),
    "report.text": "render_text",
    "schema.comparison": "Comparison",
    "schema.plan": "Plan",
    "schema.profile": "Profile",
    "transformers": "FlopsProfilerTrainerCallback",
}

_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(["__version__", *_MODULES])
for _name, _roots in {
    "FlopsProfilerCallback": ("lightning", "pytorch_lightning"),
    "FlopsProfilerTrainerCallback": ("transformers",),
}.items():
    if not any(map(importlib.util.find_spec, _roots)):
        __all__.remove(_name)  # ``from lightning_flops import *`` takes what is there


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
