"""What a batch is, as far as a profile needs it: its shapes and how many samples it holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.measure.torch_private.needed import modes_off
from lightning_flops.records import Shapes
from lightning_flops.units import shown

_FROM_LOADER = -2
"""Begins a shape that is no tensor's: it says which of several data loaders the batch is from."""

_PACKED = -4
"""Begins a shape that is no tensor's: the number after it is that of the sequences in a PackedSequence, or in a nested
tensor that is jagged."""

HIDDEN_SHAPE = (-10,) * 65
"""Stands for a batch in which nothing with a shape was found, but something else, whose sizes are unknown; no tensor
has so many axes."""

_hidden_so_far = itertools.count(1)

_MAX_DEPTH = 16  # a batch that nests deeper, or contains itself, is described down to here


def tensor_shapes(batch: Any) -> Shapes:
    """Shapes of every tensor in *batch*, in order: dicts, sequences and dataclasses are looked into.

    ``HIDDEN_SHAPE`` if there are none, but other things, as texts or a class of the user's, whose sizes are not seen.
    """
    found: list[tuple[int, ...]] = []
    hides, waiting = False, [(batch, _MAX_DEPTH)]
    while waiting:
        value, depth = waiting.pop()
        inside: Any = None
        if type(value) is torch.Tensor and value.layout is torch.strided and not value.is_nested:
            found.append(tuple(value.shape))
        elif isinstance(value, (torch.Tensor, PackedSequence)):
            found += _shapes_of(value)
        elif depth and isinstance(value, Mapping):
            inside = value.values()
        elif depth and isinstance(value, (list, tuple)):
            inside = value
        elif depth and is_dataclass(value) and not isinstance(value, type):
            inside = [getattr(value, field.name, None) for field in fields(value)]
        if inside is not None:
            waiting += [(one, depth - 1) for one in reversed([*inside])]
        else:
            hides |= value is not None
    return tuple(found) or ((HIDDEN_SHAPE,) if hides else ())


def _shapes_of(leaf: torch.Tensor | PackedSequence) -> Shapes:
    if isinstance(leaf, PackedSequence):
        with modes_off():  # not counted: we ask
            return (_PACKED, int(leaf.batch_sizes[0])), tuple(leaf.data.shape), tuple(leaf.batch_sizes.shape)
    if leaf.layout is torch.jagged:  # one of its sizes is no number, and another one in each batch
        with modes_off():
            return (_PACKED, int(leaf.shape[0])), tuple(leaf.values().shape)
    try:
        return (tuple(leaf.shape),)
    except RuntimeError:  # a nested tensor with strides has no shape
        return ()


def shapes_text(shapes: Shapes) -> str:
    """*shapes* as a report prints them: ``[32, 1, 8, 8] [32]``."""
    special = {_FROM_LOADER: "loader {}:", _PACKED: "{} packed:", HIDDEN_SHAPE[0]: "[?]"}
    return " ".join(special.get(one[0], str(list(one))).format(*one[1:]) if one else "[]" for one in shapes)


def from_loader(shapes: Shapes, index: int) -> Shapes:
    """*shapes* of a batch from the data loader of this *index*: what is computed may depend on the loader."""
    return ((_FROM_LOADER, index), *shapes)


def never_alike(shapes: Shapes) -> Shapes:
    """*shapes* of a batch; if they are hidden, those of no other batch are the same."""
    return (*shapes, (next(_hidden_so_far),)) if HIDDEN_SHAPE in shapes else shapes


def samples_in(shapes: Shapes) -> int | None:
    """The first dimension that all tensors share, which is the number of samples by convention.

    A PackedSequence and a jagged tensor say how many sequences are in them.

    Returns:
        None where the tensors disagree or there is none: a guess would make every samples/s a guess.
    """
    packed, leading = set(), set()
    for shape in shapes:
        if shape[:1] == (_PACKED,):
            packed.add(shape[1])
        elif shape and shape[0] >= 0:
            leading.add(shape[0])
    found = packed or leading
    return found.pop() if len(found) == 1 else None


class BatchMeter:
    """Samples and tokens of batches, by the settings of these names, or else by the batches themselves.

    *note* gets a sentence for the report when something is not known; *declared* is the batch size that the run's own
    settings name, for batches whose tensors do not show one.
    """

    def __init__(
        self,
        *,
        batch_size: int | Callable[[Any], int] | None,
        tokens_per_sample: int | Callable[[Any], int] | None,
        note: Callable[[str], None],
        declared: Callable[[], int] | None = None,
    ) -> None:
        self._batch_size = batch_size
        self._tokens_per_sample = tokens_per_sample
        self._note = note
        self._declared = declared

    def samples(self, batch: Any, shapes: Shapes) -> int | None:
        """Samples in *batch*, whose tensors have these *shapes*; None if that is not known."""
        if isinstance(self._batch_size, int):
            return self._batch_size
        if self._batch_size is not None:
            return self._ask("batch_size", self._batch_size, batch)
        samples = samples_in(shapes)
        if samples is None and self._declared is not None:
            samples = int(self._declared())
        if samples is None:
            self._note(
                "The batch size could not be read from the batch, whose tensors have different first dimensions or "
                "are hidden: samples/s needs batch_size=... to be given."
            )
        return samples

    def tokens(self, batch: Any, samples: int | None) -> int | None:
        """Tokens in *batch* of so many *samples*; None if that is not known or was not asked for."""
        per_sample = self._tokens_per_sample
        if per_sample is None:
            return None
        if isinstance(per_sample, int):
            return None if samples is None else samples * per_sample
        return self._ask("tokens_per_sample", per_sample, batch)

    def _ask(self, setting: str, function: Callable[[Any], int], batch: Any) -> int | None:
        """What the user's *function* says of *batch*; if it fails, its figure is gone, not the run."""
        try:
            with random_state_kept():
                answer = int(function(batch))
        except Exception as error:  # a user's function in the middle of training: whatever it raises stays here
            self._note(f"{setting} raised {type(error).__name__}: {error}; what needs it is n/a.")
            return None
        if not 0 < answer < 2**63:
            self._note(f"{setting} must return a number > 0, got {shown(answer)}; what needs it is n/a.")
            return None
        return answer
