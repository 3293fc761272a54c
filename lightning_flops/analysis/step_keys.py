"""What a step is known by: its batches' shapes and its updates, and what these have in common."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress, islice, repeat
from typing import NamedTuple, TypeVar

from lightning_flops.analysis.law import FLAG, LONGEST, SQUARES, TOKENS, TRAINED, Column, Sizes
from lightning_flops.records import LENGTHS_MARK, PADDING_MARK, TRAINED_MARK, WITH_PADDING, WITHOUT_PADDING, Shapes

_Number = TypeVar("_Number", int, float)

StepKey = tuple[tuple[Shapes, ...], int]
"""The shapes of the tensors of each batch of a step, with what else tells of the batch (``known_by``), and the step's
optimizer attempts."""

Kind = tuple[tuple[tuple[int, ...], ...], int]
"""Of each batch, how many axes each tensor has, and the optimizer attempts: what steps of one law have in common."""


class AlikeSteps(NamedTuple):
    """Steps of one kind, in columns: an object for each step would be looked at by every garbage collection."""

    example: StepKey
    """One of them."""
    columns: Sequence[Sequence[Column]]
    """For each batch of a step, a column for each of its sizes, with one value for each step."""
    number: int
    """So many steps there are."""

    def rows(self) -> Iterable[Sizes]:
        """Of each step, all sizes in its batches."""
        columns = self.columns[0] if len(self.columns) == 1 else list(chain.from_iterable(self.columns))
        return zip(*columns, strict=True) if columns else repeat((), self.number)

    def keys(self) -> Iterator[StepKey]:
        """Of each step, what it is known by."""
        return map(key_like, repeat(self.example), self.rows())


_OF_TOKENS = {
    (PADDING_MARK, 1): FLAG,
    (LENGTHS_MARK, 1): TOKENS,
    (LENGTHS_MARK, 2): SQUARES,
    (LENGTHS_MARK, 3): LONGEST,
    (TRAINED_MARK, 1): TRAINED,
}
"""By what begins a shape that tells of a batch's tokens, and the place in it: what stands there."""


def kind_of(key: StepKey) -> Kind:
    """What steps must have in common to have one law: numbers of batches, tensors, axes and updates."""
    batches, updates = key
    if len(batches) == 1:  # most steps
        return (tuple(map(len, batches[0])),), updates
    return tuple([tuple(map(len, shapes)) for shapes in batches]), updates


def has_several_forms(kind: Kind) -> bool:
    """Whether the batches of a step differ in their tensors or axes: what is a size of one is none of another."""
    return len(set(kind[0])) > 1


def key_like(example: StepKey, sizes: Sizes) -> StepKey:
    """The key of a step of the same kind as *example* with these *sizes*."""
    left = iter(sizes)
    batches, updates = example
    return tuple([tuple([tuple(islice(left, len(shape))) for shape in shapes]) for shapes in batches]), updates


def sizes_of(key: StepKey) -> tuple[Sizes, ...]:
    """All sizes of each batch."""
    batches = key[0]
    if len(batches) == 1:
        return (tuple(chain.from_iterable(batches[0])),)
    return tuple([tuple(chain.from_iterable(shapes)) for shapes in batches])


def by_kind(keys: Sequence[StepKey], numbers: Sequence[_Number]) -> Sequence[tuple[AlikeSteps, Sequence[_Number]]]:
    """Steps with these *keys*, by kind, with those of *numbers* that belong to them."""
    if not keys:
        return []
    try:
        return [(_in_columns(keys), numbers)]
    except ValueError:  # they are of several kinds, which is rare
        found: dict[Kind, tuple[list[StepKey], list[_Number]]] = {}
    for key, number in zip(keys, numbers, strict=True):
        its, of_each = found.setdefault(kind_of(key), ([], []))
        its.append(key)
        of_each.append(number)
    return [(_in_columns(its), of_each) for its, of_each in found.values()]


