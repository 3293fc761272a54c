"""What a batch is, as far as a profile needs it: its shapes and how many samples it holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch

Shapes = tuple[tuple[int, ...], ...]

_MAX_DEPTH = 16  # a batch that nests deeper, or contains itself, is described down to here


def tensor_shapes(batch: Any) -> Shapes:
    """Shapes of every tensor in *batch*, in order: dicts, sequences and dataclasses are looked into."""
    if type(batch) in (list, tuple):  # by far the most common batch, looked at once a step: the short way
        shapes = tuple([tuple(item.shape) for item in batch if isinstance(item, torch.Tensor)])
        if len(shapes) == len(batch):
            return shapes
    return tuple(tuple(tensor.shape) for tensor in _tensors(batch, _MAX_DEPTH))


def shapes_text(shapes: Shapes) -> str:
    """*shapes* as a report prints them: ``[32, 1, 8, 8] [32]``."""
    return " ".join(str(list(shape)) for shape in shapes)


def samples_in(shapes: Shapes) -> int | None:
    """The first dimension that all tensors share, which is the number of samples by convention.

    Returns:
        None where the tensors disagree or there is none: a guess would make every samples/s a guess.
    """
    leading = {shape[0] for shape in shapes if shape}
    return leading.pop() if len(leading) == 1 else None


def _tensors(value: Any, depth: int) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
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
