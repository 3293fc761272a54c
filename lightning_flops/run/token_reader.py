"""Reads the tokens of a run's batches, for as long as they show any."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from lightning_flops.instrument.tokens import ON_DEVICE, OnDeviceError, tokens_in
from lightning_flops.records import BatchTokens
from lightning_flops.signals import words_of

_BATCHES_WITHOUT_TOKENS = 10
"""After so many batches that do not show their tokens, no further one is looked at."""


class TokenReader:
    """Asked by an adapter for each batch, before it is on a device; *note* gets a sentence if that cannot be read."""

    def __init__(self, note: Callable[[str], None], *, wanted: bool) -> None:
        self.reads = wanted  # a sink shows tokens, and batches may show them
        self.fetched: deque[BatchTokens | None] = deque(maxlen=64)  # not used yet, of batches that go to a device
        self._note = note
        self._without = 0
        self._has_read = False

    def fetch(self, batch: Any) -> None:
        """A loader has delivered *batch*, on the host."""
        if batch is not None and self.reads:
            self.fetched.append(self.of(batch))

    def take(self, batch: Any, *, fetched: bool) -> BatchTokens | None:
        """The tokens of *batch*, which is used now, in the order of the fetches; read now if not *fetched*."""
        if fetched:
            return self.fetched.popleft() if self.fetched else None
        return self.of(batch) if self.reads else None

    def of(self, batch: Any) -> BatchTokens | None:
        """The tokens of *batch*; None if it does not show them."""
        try:
            tokens = tokens_in(batch, note=self._note)
        except OnDeviceError:
            if self._has_read:  # of batches on the host; this is what a model gets of them
                return None
            self.reads = False
            self._note(ON_DEVICE)
            return None
        except Exception as error:  # of the user's batch
            self.reads = self._has_read
            self._note(f"Tokens without padding are n/a: {words_of(error)}.")
            return None
        if tokens is None:
            self._without += 1
            # Where batches show them, this may be what a model gets of one.
            self.reads = self._has_read or self._without < _BATCHES_WITHOUT_TOKENS
        else:
            self._has_read = True
        return tokens
