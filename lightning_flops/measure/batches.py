"""What a batch is, as far as a profile needs it: its shapes and how many samples it holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.records import Shapes
from lightning_flops.units import shown

HIDDEN_SHAPE = (-10,) * 65
"""Stands for a batch in which nothing with a shape was found, but something else, whose sizes are unknown; no tensor
has so many axes."""

_hidden_so_far = itertools.count(1)

_MAX_DEPTH = 16  # a batch that nests deeper, or contains itself, is described down to here


def tensor_shapes(batch: Any) -> Shapes:
    """Shapes of every tensor in *batch*, in order: dicts, sequences and dataclasses are looked into.

    ``HIDDEN_SHAPE`` for a nested tensor, and if there are none, but other things, as texts or a class of the user's.
    """
    found, hides = list[tuple[int, ...]](), False
    for value in held_in(batch, _MAX_DEPTH, PackedSequence):
        if isinstance(value, torch.Tensor):
            found.append(HIDDEN_SHAPE if value.is_nested else tuple(value.shape))
        elif isinstance(value, PackedSequence):  # the row of its lengths keeps its first dimension from being samples
            found += [tuple(value.data.shape), (1, *value.batch_sizes.shape)]
        else:
            hides |= value is not None
    return tuple(found) or ((HIDDEN_SHAPE,) if hides else ())


def held_in(value: Any, depth: int, *whole: type) -> Iterator[Any]:
    """What the dicts, sequences and dataclasses in *value* hold, so many of them deep, *whole* ones as they are."""
    inside: Any = None
    if depth and isinstance(value, Mapping):
        inside = value.values()
    elif depth and isinstance(value, (list, tuple)) and not isinstance(value, whole):
        inside = value
    elif depth and is_dataclass(value) and not isinstance(value, type):
        inside = (getattr(value, field.name, None) for field in fields(value))
    if inside is None:
        yield value
    else:
        for one in inside:
            yield from held_in(one, depth - 1, *whole)


def shapes_text(shapes: Shapes) -> str:
    """*shapes* as a report prints them: ``[32, 1, 8, 8] [32]``."""
    return " ".join("[?]" if one == HIDDEN_SHAPE else str(list(one)) for one in shapes)


def never_alike(shapes: Shapes) -> Shapes:
    """*shapes* of a batch; if they are hidden, those of no other batch are the same."""
    return (*shapes, (next(_hidden_so_far),)) if HIDDEN_SHAPE in shapes else shapes


def samples_in(shapes: Shapes) -> int | None:
    """The first dimension that all tensors share, which is the number of samples by convention.

    None where the tensors disagree or there is none: a guess would make every samples/s a guess.
    """
    found = {shape[0] for shape in shapes if shape and shape[0] >= 0}
    return found.pop() if len(found) == 1 else None


def alike_parts(batch: Any) -> int:
    """Elements of the list *batch*, if they have the same shapes: each may be a batch of its own; 1: it is none."""
    if not isinstance(batch, (list, tuple)) or len({tensor_shapes(one) for one in batch}) != 1:
        return 1
    return len(batch) if samples_in(tensor_shapes(batch[0])) is not None else 1


def first_tensor(given: Any) -> torch.Tensor | None:
    """The first tensor among a model's arguments, or in the dict or sequence that is the first of them."""
    values = given.values() if isinstance(given, Mapping) else given if isinstance(given, (list, tuple)) else (given,)
    return next((one for one in values if isinstance(one, torch.Tensor)), None)


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
        declared: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._batch_size = batch_size
        self._tokens_per_sample = tokens_per_sample
        self._note = note
        self._declared = declared

    def given(self, batch: Any, otherwise: int | None) -> int | None:
        """Samples in *batch* as the setting says them, or else *otherwise*; 0: there is nothing in it that was used."""
        if otherwise == 0:
            return 0
        if isinstance(self._batch_size, int):
            return self._batch_size
        return otherwise if self._batch_size is None else self._ask("batch_size", self._batch_size, batch)

    def samples(self, batch: Any, shapes: Shapes) -> int | None:
        """Samples in *batch*, whose tensors have these *shapes*; None if that is not known."""
        if self._batch_size is not None:
            return self.given(batch, None)
        samples = samples_in(shapes)
        if samples is None:
            samples = self._declared()
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
