"""Names on a page are data: nothing in them ends a line, moves the cursor or turns the text around.

A name may come from a model, a file, another rank or a trace that somebody sent. Whatever shows one to people escapes
it here; JSON keeps it as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable


def printable(text: str) -> str:
    r"""*text* on one line, with an escape as Python writes it for each character that does not print.

    Those are control characters and line breaks (``\x1b``, ``\n``), whatever changes direction or has no width
    (``\u202e``), spaces that are not the space, and what no file can hold (``\ud800``).
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def printable_lines(text: str) -> str:
    r"""*text* with its own line breaks, each line of it ``printable``: for what has several lines by right."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def page(lines: Iterable[str]) -> str:
    """*lines* one below the other, as many as they are, with a line break after each."""
    return "".join(f"{printable(line)}\n" for line in lines)


def package_logger(name: str) -> logging.Logger:
    """The logger of the module *name*, whose every record is one line of printable text."""
    logger = logging.getLogger(name)
    logger.addFilter(_on_one_line)
    return logger


def _on_one_line(record: logging.LogRecord) -> bool:
    """Have *record* say what it says on one line; always True, it is for everybody."""
    message = record.getMessage()
    if not message.isprintable():
        record.msg, record.args = printable(message), ()
    return True
