"""A sink that goes to the package's logger, where a program's own logging settings decide what is shown."""

from __future__ import annotations

import logging

# The package's own logger, not this module's: it is the one that users know to set a level for.
logger = logging.getLogger("lightning_flops")


class ConsoleSink:
    """Logs each text as one record at level INFO."""

    def write_text(self, tag: str, text: str, *, step: int) -> bool:
        """Log *text* as it is; a report names its own step.

        Returns:
            Whether the program's logging settings let it through.
        """
        logger.info("%s", text)
        return logger.isEnabledFor(logging.INFO)
