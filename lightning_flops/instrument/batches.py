"""What a batch is, as far as a profile needs it: its shapes and how many samples it holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_flops.instrument.torch_private.dispatch import modes_off
from lightning_flops.records import Shapes
from lightning_flops.text.printable import shown

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
    leaves = list(_leaves(batch, _MAX_DEPTH))
    found = tuple(shape for leaf in leaves for shape in _shapes_of(leaf))
    return found or ((HIDDEN_SHAPE,) if leaves else ())


def _shapes_of(leaf: Any) -> Shapes:
    if isinstance(leaf, PackedSequence):
        with modes_off():  # not counted: we ask
            return (_PACKED, int(leaf.batch_sizes[0])), tuple(leaf.data.shape), tuple(leaf.batch_sizes.shape)
    if not isinstance(leaf, torch.Tensor):
        return ()
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
    leading = {shape[1] for shape in shapes if shape[:1] == (_PACKED,)}
    leading = leading or {shape[0] for shape in shapes if shape and shape[0] >= 0}
    return leading.pop() if len(leading) == 1 else None


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
            answer = int(function(batch))
        except Exception as error:  # a user's function in the middle of training: whatever it raises stays here
            self._note(f"{setting} raised {type(error).__name__}: {error}; what needs it is n/a.")
            return None
        if not 0 < answer < 2**63:
            self._note(f"{setting} must return a number > 0, got {shown(answer)}; what needs it is n/a.")
            return None
        return answer


def _leaves(value: Any, depth: int) -> Iterator[Any]:
    """Every tensor and packed sequence in *value*, and everything else in it that is not None."""
    inside: Any = None
    if depth == 0 or isinstance(value, (torch.Tensor, PackedSequence)):
        pass
    elif isinstance(value, Mapping):
        inside = value.values()
    elif isinstance(value, (list, tuple)):
        inside = value
    elif is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name, None) for field in fields(value)]
    if inside is not None:
        for item in inside:
            yield from _leaves(item, depth - 1)
    elif value is not None:
        yield value
