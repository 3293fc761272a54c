"""How far long work is, on one line of a terminal that is written over, and is gone when the work is done."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import TextIO

from lightning_flops import host_clock
from lightning_flops.text.printable import printable

_FIRST_SEC = 1.0
"""Work that is done by then shows nothing."""
_EVERY_SEC = 0.2


class ProgressLine:
    """Shows the words that it is called with, the latest ones and not all; nothing where *stream* is no terminal.

    Args:
        stream: where to.
        clock: seconds, of any beginning.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = host_clock.now) -> None:
        self._stream = stream
        self._clock = clock
        self._next = clock() + _FIRST_SEC
        self._shown = 0
        self._is_terminal = stream.isatty()

    def __call__(self, words: str) -> None:
        """Show *words*, if it is time."""
        if not self._is_terminal or self._clock() < self._next:
            return
        self._next = self._clock() + _EVERY_SEC
        self._write(printable(words)[: shutil.get_terminal_size().columns - 1])

    def end(self) -> None:
        """Leave the line empty."""
        if self._shown:
            self._write("")
            self._stream.write("\r")
            self._stream.flush()

    def _write(self, words: str) -> None:
        self._stream.write("\r" + words.ljust(self._shown))
        self._stream.flush()
        self._shown = len(words)
