"""What a batch is, as far as a profile needs it: its shapes and how many samples it holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils.rnn import PackedSequence

from lightning_flops.instrument.random_state import random_state_kept
from lightning_flops.instrument.torch_private.dispatch import modes_off
from lightning_flops.instrument.torch_private.tensors import nested_sizes
from lightning_flops.records import (
    HIDDEN_SHAPE,
    LENGTHS_MARK,
    PADDING_MARK,
    TRAINED_MARK,
    UNKNOWN_SHAPE,
    WITH_PADDING,
    WITHOUT_PADDING,
    BatchTokens,
    Shapes,
)
from lightning_flops.text.json_text import is_too_long, shown
from lightning_flops.units import plural

if TYPE_CHECKING:
    from lightning_flops.config import ProfilerConfig

UNKNOWN = UNKNOWN_SHAPE

_FROM_LOADER = -2
"""Begins a shape that is no tensor's: it tells which of several data loaders the batch is from."""

_PACKED = -4
"""Begins a shape that is no tensor's: the number after it is that of the sequences in a PackedSequence, or in a nested
tensor that is jagged."""

_BESIDE = (-5,)
"""Stands between the shapes of batches that several loaders have delivered for one step."""

_LOOKED_AT = (-6,)
"""Comes before the shapes of batches that were fetched for a step, and that the model was not called on."""

_FORWARDS, _BACKWARDS = -7, -8
"""Begin shapes that are no tensor's: so many calls of the model, or backwards, had the batch, as their lengths tell."""

_CALLS = (_FORWARDS, _BACKWARDS)
_CALLS_BEGIN = ((_FORWARDS,), (_BACKWARDS,))

_NO_LOSS = (-9,)
"""Stands in the shapes of a batch from which no loss came, so that no backward ran for it."""

HIDDEN = (HIDDEN_SHAPE,)
"""The shapes of a batch that holds something, and no tensor."""

_hidden_so_far = itertools.count(1)

_NO_TENSORS = (_FROM_LOADER, PADDING_MARK, LENGTHS_MARK, TRAINED_MARK, *_NO_LOSS, *HIDDEN_SHAPE[:1])
"""What begins shapes that are no tensor's."""

_OF_TOKENS = ((PADDING_MARK,), (LENGTHS_MARK,), (TRAINED_MARK,))

_MAX_DEPTH = 16  # a batch that nests deeper, or contains itself, is described down to here


def tensor_shapes(batch: Any) -> Shapes:
    """Shapes of every tensor in *batch*, in order: dicts, sequences and dataclasses are looked into.

    ``HIDDEN`` if there are none, but other things, as texts or a class of the user's: the sizes of what is computed on
    them are not seen. Of a batch of nothing there is nothing to see.
    """
    try:
        # By far the most common batches. This is asked at every step, when its code is no longer in the processor's
        # cache: the fewer functions, the quicker. A torch.Size is a tuple, and equal to a plain one.
        kind = type(batch)
        if kind is torch.Tensor:
            return (batch.shape,)
        items = batch if kind in (list, tuple) else batch.values() if kind is dict else None
        if items is None and isinstance(batch, Mapping):  # such as a tokenizer makes
            items = tuple(batch.values())
        if items is not None:
            shapes: list[tuple[int, ...]] = []
            for item in items:
                if type(item) is not torch.Tensor:
                    break
                shapes.append(item.shape)
            else:
                return tuple(shapes)
    except RuntimeError:  # one of them has no shape
        pass
    found = tuple(shape for tensor in _tensors(batch, _MAX_DEPTH) for shape in _shapes_of(tensor))
    return found or (HIDDEN if _first_hidden(batch, _MAX_DEPTH) is not None else ())


def hides_something(batch: Any) -> bool:
    """Whether there is anything in *batch* that may have sizes, and is no tensor: a text, or a class of the user's."""
    return _first_hidden(batch, _MAX_DEPTH, but=(bool, int, float, complex)) is not None


