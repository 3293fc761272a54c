"""Batches that a loop has kept from a DataLoader and uses again without fetching them, as ``itertools.cycle`` does."""

from __future__ import annotations

from collections import Counter

from lightning_flops.instrument.batches import known_by
from lightning_flops.records import BatchTokens, Shapes

_MOST = 64
"""Arguments that are looked at: this takes time, and lengths may be ever new."""


class Replayed:
    """Remembers with which arguments the model was called on which batch.

    If a batch was not fetched, we see only the arguments of the model. They may be a part of the batch: its labels go
    to the loss, and a mask on a device is not read. If a batch that was fetched had the same arguments, it is such a
    batch.
    """

    def __init__(self) -> None:
        self.known: set[Shapes] = set()
        """Batches whose arguments need not be looked at any more, by what they are known by."""
        self.looks_left = _MOST
        """How many more arguments will be looked at."""
        self._arguments: dict[Shapes, Shapes] = {}
        """By what a batch is known by: the arguments of the first forward on it."""
        self._fetched_as: dict[Shapes, dict[Shapes, Shapes]] = {}
        """By the arguments: what the batches are known by, and the shapes of each."""

    def wants_arguments(self, fetched: Shapes, tokens: BatchTokens | None) -> bool:
        """Whether the arguments of the model's next call, which is on a batch like this one, shall be looked at."""
        wanted = self.looks_left > 0 and known_by(fetched, tokens) not in self.known
        self.looks_left -= wanted
        return wanted

    def learn(self, fetched: Shapes, tokens: BatchTokens | None, arguments: Shapes) -> None:
        """The model was called with these *arguments* on a batch that was *fetched*; both by their shapes.

        If the arguments are no part of the batch, they may be those of a piece of it.

        Args:
            fetched: the batch.
            tokens: those that were found in it.
            arguments: of the model.
        """
        if len(self.known) >= _MOST:
            return
        known = known_by(fetched, tokens)
        self.known.add(known)
        self._arguments[known] = arguments
        if arguments and not Counter(arguments) - Counter(fetched):
            self._fetched_as.setdefault(arguments, {})[known] = fetched

    def arguments_of(self, fetched: Shapes, tokens: BatchTokens | None) -> Shapes | None:
        """With which arguments the model was called on a batch like this one; None if that is not known."""
        return self._arguments.get(known_by(fetched, tokens))

    def fetched_as(self, arguments: Shapes, tokens: BatchTokens | None) -> Shapes | None:
        """What a batch is known by on which the model was called with these *arguments*; None if that is not known."""
        batches = self._fetched_as.get(arguments, {})
        shapes = set(batches.values())
        if len(shapes) != 1:
            return None
        if (tokens is None or tokens.real is None) and len(batches) == 1:
            return next(iter(batches))
        return shapes.pop()
