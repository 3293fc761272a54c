"""Sinks that go to whoever watches the program: by the package's logger, or by standard output."""

from __future__ import annotations

import logging
import sys

# The package's own logger, not this module's: it is the one that users know to set a level for.
logger = logging.getLogger("lightning_flops")


class ConsoleSink:
    """Logs each text as one record at level INFO; the program's own logging settings decide whether it is shown."""

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Log *text* as it is; returns whether the program's logging settings let it through."""
        logger.info("%s", text)
        return logger.isEnabledFor(logging.INFO)


class StandardOutputSink:
    """Writes each text to standard output, whatever the logging settings."""

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Write *text* as it is, at once."""
        sys.stdout.write(text)
        sys.stdout.flush()
        return True
