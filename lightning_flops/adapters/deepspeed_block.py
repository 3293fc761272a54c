"""The ``"flops_profiler"`` block of a DeepSpeed config, whatever framework got it, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning_flops.config import ProfilerConfig, TakenBlock
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)


def settings_of(
    block: object | None,
    given: Mapping[str, Any],
    *,
    enabled: bool = True,
    run: str,
    logs: bool,
    level_if_off: int = logging.WARNING,
) -> TakenBlock:
    """The settings of a *run*: those of the *block* (None: there is none), and those *given*, which win.

    A block without the key ``enabled`` is *enabled* or not. With *logs*, the log says what is wrong in the block, and
    why nothing is profiled.
    """
    if block is None:
        taken = TakenBlock(ProfilerConfig(**given), (), None, says_enabled=False)
    else:
        taken = ProfilerConfig.taken_over(block, given=given, enabled=enabled)
    if logs:
        log_mistakes(taken, run=run)
        if not (taken.wrong or taken.settings.enabled):
            logger.log(level_if_off, "flops_profiler.enabled is not true: this %s is not profiled", run)
    return taken


def log_mistakes(taken: TakenBlock, *, run: str) -> None:
    """Log which keys of a block are ignored, and whether a wrong value keeps the *run* from being profiled."""
    for words in taken.unknown:
        logger.warning("in the DeepSpeed config, %s", words)
    if taken.wrong:
        logger.warning("this %s is not profiled: %s", run, taken.wrong)
