"""What a batch is, as far as a profile needs it: its shapes, how many samples it holds, which of its tokens are tokens.

Tokens are read on the host, and never from a device.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, TypeGuard

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_flops.measure.random_state import random_state_kept
from lightning_flops.measure.torch_private.needed import modes_off
from lightning_flops.measure.torch_private.optional import rows_fetched
from lightning_flops.records import BatchTokens, Shapes
from lightning_flops.signals import words_of
from lightning_flops.units import shown

#: Stands for a batch in which nothing with a shape was found, but something else, whose sizes are unknown; no tensor
#: has so many axes.
HIDDEN_SHAPE = (-10,) * 65

_hidden_so_far = itertools.count(1)

_MAX_DEPTH = 16  # a batch that nests deeper, or contains itself, is described down to here


def tensor_shapes(batch: Any) -> Shapes:
    """Shapes of every tensor in *batch*, in order: dicts, sequences and dataclasses are looked into.

    ``HIDDEN_SHAPE`` for a nested tensor, and if there are none, but other things, as texts or a class of the user's.
    """
    flat = batch.values() if type(batch) is dict else batch if type(batch) in (list, tuple) else (batch,)
    shapes = tuple([tuple(one.shape) for one in flat if type(one) is torch.Tensor and not one.is_nested])
    if len(shapes) == len(flat):  # as most batches, of which each step asks
        return shapes
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
    return next((one for one in held_in(given, 1) if isinstance(one, torch.Tensor)), None)


@dataclass(slots=True)
class FetchedRows:
    """Rows of the batches that loaders bring, and of what a model is called with."""

    kind: type = object  # of what was fetched last
    shapes: Shapes = ()
    sizes: tuple[int | None, int] = (None, 1)  # its rows by its tensors, in so many alike parts
    #: Rows of the latest batches, since tensors did not show them, but the loader knew them.
    of_loader: deque[tuple[Shapes, int]] = field(default_factory=lambda: deque(maxlen=64))

    def brings(self, batch: Any, iterator: Any) -> tuple[Shapes, int | None]:
        """The shapes and rows of *batch*, which *iterator* has brought; sizes are known where the latest was alike."""
        shapes = tensor_shapes(batch)
        if type(batch) is not self.kind or shapes != self.shapes:
            self.kind, self.shapes, self.sizes = type(batch), shapes, (samples_in(shapes), alike_parts(batch))
        rows = self.sizes[0]
        if (rows is None or self.of_loader) and (known := rows_fetched(iterator)) is not None:
            self.of_loader.append((shapes, rows := known))
        return shapes, rows

    def rows_of(self, args: tuple[Any, ...], shapes: Shapes) -> int | None:
        """Rows of what a model is called with, of *args* by place: by its tensors.

        Where tensors have not shown the rows of a batch, they must be those that its loader knows, or it is that batch
        itself, or a list of so many.
        """
        rows = self.sizes[0] if shapes == self.shapes else samples_in(shapes)
        if of_batch := [one for fetched, one in self.of_loader if fetched == shapes]:
            return of_batch[-1]
        if self.of_loader and args and isinstance(args[0], (list, tuple)):
            rows = len(args[0])
        known = (self.sizes[0], *(one for _, one in self.of_loader))
        return rows if len(known) == 1 or rows in known else None


class BatchMeter:
    """Samples and tokens of batches, by the settings of these names, or else by the batches themselves.

    *note* gets a sentence for the report when something is not known; *declared* is what the run's own settings or
    loader say of the running batch, for batches whose tensors do not show it.
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
        self._hides = False  # tensors have not shown what is declared

    def given(self, batch: Any, otherwise: int | None) -> int | None:
        """Samples in *batch* as the setting says them, or else *otherwise*; 0: there is nothing in it that was used."""
        if otherwise == 0:
            return 0
        return otherwise if self._batch_size is None else self._ask("batch_size", self._batch_size, batch)

    def samples(self, batch: Any, shapes: Shapes) -> int | None:
        """Samples in *batch*, whose tensors have these *shapes*; None if that is not known."""
        if self._batch_size is not None:
            return self.given(batch, None)
        samples = samples_in(shapes)
        if samples is None or self._hides:  # where some tensors disagree, others may agree by chance
            self._hides = (declared := self._declared()) is not None
            samples = declared if self._hides else samples
        if samples is None:
            self._note(
                "The batch size could not be read from the batch, whose tensors have different first dimensions or "
                "are hidden: samples/s needs batch_size=... to be given."
            )
        return samples

    def tokens(self, batch: Any, samples: int | None) -> int | None:
        """Tokens in *batch* of so many *samples*; None if that is not known or was not asked for."""
        per_sample = self._tokens_per_sample
        if callable(per_sample):
            return self._ask("tokens_per_sample", per_sample, batch)
        return None if per_sample is None or samples is None else samples * per_sample

    def _ask(self, setting: str, given: int | Callable[[Any], int], batch: Any) -> int | None:
        """The number *given*, or what the user's function says of *batch*; if it fails, its figure is gone."""
        if not callable(given):
            return given
        try:
            with random_state_kept():
                answer = int(given(batch))
        except Exception as error:  # a user's function in the middle of training: whatever it raises stays here
            failure = f"raised {words_of(error)}"
        else:
            if 0 < answer < 2**63:
                return answer
            failure = f"must return a number > 0, got {shown(answer)}"
        self._note(f"{setting} {failure}; what needs it is n/a.")
        return None


_IGNORED = -100  #: A label that losses leave out.

#: Names under which batches of packed sequences hold where each begins, and where the last one ends.
_OFFSETS = ("cu_seqlens", "cu_seq_lens_q", "cu_seqlens_q", "cu_seq_lens")


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

    def take(self) -> BatchTokens | None:
        """The tokens of the batch that is used now, in the order of the fetches."""
        return self.fetched.popleft() if self.fetched else None

    def of(self, batch: Any) -> BatchTokens | None:
        """The tokens of *batch*; None if it does not show them."""
        try:
            tokens = tokens_in(batch)
        except Exception as error:  # of the user's batch
            if not self._has_read:
                self.reads = False
                words = error if isinstance(error, OnDeviceError) else words_of(error)
                self._note(f"Tokens without padding are n/a: {words}.")
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
    parts = [
        _named(one) for one in batch if isinstance(one, Mapping) and ("input_ids" in one or "attention_mask" in one)
    ]
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
        raise OnDeviceError(
            "the batch is on the device before it can be read without waiting for the device. tokens_per_sample=... "
            "may give them"
        )
    return tensor
