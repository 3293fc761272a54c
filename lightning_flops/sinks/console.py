"""What goes to whoever watches the program: by the package's logger, by standard output or by standard error."""

from __future__ import annotations

import logging
import sys

from lightning_flops.signals import Quiet
from lightning_flops.units import printable

PROGRAM = "lightning-flops"

# The package's own logger, not this module's: it is the one that users know to set a level for.
logger = logging.getLogger("lightning_flops")


def to_log(text: str) -> None:
    """Log *text* as one record at level INFO; the program's own logging settings decide whether it is shown."""
    logger.info("%s", text)


def to_standard_output(text: str) -> None:
    """Write *text* to standard output as it is, at once, whatever the logging settings."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(sentence: str, *, command: str = "") -> None:
    """Print *sentence*, of a *command* or of none, on standard error, beside what the program itself prints."""
    with Quiet(Exception):  # standard error may be closed
        sys.stderr.write(f"{f'{PROGRAM} {command}'.rstrip()}: {printable(sentence)}\n")
