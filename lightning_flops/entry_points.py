"""What Lightning calls whenever a Trainer is made: it must cost nothing, load nothing and never raise."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from lightning_flops.units import package_logger

if TYPE_CHECKING:
    from lightning_flops.lightning import FlopsProfilerCallback

logger = package_logger(__name__)

# Environment variables.
SWITCH = "LIGHTNING_FLOPS"  # turns the profiler on in every Trainer of a process and of those it starts
SETTINGS = "LIGHTNING_FLOPS_SETTINGS"  # settings of these profilers, as a JSON object; they win over a DeepSpeed block
LOG_DIR = "LIGHTNING_FLOPS_LOG_DIR"  # folder for the reports of a Trainer none of whose loggers has a folder


def is_on() -> bool:
    """Whether the user wants every training of this process profiled."""
    value = os.environ.get(SWITCH, "")
    if value not in ("", "0", "1"):
        logger.warning("%s must be 0 or 1, got %r: nothing is profiled", SWITCH, value)
    return value == "1"


def settings() -> dict[str, Any]:
    """The settings in the environment; a ConfigError if they are no JSON object, or one of them is no setting."""
    from lightning_flops.config import config_from
    from lightning_flops.errors import ConfigError

    text = os.environ.get(SETTINGS, "{}")
    try:
        given: dict[str, Any] = {**json.loads(text)}
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{SETTINGS} must be a JSON object, got {text[:60]}: {error}") from None
    config_from(given, owner=SETTINGS)
    return given


def callbacks_factory() -> list[FlopsProfilerCallback]:
    """Callbacks for the Trainer that is being made: one of ours if ``LIGHTNING_FLOPS=1``, none otherwise."""
    if not is_on():
        return []
    try:
        from lightning_flops.lightning import FlopsProfilerCallback

        return [FlopsProfilerCallback.for_any_trainer(settings(), folder=os.environ.get(LOG_DIR))]
    except Exception:  # otherwise Lightning could not make the Trainer
        logger.warning("the FLOPs profiler could not be loaded; training goes on without it", exc_info=True)
        return []
