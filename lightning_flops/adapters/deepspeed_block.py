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
    """Log what is wrong in the *block*; then why nothing is profiled, or which settings come from the block.

    Args:
        block: as the user wrote it; None: there is none.
        taken: what was read of it.
        enabled: the run is profiled.
        given: the settings that are arguments of *owner*.
        owner: what the user wrote into the program.
        run: what is profiled, or is not: a fit, for one.
        level_if_off: of the line that says that ``enabled`` is not true.
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
