"""Batches like a given one with other sizes, for counting on fake tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from lightning_flops.errors import ConfigError
from lightning_flops.units import shown

Key = str | int
"""Of a tensor in the batch: the name of an argument, or its position."""

Vary = Mapping[Key, "Sequence[int] | Mapping[int, str]"]


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
        self._arguments: dict[Key, Any] = dict(
            batch if isinstance(batch, Mapping) else enumerate((batch,) if self._one else batch)
        )
        tensors = {key: one for key, one in self._arguments.items() if isinstance(one, torch.Tensor)}
        self.sizes: dict[str, int] = {}  # each variable's size in the batch
        self.batch_names: set[str] = set()  # variables that are the first axis of a tensor: samples
        if not isinstance(vary, Mapping):
            raise ConfigError(f"vary must be a mapping from a tensor of the batch to its axes, got {shown(vary)}")
        if not vary:
            raise ConfigError("vary must name the axes of at least one tensor")
        if unknown := [key for key in vary if key not in tensors]:
            known = ", ".join(f"{key} (by position)" if isinstance(key, int) else shown(key) for key in tensors)
            raise ConfigError(f"vary names {shown(unknown[0])}; the batch's tensors are {known or 'hidden'}")
        given = {key: self._named_axes(key, tensors[key], axes) for key, axes in vary.items()}
        named = {(axis, self.sizes[name]): name for axes in given.values() for axis, name in axes.items()}
        # Axes that the user did not name go with those that he did, where they agree in place and size.
        self._axes = {
            key: {place[0]: named[place] for place in enumerate(tensor.shape) if place in named} | given.get(key, {})
            for key, tensor in tensors.items()
        }

    @classmethod
    def like(cls, batch: Any, at: Mapping[str, int]) -> Any:
        """*batch* in the sizes of *at*, by the names that the axes of its first tensor have if none are named.

        Raises:
            ConfigError: no axis has such a name.
        """
        given = batch.items() if isinstance(batch, Mapping) else enumerate(batch if type(batch) is tuple else (batch,))
        axes = [(key, range(one.ndim)) for key, one in given if isinstance(one, torch.Tensor)]
        varied = cls(batch, dict(axes[:1]))
        if unknown := sorted({*at} - {*varied.sizes}):
            raise ConfigError(f"at must be by size of the batch, {', '.join(varied.sizes)}, got {', '.join(unknown)}")
        return varied.resized(varied.sizes | dict(at))

    def _named_axes(self, key: Key, tensor: torch.Tensor, axes: object) -> dict[int, str]:
        """The *axes* of one tensor that the user gave, with their names."""
        if not isinstance(axes, Iterable) or isinstance(axes, str):
            raise ConfigError(f"vary[{shown(key)}] must be axes, or a mapping from axes to names, got {shown(axes)}")
        usual = ("batch", "axis_1", "height", "width") if tensor.ndim == 4 else ("batch", "sequence")
        found: dict[int, str] = {}
        for axis in axes:
            if type(axis) is not int or not 0 <= axis < tensor.ndim:
                raise ConfigError(f"vary names axis {shown(axis)} of {shown(key)}, which has {tensor.ndim} axes")
            name = axes[axis] if isinstance(axes, Mapping) else usual[axis] if axis < len(usual) else f"axis_{axis}"
            size = int(tensor.shape[axis])
            if not isinstance(name, str):
                raise ConfigError(f"vary must name axis {axis} of {shown(key)} by a text, got {shown(name)}")
            if self.sizes.setdefault(name, size) != size:
                raise ConfigError(
                    f"vary has axes of sizes {self.sizes[name]} and {size} that are both named {name}: "
                    f"name them, as in vary={{{key!r}: {{{axis}: 'another name'}}}}"
                )
            found[axis] = name
            self.batch_names |= {name} if axis == 0 else set()
        return found

    def resized(self, sizes: Mapping[str, int]) -> Any:
        """The batch in these *sizes*; what its tensors hold is not set."""
        arguments = dict(self._arguments)
        made: dict[Any, torch.Tensor] = {}  # one tensor in several places stays one
        for key, axes in self._axes.items():
            if axes:
                tensor = self._arguments[key]
                wanted = [sizes[axes[axis]] if axis in axes else size for axis, size in enumerate(tensor.shape)]
                new = tensor.new_empty(wanted).requires_grad_(tensor.requires_grad)
                arguments[key] = made.setdefault((id(tensor), *wanted), new)
        if isinstance(self._batch, Mapping):
            return arguments
        values = tuple(arguments.values())
        return values[0] if self._one else values
