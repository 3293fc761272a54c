"""What the log says of a ``"flops_profiler"`` block of a DeepSpeed config, whatever framework got the config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_flops.config import BLOCK
from lightning_flops.text.json_text import shown
from lightning_flops.text.printable import package_logger

logger = package_logger(__name__)


def log_choice(block: Mapping[str, Any], *, given: Mapping[str, Any], owner: str) -> None:
    """Log which settings come from the *block*, and which of them are overruled by the arguments *given* to *owner*."""
    overruled = [name for name, value in given.items() if name in block and block[name] != value]
    if overruled:
        said = ", ".join(f"{name}={shown(given[name])} (the block has {shown(block[name])})" for name in overruled)
        logger.info("arguments of %s win over the DeepSpeed config's %s block: %s", owner, BLOCK, said)
    taken = ", ".join(name for name in block if name not in given)
    logger.info("taken from the DeepSpeed config's %s block: %s", BLOCK, taken or "nothing")
