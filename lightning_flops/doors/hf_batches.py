"""The batches of one step of a transformers Trainer, which fetches all of them before it trains on the first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from lightning_flops.instrument.batches import tensor_shapes
from lightning_flops.instrument.tokens import TELLING, OnDeviceError, tokens_in
from lightning_flops.records import BatchTokens, Shapes
from lightning_flops.session.token_reader import TokenReader

NO_TOKENS = (
    "Tokens could not be counted, because a batch has no attention_mask on the host, and not every token has a label: "
    "those without one may be padding or a prompt. tokens/s needs tokens_per_sample=... to be given."
)


class Fetched(NamedTuple):
    """One batch, as it was fetched."""

    inputs: Any
    shapes: Shapes
    telling: Mapping[str, torch.Tensor] | None
    """The tensors that may tell its tokens."""
    tokens: BatchTokens | None = None
    """What was read of it before its loader moved it to the device."""
    was_read: bool = False
    """It was looked at then; otherwise it is as its loader made it."""


NOTHING = Fetched((), (), None)


class FetchedBatches:
    """Holds batches from when they are fetched until the Trainer has trained on them.

    Tokens are those that ``tokens_in`` finds, never padding. They are counted on the host, so that the training never
    waits for a device. If a loader moves a batch to a device, we keep the tensors on the host that tell its tokens,
    until the batch is done.

    Args:
        note: gets a sentence for the report if tokens cannot be counted.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self.current = NOTHING
        """The batch that the Trainer trains on."""
        self.were_read: dict[int, BatchTokens | None] = {}
        """What was found in batches before they were moved to the device, by the identity of what is there now."""
        self._note = note
        self._waiting: deque[Fetched] = deque()
        self._before_transfer: dict[int, Any] = {}

    def read(self, tokens: BatchTokens | None, moved: Any) -> None:
        """The loader has moved a batch to the device, in which *tokens* were found before, and goes on with *moved*."""
        self.were_read[id(moved)] = tokens

    def moved(self, batch: Any, moved: Any) -> None:
        """The loader has moved *batch* to the device, and goes on with *moved*."""
        self._before_transfer[id(moved)] = _telling(batch)

    def fetched(self, batches: Any, *, counts: bool) -> None:
        """These are the batches of the step that begins; whether their tokens are going to be asked for."""
        self._waiting.clear()
        if not isinstance(batches, (list, tuple)):
            return
        read = self.were_read
        if read:
            self.were_read = {}  # what was moved before these, and skipped, may have had the same identity
        if not counts and not read:  # most of the run
            self._waiting.extend([Fetched(batch, tensor_shapes(batch), None) for batch in batches])
            return
        telling, self._before_transfer = self._before_transfer, {}
        for batch in batches:
            place = id(batch)
            told = telling.get(place) or _telling(batch) if counts else None
            self._waiting.append(Fetched(batch, tensor_shapes(batch), told, read.get(place), place in read))

    def passing(self, batches: Any, reader: TokenReader) -> list[tuple[Shapes, BatchTokens | None]]:
        """The shapes and the tokens of *batches*, in a step of which only the monitor needs to know."""
        found: list[tuple[Shapes, BatchTokens | None]] = []
        read = self.were_read
        if read:
            self.were_read = {}
        if isinstance(batches, (list, tuple)):
            for batch in batches:
                tokens = read.get(id(batch))
                if reader.reads and id(batch) not in read:
                    tokens = reader.of(batch)
                found.append((tensor_shapes(batch), tokens))
        return found

    @property
    def shapes(self) -> tuple[Shapes, ...]:
        """Of the batches that the Trainer has not trained on yet."""
        return tuple(batch.shapes for batch in self._waiting)

    def read_waiting(self, reader: TokenReader) -> tuple[BatchTokens | None, ...]:
        """The tokens of the batches that the Trainer has not trained on yet, read now if they were not."""
        if reader.reads:
            self._waiting = deque(
                batch if batch.was_read else batch._replace(tokens=reader.of(batch.inputs), was_read=True)
                for batch in self._waiting
            )
        return tuple(batch.tokens for batch in self._waiting)

    def next(self) -> Fetched:
        """The Trainer is through with the next batch."""
        self.current = self._waiting.popleft() if self._waiting else NOTHING
        return self.current

    def tokens(self) -> int | None:
        """Tokens of the batch that the Trainer is through with; None if they are not known."""
        tokens = _count(self.current.telling, self._note)
        inputs = self.current.inputs
        if tokens is None and isinstance(inputs, Mapping) and "input_ids" in inputs:
            self._note(NO_TOKENS)
        return tokens

    def forget(self) -> None:
        """Let go of every batch."""
        self.current = NOTHING
        self._waiting.clear()
        self._before_transfer.clear()
        self.were_read.clear()


def _telling(batch: Any) -> Mapping[str, torch.Tensor] | None:
    """The tensors of *batch* that may tell its tokens, by name; None without such a tensor."""
    if not isinstance(batch, Mapping):
        return None
    return {name: batch[name] for name in TELLING if isinstance(batch.get(name), torch.Tensor)} or None


def _count(telling: Mapping[str, torch.Tensor] | None, note: Callable[[str], None]) -> int | None:
    try:
        tokens = None if telling is None else tokens_in(telling, note=note)
    except OnDeviceError:
        return None
    return None if tokens is None else tokens.real
