"""Batches that a loop has kept from a DataLoader and uses again without fetching them, as ``itertools.cycle`` does."""

from __future__ import annotations

from collections import Counter

from lightning_flops.instrument.batches import Shapes

_MOST = 64
"""Arguments that are looked at: this takes time, and lengths may be ever new."""


class Replayed:
    """Remembers with which arguments the model was called on which batch.

    Of a batch that was not fetched, the arguments of the model are all that is seen, and they may be a part of it: a
    loss gets the labels. If the same arguments were those of a batch that was fetched, it is such a batch.
    """

    def __init__(self) -> None:
        self.known: set[Shapes] = set()
        """Batches whose arguments need not be looked at any more."""
        self.looks_left = _MOST
        """So many arguments are looked at."""
        self._fetched_as: dict[Shapes, Shapes | None] = {}
        """The batches by the arguments; None where those of several were the same."""

    def learn(self, fetched: Shapes, arguments: Shapes) -> None:
        """The model was called with these *arguments* on a batch that was *fetched*; both by their shapes.

        If the arguments are no part of the batch, they may be those of a piece of it.
        """
        self.known.add(fetched)
        if arguments and not Counter(arguments) - Counter(fetched):
            before = self._fetched_as.setdefault(arguments, fetched)
            if before != fetched:
                self._fetched_as[arguments] = None

    def fetched_as(self, arguments: Shapes) -> Shapes | None:
        """The batch whose *arguments* these are; None if that is not known."""
        return self._fetched_as.get(arguments)
