"""Batches like a given one with other sizes, for counting on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_flops.errors import ConfigError
from lightning_flops.text.json_text import shown

Key = str | int
"""Of a tensor in the batch: the name of an argument, or its position."""

Vary = Mapping[Key, "Sequence[int] | Mapping[int, str]"]

_MOST_ELEMENTS = 1 << 26
"""A tensor of more is not made: it would hold the memory that counting offline spares."""


class VariedBatch:
    """A batch whose sizes can be changed.

    Args:
        batch: a tuple of positional arguments, a dict of keyword arguments, or the one argument.
        vary: by tensor, the axes that vary, or their names by axis. Axes of one name are of one size.

    Raises:
        ConfigError: a tensor or an axis is not there, or axes of one name have different sizes.
    """

    def __init__(self, batch: Any, vary: Vary) -> None:
        self._batch = batch
        self._one = not isinstance(batch, Mapping) and type(batch) is not tuple
        arguments: Mapping[Key, Any] = (
            dict(batch) if isinstance(batch, Mapping) else dict(enumerate((batch,) if self._one else batch))
        )
        self._arguments = arguments
        self.sizes: dict[str, int] = {}
        """Each variable's size in the batch."""
        self.places: list[tuple[str, int, int]] = []
        """For each axis that the user named, its variable, the tensor's number and the axis."""
        self._axes: dict[Key, dict[int, str]] = {}
        if not isinstance(vary, Mapping):
            raise ConfigError(f"vary must be a mapping from a tensor of the batch to its axes, got {shown(vary)}")
        if not vary:
            raise ConfigError("vary must name the axes of at least one tensor")
        for number, (key, axes) in enumerate(vary.items()):
            self._vary(number, key, axes)
        self._follow()

    def _vary(self, number: int, key: Key, axes: Sequence[int] | Mapping[int, str]) -> None:
        tensor = self._arguments.get(key)
        if not isinstance(tensor, torch.Tensor):
            there = [shown(one) for one, value in self._arguments.items() if isinstance(value, torch.Tensor)]
            raise ConfigError(f"vary names {shown(key)}; the batch's tensors are {', '.join(there) or 'hidden'}")
        for axis, name in _named(key, axes, tensor.ndim):
            if type(axis) is not int or not 0 <= axis < tensor.ndim:
                raise ConfigError(f"vary names axis {shown(axis)} of {shown(key)}, which has {tensor.ndim} axes")
            if not isinstance(name, str):
                raise ConfigError(f"vary must name axis {axis} of {shown(key)} by a text, got {shown(name)}")
            size = int(tensor.shape[axis])
            if self.sizes.setdefault(name, size) != size:
                raise ConfigError(
                    f"vary has axes of sizes {self.sizes[name]} and {size} that are both named {name}: "
                    f"name them, as in vary={{{key!r}: {{{axis}: 'another name'}}}}"
                )
            if size < 1:
                raise ConfigError(f"axis {axis} of {shown(key)} is empty in the batch")
            self.places.append((name, number, axis))
            self._axes.setdefault(key, {})[axis] = name

    def _follow(self) -> None:
        """Axes that the user did not name go with those that he did, where they agree in place and size."""
        named = {(axis, self.sizes[name]): name for name, _, axis in self.places}
        for key, tensor in self._arguments.items():
            if not isinstance(tensor, torch.Tensor):
                continue
            follow = {axis: named[axis, size] for axis, size in enumerate(tensor.shape) if (axis, size) in named}
            if axes := follow | self._axes.get(key, {}):
                self._axes[key] = axes

    def resized(self, sizes: Mapping[str, int]) -> Any:
        """The batch in these *sizes*: what it holds is repeated, or cut off.

        Raises:
            ConfigError: a tensor would be too large to make.
        """
        arguments = dict(self._arguments)
        for key, axes in self._axes.items():
            tensor: torch.Tensor = arguments[key]
            wanted = list(tensor.shape)
            for axis, name in axes.items():
                wanted[axis] = sizes[name]
            if torch.Size(wanted).numel() > max(_MOST_ELEMENTS, tensor.numel()):
                raise ConfigError(f"{shown(key)} of shape {wanted} is too large to make")
            for axis, name in axes.items():
                rows = torch.arange(sizes[name], device=tensor.device) % tensor.shape[axis]
                tensor = tensor.detach().index_select(axis, rows)
            arguments[key] = tensor.requires_grad_(self._arguments[key].requires_grad)
        if isinstance(self._batch, Mapping):
            return arguments
        return arguments[0] if self._one else tuple(arguments.values())


def _named(key: Key, axes: object, ndim: int) -> Iterable[tuple[Any, Any]]:
    """The *axes* of the tensor *key* that the user gave, each with its name."""
    if isinstance(axes, Mapping):
        return axes.items()
    if isinstance(axes, Iterable) and not isinstance(axes, str):
        return ((axis, _usual_name(axis, ndim)) for axis in axes)
    raise ConfigError(f"vary[{shown(key)}] must be axes, or a mapping from axes to names, got {shown(axes)}")


def _usual_name(axis: object, axes: int) -> str:
    """What *axis* of a tensor of so many *axes* mostly is."""
    names = {0: "batch", 2: "height", 3: "width"} if axes == 4 else {0: "batch", 1: "sequence"}
    return names.get(axis, f"axis_{axis}") if isinstance(axis, int) else ""
