"""What the log says of a ``"flops_profiler"`` block of a DeepSpeed config, whatever framework got the config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_flops.config import BLOCK
from lightning_flops.text.json_text import shown
from lightning_flops.text.printable import package_logger

if TYPE_CHECKING:
    from lightning_flops.config import TakenBlock

logger = package_logger(__name__)


def log_settings(
    block: object | None,
    taken: TakenBlock | None,
    *,
    enabled: bool,
    given: Mapping[str, Any],
    owner: str,
    run: str,
    level_if_off: int = logging.WARNING,
) -> None:
    """Log what is wrong in the *block*; then why the *run* is not profiled, or which settings come from the block.

    *taken* is what was read of it, *given* are the settings that *owner* has as arguments.
    """
    if taken is not None:
        log_mistakes(taken, run=run)
    if taken is not None and taken.wrong:
        return
    if not enabled:
        logger.log(level_if_off, "flops_profiler.enabled is not true: this %s is not profiled", run)
    elif isinstance(block, Mapping):
        log_choice(block, given=given, owner=owner)


def log_mistakes(taken: TakenBlock, *, run: str) -> None:
    """Log which keys of a block are ignored, and whether a wrong value keeps the *run* from being profiled."""
    for words in taken.unknown:
        logger.warning("in the DeepSpeed config, %s", words)
    if taken.wrong:
        logger.warning("this %s is not profiled: %s", run, taken.wrong)


def log_choice(block: Mapping[str, Any], *, given: Mapping[str, Any], owner: str) -> None:
    """Log which settings come from the *block*, and which of them are overruled by the arguments *given* to *owner*."""
    overruled = [name for name, value in given.items() if name in block and block[name] != value]
    if overruled:
        said = ", ".join(f"{name}={shown(given[name])} (the block has {shown(block[name])})" for name in overruled)
        logger.info("arguments of %s win over the DeepSpeed config's %s block: %s", owner, BLOCK, said)
    taken = ", ".join(name for name in block if name not in given)
    logger.info("taken from the DeepSpeed config's %s block: %s", BLOCK, taken or "nothing")
