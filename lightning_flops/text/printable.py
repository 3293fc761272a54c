"""Shows names safely: no name can end a line, move the cursor or change the direction of the text.

A name may come from a model, a file, another rank or a trace of unknown origin. Text for people is escaped here. JSON
keeps names as they are.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable

from lightning_flops.signals import is_of_signal_handler


def printable(text: str) -> str:
    r"""*text* on one line. A character that does not print becomes an escape as Python writes it.

    Such characters are control characters and line breaks (``\x1b``, ``\n``), those that change the direction of text
    or have no width (``\u202e``), spaces other than the usual one, and those that no file can hold (``\ud800``).
    """
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def printable_lines(text: str) -> str:
    r"""*text* with its line breaks kept and each line made ``printable``: for text that may have several lines."""
    return text if text.isprintable() else "\n".join(map(printable, text.split("\n")))


def page(lines: Iterable[str]) -> str:
    """*lines* as one text, each made ``printable``, with a line break after each."""
    return "".join(f"{printable(line)}\n" for line in lines)


def shown(value: object, *, chars: int = 500) -> str:
    """*value* as Python writes it, for a message: cut short, and only its type if Python cannot write it."""
    try:
        text = repr(value)
    except Exception:  # nested too deep, a whole number of thousands of digits, or a class whose repr raises
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= chars else text[: chars - 1] + "…"


def package_logger(name: str) -> logging.Logger:
    """The logger of the module *name*. Every record of it is one line of printable text.

    To log with it never raises an ``Exception``, though a handler of the user's may: a warning is no reason to end a
    training.
    """
    logger = logging.getLogger(name)
    logger.addFilter(_on_one_line)
    # Here and not around the calls: a function of ours on the stack would be the place that records name.
    logger.handle = functools.partial(_handle, logger)  # type: ignore[method-assign]
    return logger


def _handle(logger: logging.Logger, record: logging.LogRecord) -> None:
    try:
        type(logger).handle(logger, record)
    except Exception as error:
        if is_of_signal_handler(error):
            raise


def _on_one_line(record: logging.LogRecord) -> bool:
    """Put the message of *record* on one line. Returns True, since no record is held back."""
    message = record.getMessage()
    if not message.isprintable():
        record.msg, record.args = printable(message), ()
    return True
