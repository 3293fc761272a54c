"""Which tokens of a batch are tokens, and not padding: read on the host, and never from a device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import torch

from lightning_flops.measure.torch_private.needed import modes_off
from lightning_flops.records import BatchTokens
from lightning_flops.signals import words_of

_IGNORED = -100
"""A label that losses leave out."""

_OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q", "cu_seq_lens")
"""Names under which batches of packed sequences hold where each begins, and where the last one ends."""

ON_DEVICE = (
    "Tokens without padding are n/a: the batch is on the device before it can be read without waiting for the device. "
    "tokens_per_sample=... may give them."
)


class OnDeviceError(Exception):
    """The tokens can only be read by waiting for a device."""


class TokenReader:
    """Reads the tokens of a run's batches for as long as they can be read; *note* gets a sentence if that fails."""

    def __init__(self, note: Callable[[str], None], *, wanted: bool) -> None:
        self.reads = wanted  # a sink shows tokens, and batches may show them
        self.fetched: deque[BatchTokens | None] = deque(maxlen=64)  # not used yet, of batches that go to a device
        self._note = note
        self._has_read = False  # of batches on the host; what fails after it is what a model gets of them

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
            tokens = tokens_in(batch)
        except Exception as error:  # of the user's batch
            if not self._has_read:
                self.reads = False
                on_device = isinstance(error, OnDeviceError)
                self._note(ON_DEVICE if on_device else f"Tokens without padding are n/a: {words_of(error)}.")
            return None
        self._has_read |= tokens is not None
        return tokens


def tokens_in(batch: Any) -> BatchTokens | None:
    """The tokens of *batch*; None if nothing in it shows tokens.

    A batch shows its tokens by ``input_ids`` or an ``attention_mask`` of batch x length, and by the offsets of packed
    sequences: ``cu_seqlens``, or ``position_ids`` that begin anew.

    Of an encoder's and a decoder's tokens in one dict those of the encoder count. ``labels`` of -100 do not show
    padding, because a prompt has them, too; if nothing else does and every token has a label, none is padding. Several
    batches in one, as of two loaders, are added up.

    Raises:
        OnDeviceError: its values are on a device.
    """
    if isinstance(batch, Mapping):
        if (found := _named(batch)) is not None:
            return found
        batch = tuple(batch.values())
    if not isinstance(batch, (tuple, list)):
        return None
    dicts = (one for one in batch if isinstance(one, Mapping))
    parts = [_named(one) for one in dicts if "input_ids" in one or "attention_mask" in one]
    # The tokens of some parts alone would be too few.
    return parts[0].plus(*parts[1:]) if parts and parts[0] is not None and None not in parts else None


def _named(batch: Mapping[Any, Any]) -> BatchTokens | None:
    batch = dict(batch.items())  # in what a tokenizer makes, names are looked up by Python code
    ids, mask, labels, places = map(batch.get, ("input_ids", "attention_mask", "labels", "position_ids"))
    grid = ids if _is_grid(ids) else mask if _is_grid(mask) else None
    if grid is None:
        return None
    processed, lengths = grid.numel(), None
    with modes_off():  # not counted: we ask
        offsets = next((one for name in _OFFSETS if isinstance(one := batch.get(name), torch.Tensor)), None)
        if offsets is not None:
            lengths = _between(_on_host(offsets), processed)
        elif _is_grid(mask):
            return _of_lengths((_on_host(mask) != 0).sum(-1).tolist(), processed) if mask.shape == grid.shape else None
        elif _is_grid(places) and places.shape == grid.shape and processed:
            lengths = _counted_up(_on_host(places))
        if lengths is not None:
            return _of_lengths(lengths, processed)
        all_trained = _is_grid(labels) and labels.shape == grid.shape and bool((_on_host(labels) != _IGNORED).all())
    return BatchTokens(processed, processed if all_trained else None, None)


def _between(offsets: torch.Tensor, tokens: int) -> list[int] | None:
    """The lengths of the packed sequences that have these *offsets* among so many *tokens*; None if they are none.

    Also None where the first or the last of them has one token and nothing is left for padding: see ``_counted_up``.
    """
    found = offsets.tolist() if offsets.ndim == 1 else []
    lengths = [end - begin for begin, end in zip(found, found[1:], strict=False)]
    if not lengths or found[0] != 0 or min(lengths) < 0 or found[-1] > tokens:
        return None
    return None if found[-1] == tokens and 1 in (lengths[0], lengths[-1]) else lengths


def _counted_up(places: torch.Tensor) -> list[int] | None:
    """The lengths of the sequences by the *places* of their tokens, which begin anew in each of them.

    None if they do not, or if no row has several sequences: in padded rows of one the places go on in the padding. Also
    None where a row begins or ends with a sequence of one token: collators that pad packed rows give padding the place
    0, too.
    """
    begins = places == places[0, 0]
    goes_on = begins[:, 1:] | (places.diff(dim=1) == 1)
    of_one = (begins[:, 1:2] | begins[:, -1:]).any() and places.shape[1] > 1
    if of_one or not (begins[:, 0].all() and goes_on.all()) or (len(places) > 1 and not begins[:, 1:].any()):
        return None
    firsts = begins.flatten().nonzero().flatten()
    return [*firsts.diff().tolist(), places.numel() - int(firsts[-1])]


def _of_lengths(lengths: Sequence[int], processed: int) -> BatchTokens:
    return BatchTokens(processed, sum(lengths), sum(length * length for length in lengths))


def _is_grid(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether *value* has a number for each sample and position."""
    return isinstance(value, torch.Tensor) and value.ndim == 2 and not (value.is_nested or value.is_floating_point())


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
        raise OnDeviceError
    return tensor
