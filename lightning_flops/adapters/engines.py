"""DeepSpeed's engines: which model is one, and which adapter is for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lightning_flops.adapters.deepspeed_engine import EngineAdapter, adapter_of
from lightning_flops.adapters.deepspeed_pipeline import PipelineAdapter
from lightning_flops.config import ProfilerConfig
from lightning_flops.errors import ConfigError
from lightning_flops.run.output import LoggedOutput
from lightning_flops.schema.profile import Profile

_WRAPPED = ("_forward_module", "_orig_mod")  # attributes of wrappers around an engine
_MOST_WRAPPERS = 3


def is_engine(model: object) -> bool:
    """Whether *model* is a DeepSpeed engine of any kind."""
    names = [f"{kind.__module__}.{kind.__name__}" for kind in type(model).__mro__]
    return "deepspeed.runtime.engine.DeepSpeedEngine" in names


def engine_in(model: object) -> Any:
    """The engine that *model* is, or is a wrapper of, as Fabric's and the compiler's are; None: there is none."""
    for _ in range(_MOST_WRAPPERS):
        if model is None or is_engine(model):
            return model
        held = vars(model).get("_modules", {}) if isinstance(model, torch.nn.Module) else {}
        model = next((held[name] for name in _WRAPPED if name in held), None)
    return None


def engine_run(
    engine: Any, config: ProfilerConfig, publish: Callable[[Profile], None], *, output: LoggedOutput | None = None
) -> EngineAdapter:
    """The adapter of *engine*, which reports to *output* or the engine's monitors; a ConfigError if it has one."""
    if adapter_of(engine) is not None:
        raise ConfigError("this engine is profiled already: detach() its handle, or take the block out of its config")
    staged = any(kind.__name__ == "PipelineEngine" for kind in type(engine).__mro__)
    return (PipelineAdapter if staged else EngineAdapter)(engine, config, publish, output)