def tensors_by_memory(batch: Any) -> dict[int, Shapes]:
    """The shapes of the tensors in *batch*, by where they lie; those of one place are one."""
    found: dict[int, Shapes] = {}
    for tensor in _tensors(batch, _MAX_DEPTH):
        try:
            place = tensor.data_ptr() if type(tensor) is torch.Tensor else id(tensor)
        except RuntimeError:  # it has no memory
            place = id(tensor)
        found.setdefault(place or id(tensor), _shapes_of(tensor))
    return found


def _shapes_of(tensor: torch.Tensor | PackedSequence) -> Shapes:
    if isinstance(tensor, PackedSequence):
        sizes = tensor.batch_sizes
        with modes_off():
            return (_PACKED, int(sizes[0])), tuple(tensor.data.shape), tuple(sizes.shape)
    if tensor.layout is torch.jagged:  # one of its sizes is no number, and another one in each batch
        with modes_off():
            return (_PACKED, int(tensor.shape[0])), tuple(tensor.values().shape)
    try:
        return (tuple(tensor.shape),)
    except RuntimeError:
        # A nested tensor with strides. What its rows are tells it from another; how many samples they are is not known.
        with modes_off():  # nobody counts what we ask
            return (UNKNOWN, *nested_sizes(tensor))


def shapes_text(shapes: Shapes) -> str:
    """*shapes* as a report prints them: ``[32, 1, 8, 8] [32]``."""
    words = [_shape_text(shape) for shape in shapes if shape[:1] not in _CALLS_BEGIN]
    if len(words) < len(shapes):
        forwards, backwards = (
            int("".join([str(len(shape) - 1) for shape in shapes if shape[:1] == begin]), 8) for begin in _CALLS_BEGIN
        )
        words.append(f"({forwards} {plural('forward', forwards)}, {backwards} {plural('backward', backwards)})")
    return " ".join(words)


def _shape_text(shape: tuple[int, ...]) -> str:
    if shape[:1] == (_FROM_LOADER,):
        return f"loader {shape[1]}:"
    if shape[:1] == (_PACKED,):
        return f"{shape[1]} packed:"
    if shape == _BESIDE:
        return "and"
    if shape == _NO_LOSS:
        return "without a loss"
    if shape == _LOOKED_AT:
        return "looked at:"
    return "[?]" if shape in (UNKNOWN, HIDDEN_SHAPE) else str(list(shape))


def from_loader(shapes: Shapes, index: int) -> Shapes:
    """*shapes* of a batch from the data loader of this *index*: batches of two loaders are never alike.

    What is computed on a batch may depend on its loader.
    """
    return ((_FROM_LOADER, index), *shapes)


def without_loss(shapes: Shapes) -> Shapes:
    """*shapes* of a batch from which no loss came: it spends less than others of these shapes."""
    return (*shapes, _NO_LOSS)


def known_by(shapes: Shapes, tokens: BatchTokens | None) -> Shapes:
    """What a batch of these *shapes* and *tokens* is known by: also by whether one of its tokens is padding.

    What is computed may depend on that. Transformers, for one, leaves a mask away that rules nothing out, and tells a
    fused kernel to be causal in its place; the kernel then skips half of the scores. Where labels alone tell that there
    is no padding, there is no mask, and nothing depends on it.
    """
    if tokens is None:
        return shapes
    processed, real, _, sequences, _, _ = tokens
    if real is None or sequences is None:
        return shapes
    return (*shapes, WITHOUT_PADDING if real == processed else WITH_PADDING)


def known_by_lengths(shapes: Shapes, tokens: BatchTokens | None) -> Shapes:
    """As ``known_by``, and also by the lengths of its sequences, and by how many of its tokens are trained on.

    What is computed may depend on them, and not on the shapes that they are packed or padded into. An attention over
    packed sequences spends what the squares of their lengths add up to. The head of a masked language model may be
    computed for the masked tokens alone.
    """
    if tokens is None:
        return shapes
    processed, real, trained, _, squares, longest = tokens
    of_labels = () if trained is None else ((TRAINED_MARK, trained),)
    if real is None or squares is None or longest is None:
        return (*shapes, *of_labels)
    padding = WITHOUT_PADDING if real == processed else WITH_PADDING
    return (*shapes, padding, (LENGTHS_MARK, real, squares, longest), *of_labels)


