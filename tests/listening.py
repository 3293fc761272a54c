"""What a logger is given, kept as it comes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # benchmarks listen, too, where there is no pytest
    import pytest


@contextmanager
def listening(name: str, *, level: int = logging.INFO, form: str = "%(message)s") -> Iterator[list[str]]:
    """Keep what the logger *name* is given inside, from *level* on, each record in this *form*."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler, logger = Keep(level), logging.getLogger(name)
    handler.setFormatter(logging.Formatter(form))
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Warnings of this package, and what is worse."""
    ours = (one for one in caplog.records if one.name.startswith("lightning_flops"))
    return [one.getMessage() for one in ours if one.levelno >= logging.WARNING]