def of_one_batch_each(batches: Sequence[Shapes], updates: Sequence[int]) -> AlikeSteps | None:
    """Steps of one batch each, whose tensors have these shapes, after so many updates; None: of several kinds."""
    if updates.count(updates[0]) < len(updates):
        return None
    try:
        columns = _columns_of(batches)
    except ValueError:
        return None
    return AlikeSteps(((batches[0],), updates[0]), [columns], len(batches))


def axes_of(key: StepKey) -> list[tuple[int, int]]:
    """The tensor and the axis of each size. What tells of a whole batch is no tensor, and counts no samples."""
    return [
        (number, axis if shape[0] >= 0 else _OF_TOKENS.get((shape[0], axis), axis + 1))
        for number, shape in enumerate(key[0][0])
        for axis in range(len(shape))
    ]


def but_for_padding(key: StepKey) -> Iterator[StepKey]:
    """The keys of steps that differ from that of *key* in nothing but their padding, of all batches alike."""
    batches, updates = key
    if not any(_is_flag(shape, 1) for shape in batches[0]):
        return
    for mark in (WITH_PADDING, WITHOUT_PADDING):
        yield tuple([tuple([mark if _is_flag(one, 1) else one for one in shapes]) for shapes in batches]), updates


def sizes_alike(key: StepKey) -> Iterator[tuple[Sizes, ...]]:
    """The sizes of *key*, and then of the keys that differ from it in nothing but padding."""
    yield sizes_of(key)
    yield from map(sizes_of, but_for_padding(key))


_BY_LENGTHS = ((LENGTHS_MARK,), (TRAINED_MARK,))


def without_lengths(key: StepKey) -> StepKey:
    """*key* without what ``known_by_lengths`` tells more than ``known_by``."""
    batches, updates = key
    return tuple([tuple([shape for shape in shapes if shape[:1] not in _BY_LENGTHS]) for shapes in batches]), updates


def lengths_of(key: StepKey) -> tuple[int, ...]:
    """The numbers in *key* that add up over the sequences or the tokens of each batch."""
    found: list[int] = []
    for shapes in key[0]:
        for shape in shapes:
            if shape[:1] in _BY_LENGTHS:
                found += [size for axis, size in enumerate(shape) if axis and _OF_TOKENS[shape[0], axis] != LONGEST]
    return tuple(found)


def alike_without_lengths(steps: AlikeSteps) -> AlikeSteps:
    """*steps* without the same. Some may have the same key then."""
    columns = []
    for shapes, its in zip(steps.example[0], steps.columns, strict=True):
        stays = [shape[:1] not in _BY_LENGTHS for shape in shapes for _ in shape]
        columns.append(its if all(stays) else list(compress(its, stays)))
    return steps._replace(example=without_lengths(steps.example), columns=columns)


def all_sizes_of(key: StepKey) -> Sizes:
    """All sizes of all batches in one."""
    return tuple(chain.from_iterable(chain.from_iterable(key[0])))


def _in_columns(keys: Sequence[StepKey]) -> AlikeSteps:
    """Steps of one kind.

    Raises:
        ValueError: they are of several kinds.
    """
    batches, updates = zip(*keys, strict=True)
    if updates.count(updates[0]) < len(updates):
        raise ValueError("steps of different numbers of updates have no columns together")
    return AlikeSteps(keys[0], list(map(_columns_of, zip(*batches, strict=True))), len(keys))


def _columns_of(batches: Sequence[Shapes]) -> list[Column]:
    """A column for each size of *batches* of one form. No function of ours is called for each.

    Raises:
        ValueError: they are of several forms.
    """
    return [axis for tensors in zip(*batches, strict=True) for axis in zip(*tensors, strict=True)]


def _is_flag(shape: tuple[int, ...], axis: int) -> bool:
    """Whether it is not a size that stands there, but whether tokens of the batch are padding."""
    return shape[:1] == (PADDING_MARK,) and axis == 1