def never_alike(shapes: Shapes) -> Shapes:
    """*shapes* of a batch; if they are hidden, those of no other batch are the same."""
    return (*shapes, (next(_hidden_so_far),)) if HIDDEN_SHAPE in shapes else shapes


def one_object_if_equal(batches: Sequence[Shapes]) -> Sequence[Shapes]:
    """*batches*; if all are equal, they are one and the same object, and whoever compares them next is quick."""
    first = batches[0]
    return [first] * len(batches) if batches.count(first) == len(batches) else batches


def of_tensors(shapes: Shapes) -> Shapes:
    """*shapes* without what tells of the tokens of the whole batch."""
    return tuple([shape for shape in shapes if shape[:1] not in _OF_TOKENS])


def beside(shapes: Shapes, others: Shapes) -> Shapes:
    """*shapes* of a batch and those of a batch from another loader, both of which a step computes on."""
    return (*shapes, _BESIDE, *others)


def looked_at(shapes: Shapes, others: Shapes) -> Shapes:
    """*shapes* of a batch, and those of one that the step has fetched, too, and that is none of its samples."""
    return (*shapes, _LOOKED_AT, *others)


@functools.cache
def calls_on(*, forwards: int, backwards: int) -> Shapes:
    """Tells batches apart that had other numbers of forwards or backwards than one each; empty if these are one each.

    The numbers are in the lengths, digit by digit, and not in the sizes: what other numbers spend follows from nothing.
    """
    if (forwards, backwards) == (1, 1):
        return ()
    digits = [
        (mark, digit) for mark, number in zip(_CALLS, (forwards, backwards), strict=True) for digit in oct(number)[2:]
    ]
    return tuple((mark, *(0,) * int(digit)) for mark, digit in digits)


def samples_in(shapes: Shapes) -> int | None:
    """The first dimension that all tensors share, which is the number of samples by convention.

    A PackedSequence and a jagged tensor tell how many sequences are in them. What several loaders delivered for one
    step is added up.

    Returns:
        None where the tensors disagree or there is none: a guess would make every samples/s a guess.
    """
    leading = {shape[0] for shape in shapes if shape}
    if len(leading) == 1 and min(leading) >= 0:
        return leading.pop()  # most batches
    if any(shape[:1] in _CALLS_BEGIN for shape in shapes):
        return samples_in(tuple([shape for shape in shapes if shape[:1] not in _CALLS_BEGIN]))
    if _LOOKED_AT in shapes:
        return samples_in(shapes[: shapes.index(_LOOKED_AT)])
    if _BESIDE in shapes:
        place = shapes.index(_BESIDE)
        several = samples_in(shapes[:place]), samples_in(shapes[place + 1 :])
        return None if None in several else sum(one or 0 for one in several)
    leading = {shape[1] for shape in shapes if shape[:1] == (_PACKED,)}
    leading = leading or {shape[0] for shape in shapes if shape and shape[0] not in _NO_TENSORS}
    return leading.pop() if len(leading) == 1 and UNKNOWN not in shapes else None


def _agreed_samples(batches: Sequence[Shapes]) -> Sequence[int] | None:
    """``samples_in`` of each of *batches* if all their tensors agree on it; no function of ours is called for each."""
    try:
        leading = [tuple(map(itemgetter(0), tensors)) for tensors in zip(*batches, strict=True)]
    except (IndexError, ValueError):  # a tensor without axes, or batches of different forms
        return None
    agree = bool(leading) and leading.count(leading[0]) == len(leading) and min(leading[0]) >= 0
    return leading[0] if agree else None


