"""What Lightning calls whenever a Trainer is made: it must cost nothing, load nothing and never raise."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.lightning import FlopsProfilerCallback

logger = package_logger(__name__)

SWITCH = "LIGHTNING_FLOPS"
"""Environment variable that turns the profiler on in every Trainer of a process and of those it starts."""


def callbacks_factory() -> list[FlopsProfilerCallback]:
    """Callbacks for the Trainer that is being made: one of ours if ``LIGHTNING_FLOPS=1``, none otherwise.

    The callback takes its settings from the DeepSpeed config's block if the Trainer's strategy has one, and the
    defaults if not. It does nothing if the user has given the Trainer a ``FlopsProfilerCallback``.
    """
    value = os.environ.get(SWITCH, "")
    if value != "1":
        if value not in ("", "0"):
            logger.warning("%s must be 0 or 1, got %r: nothing is profiled", SWITCH, value)
        return []
    try:
        from lightning_flops.lightning import FlopsProfilerCallback

        return [FlopsProfilerCallback.for_any_trainer()]
    except Exception:  # otherwise Lightning could not make the Trainer
        logger.warning("the FLOPs profiler could not be loaded; training goes on without it", exc_info=True)
        return []
