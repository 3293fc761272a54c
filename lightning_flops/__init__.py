"""FLOPs of a training run: exact counts by module, forward and backward, how fast they ran, and what held them back.

The public names are loaded when they are first used: importing this package imports neither torch nor a framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_flops.analysis.profile import Profile as Profile
    from lightning_flops.config import ProfilerConfig as ProfilerConfig
    from lightning_flops.errors import ConfigError as ConfigError
    from lightning_flops.errors import LightningFlopsError as LightningFlopsError
    from lightning_flops.lightning import FlopsProfilerCallback as FlopsProfilerCallback
    from lightning_flops.pytorch import count_flops as count_flops
    from lightning_flops.pytorch import count_offline as count_offline
    from lightning_flops.pytorch import register_flop_formula as register_flop_formula
    from lightning_flops.report.text import render_text as render_text

__version__ = "0.1.0"

_MODULES = {
    "ConfigError": "errors",
    "FlopsProfilerCallback": "lightning",
    "LightningFlopsError": "errors",
    "Profile": "analysis.profile",
    "ProfilerConfig": "config",
    "count_flops": "pytorch",
    "count_offline": "pytorch",
    "register_flop_formula": "pytorch",
    "render_text": "report.text",
}
"""Where each public name lives, below this package."""

__all__ = [
    "ConfigError",
    "FlopsProfilerCallback",
    "LightningFlopsError",
    "Profile",
    "ProfilerConfig",
    "__version__",
    "count_flops",
    "count_offline",
    "register_flop_formula",
    "render_text",
]


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
