"""The next batches of a run, as far as nobody but the monitor needs to know of them."""

from __future__ import annotations

import math


class Spare:
    """How many of the next batches only the monitor needs, and needs no more of than their shapes.

    This is all that is looked at in most steps of a run. It is small, so that looking is quick: what a step ago was in
    the processor's cache no longer is.
    """

    __slots__ = ("batches", "until")

    def __init__(self) -> None:
        self.batches = 0
        """So many; 0 also means that nobody knows yet."""
        self.until = math.inf
        """From this time of the monitor on somebody must look, though there were batches to spare."""

    def none(self) -> None:
        """The next batch is described at once; it finds out how many there are."""
        self.batches = 0
