"""Which tokens of a batch are tokens, and not padding: read on the host, and never from a device."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_flops.instrument.torch_private.dispatch import out_of_sight
from lightning_flops.records import BatchTokens

_IGNORED = -100
"""A label that losses leave out."""

_BORDERS = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q", "cu_seq_lens")
"""Names under which batches of packed sequences hold where each begins, and where the last one ends."""

ON_DEVICE = (
    "Tokens without padding are n/a: the batch is on the device before it can be read without waiting for the device. "
    "tokens_per_sample=... may tell them."
)


class OnDeviceError(Exception):
    """What tells the tokens can only be read by waiting for a device."""


def tokens_in(batch: Any) -> BatchTokens | None:
    """The tokens of *batch*; None if nothing in it tells of tokens.

    A batch tells its tokens by ``input_ids`` or an ``attention_mask`` of batch x length, whose numbers from 1 on may
    tell the sequences of a packed row apart, by the borders of packed sequences (``cu_seqlens`` or ``position_ids``
    that begin anew), or as a PackedSequence. The tokens of a pair of sequences are those of the first one. ``labels``
    of -100 are not trained on; they do not tell padding, because a prompt has them, too.

    Raises:
        OnDeviceError: its values are on a device.
    """
    if isinstance(batch, PackedSequence):
        return _packed(batch)
    if isinstance(batch, Mapping):
        return _named(batch)
    if type(batch) in (tuple, list):
        for item in batch:
            if isinstance(item, PackedSequence):
                return _packed(item)
            if isinstance(item, Mapping):
                return _named(item)
    return None


def _packed(batch: PackedSequence) -> BatchTokens:
    """Of each time step so many sequences are in it; their numbers are always on the host."""
    tokens = int(batch.data.shape[0])
    sizes = batch.batch_sizes.tolist()
    ends = [now - then for now, then in zip(sizes, [*sizes[1:], 0], strict=True)]
    lengths = [length for length, ending in enumerate(ends, 1) for _ in range(ending)]
    return _of_lengths(lengths, processed=tokens, trained=None)


def _named(batch: Mapping[Any, Any]) -> BatchTokens | None:
    if not isinstance(batch, dict):  # in what a tokenizer makes, names are looked up by Python code
        batch = dict(batch.items())
    ids, mask, labels = batch.get("input_ids"), batch.get("attention_mask"), batch.get("labels")
    told = ids if _is_grid(ids) else mask if _is_grid(mask) else None
    if told is None:
        return None
    processed = told.numel()
    trained = None
    with out_of_sight():  # nobody counts what we ask
        if _is_grid(labels) and labels.shape == told.shape:
            trained = int(torch.count_nonzero(_on_host(labels) != _IGNORED))
        for name in _BORDERS:
            borders = batch.get(name)
            if isinstance(borders, torch.Tensor) and borders.ndim == 1 and len(borders) > 1:
                found = _on_host(borders).tolist()
                lengths = [end - begin for begin, end in zip(found, found[1:], strict=False)]
                return _of_lengths(lengths, processed=processed, trained=trained)
        if _is_grid(mask):
            if mask.shape != told.shape:
                return None
            return _of_lengths(_lengths_in(_on_host(mask)), processed=processed, trained=trained)
        places = batch.get("position_ids")
        if _is_grid(places) and places.shape == told.shape:
            begins = (_on_host(places).flatten() == 0).nonzero().flatten().tolist()
            if begins[:1] == [0]:
                lengths = [end - begin for begin, end in zip(begins, [*begins[1:], processed], strict=True)]
                return _of_lengths(lengths, processed=processed, trained=trained)
    return BatchTokens(processed=processed, real=None, trained=trained, sequences=None, squares=None)


def _lengths_in(mask: torch.Tensor) -> list[int]:
    """The lengths of the sequences in each row: of one, or of several that are packed, if the mask numbers them."""
    least, greatest = (0, 1) if mask.dtype is torch.bool or not mask.numel() else map(int, mask.aminmax())
    if greatest < 2:
        # Most masks are of zeros and ones, whose sum is a single operator.
        lengths: list[int] = (mask if least >= 0 else mask != 0).sum(-1).tolist()
        return lengths
    return [length for row in mask for length in row[row != 0].unique(return_counts=True)[1].tolist()]


def _of_lengths(lengths: Sequence[int], *, processed: int, trained: int | None) -> BatchTokens:
    if min(lengths, default=1) <= 0:
        lengths = [length for length in lengths if length > 0]
    return BatchTokens(
        processed=processed,
        real=sum(lengths),
        trained=trained,
        sequences=len(lengths),
        squares=sum(map(operator.mul, lengths, lengths)),
    )


def _is_grid(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether *value* has a number for each sample and position."""
    return isinstance(value, torch.Tensor) and value.ndim == 2 and not value.is_floating_point()


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "cpu" or type(tensor) is not torch.Tensor:
        raise OnDeviceError
    return tensor
