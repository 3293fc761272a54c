"""The ``"flops_profiler"`` block of a DeepSpeed config, whatever framework got it, and what the log says of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from lightning_flops.config import BLOCK, ProfilerConfig, TakenBlock
from lightning_flops.run.reports import OUTCOMES
from lightning_flops.text.json_text import shown
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)


def settings_of(
    block: object | None,
    given: Mapping[str, Any],
    *,
    enabled: bool = True,
    owner: str,
    run: str,
    logs: bool,
    level_if_off: int = logging.WARNING,
) -> TakenBlock:
    """The settings of a *run*: those of the *block* (None: there is none), and those *given* to *owner*, which win.

    A block without the key ``enabled`` is *enabled* or not. With *logs*, the log says what is wrong in the block; then
    why nothing is profiled, or which settings come from the block.
    """
    if block is None:
        taken = TakenBlock(ProfilerConfig(**given), (), None, says_enabled=False, builtin_on=False)
    else:
        taken = ProfilerConfig.taken_over(block, given=given, enabled=enabled)
    if logs:
        log_mistakes(taken, run=run)
        if not (taken.wrong or taken.settings.enabled):
            logger.log(level_if_off, "flops_profiler.enabled is not true: this %s is not profiled", run)
        elif isinstance(block, Mapping) and not taken.wrong:
            log_choice(block, given=given, owner=owner)
    return taken


def log_mistakes(taken: TakenBlock, *, run: str) -> None:
    """Log which keys of a block are ignored, and whether a wrong value keeps the *run* from being profiled."""
    for words in taken.unknown:
        logger.warning("in the DeepSpeed config, %s", words)
    if taken.wrong:
        OUTCOMES.warned = True
        logger.warning("this %s is not profiled: %s", run, taken.wrong)


def log_choice(block: Mapping[str, Any], *, given: Mapping[str, Any], owner: str) -> None:
    """Log which settings come from the *block*, and which of them are overruled by the arguments *given* to *owner*."""
    overruled = [name for name, value in given.items() if name in block and block[name] != value]
    if overruled:
        said = ", ".join(f"{name}={shown(given[name])} (the block has {shown(block[name])})" for name in overruled)
        logger.info("arguments of %s win over the DeepSpeed config's %s block: %s", owner, BLOCK, said)
    taken = ", ".join(name for name in block if name not in given)
    logger.info("taken from the DeepSpeed config's %s block: %s", BLOCK, taken or "nothing")