class BatchMeter:
    """Samples and tokens of batches, from what the user said or from the batches themselves.

    Args:
        batch_size: samples in each batch, or a function of the batch; None looks at the tensors.
        tokens_per_sample: tokens in each sample, or a function from the batch to its tokens; None: no tokens are told.
        note: gets a sentence for the report when something could not be told; the run goes on.
        declared: the batch size that the run's own settings name; it stands in where the tensors do not tell one.
        found_tokens: those that the adapter has found in the batch that ends; they stand in for *tokens_per_sample*.
    """

    def __init__(
        self,
        *,
        batch_size: int | Callable[[Any], int] | None,
        tokens_per_sample: int | Callable[[Any], int] | None,
        note: Callable[[str], None],
        declared: Callable[[], int] | None = None,
        found_tokens: Callable[[], int | None] | None = None,
    ) -> None:
        self._batch_size = batch_size
        self._tokens_per_sample = tokens_per_sample
        self._note = note
        self._declared = declared
        self._found_tokens = found_tokens
        self._last: tuple[Shapes, int | None] | None = None

    @classmethod
    def by_settings(
        cls,
        config: ProfilerConfig,
        note: Callable[[str], None],
        *,
        declared: Callable[[], int] | None = None,
        found_tokens: Callable[[], int | None] | None = None,
    ) -> BatchMeter:
        """The meter of a run with these settings; the other arguments are as for the class."""
        return cls(
            batch_size=config.batch_size,
            tokens_per_sample=config.tokens_per_sample,
            note=note,
            declared=declared,
            found_tokens=found_tokens,
        )

    @property
    def asks_for_batches(self) -> bool:
        """``samples`` needs the batch itself."""
        return callable(self._batch_size)

    def samples(self, batch: Any, shapes: Shapes) -> int | None:
        """Samples in *batch*, whose tensors have these *shapes*; None if that is not known."""
        if isinstance(self._batch_size, int):
            return self._batch_size
        if self._batch_size is not None:
            return self._ask("batch_size", self._batch_size, batch)
        if self._last is not None and self._last[0] == shapes:  # asked after every batch of a run: mostly the same
            return self._last[1]
        samples = samples_in(shapes)
        if samples is None and self._declared is not None:
            samples = int(self._declared())
        self._last = (shapes, samples)
        if samples is None:
            self._note(
                "The batch size could not be told from the batch, whose tensors have different first dimensions or "
                "are hidden: samples/s needs batch_size=... to be given."
            )
        return samples

    def samples_of(self, batches: Sequence[Shapes]) -> Sequence[int | None]:
        """Samples in each of several batches, whose tensors have these shapes."""
        if batches.count(batches[0]) == len(batches):
            return [self.samples(None, batches[0])] * len(batches)
        agreed = _agreed_samples(batches) if self._batch_size is None else None
        return [self.samples(None, shapes) for shapes in batches] if agreed is None else agreed

    def tokens(self, batch: Any, samples: int | None) -> int | None:
        """Tokens in *batch* of so many *samples*; None if that is not known or was not asked for."""
        per_sample = self._tokens_per_sample
        if per_sample is None:
            return None if self._found_tokens is None else self._found_tokens()
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
        if answer <= 0 or is_too_long(answer):
            self._note(f"{setting} must return a number > 0, got {shown(answer)}; what needs it is n/a.")
            return None
        return answer


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor | PackedSequence]:
    if isinstance(value, torch.Tensor) or (isinstance(value, PackedSequence) and _is_on_host(value.batch_sizes)):
        yield value
    elif depth == 0 or isinstance(value, (str, bytes)):
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item, depth - 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item, depth - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for name in fields(value):
            yield from _tensors(getattr(value, name.name, None), depth - 1)


def _first_hidden(value: Any, depth: int, *, but: tuple[type, ...] = ()) -> Any:
    """The first thing in a batch that is no tensor, nor of a kind in *but*; None if there is none."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (list, tuple)) and depth:
        found = (_first_hidden(item, depth - 1, but=but) for item in value)
        return next((one for one in found if one is not None), None)
    return None if isinstance(value, (torch.Tensor, PackedSequence, *but)) else value


def _is_on_host(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.ndim == 1 and len(tensor) > 0
