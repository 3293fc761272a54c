"""On fake tensors, keeps the values that follow from the example alone, and mends shapes that torch refuses to tell.

A fake tensor has a shape and no values. What a batch holds is there all the same, and so is what a forward works out
from it without a parameter: masks, positions, lengths, grids. These small values are worked out beside the fake ones,
so that a forward that asks for one (``mask.all()``, ``lengths.tolist()``, ``ids.nonzero()``) is answered.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from lightning_flops.instrument.torch_private.dispatch import DispatchMode, modes_off
from lightning_flops.instrument.torch_private.fakes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    tree_flatten,
    tree_map_only,
    tree_unflatten,
)
from lightning_flops.instrument.torch_private.operators import OpOverload, schema_if_any
from lightning_flops.instrument.torch_private.tensors import storage_number

LARGEST = 1 << 20
"""Elements of the largest tensor whose values are kept: a count on fake tensors is to take no memory."""


class KnownValues(DispatchMode):  # type: ignore[no-untyped-call]
    """Entered above *mode*: works out beside its fake tensors the values of those that no unknown one went into."""

    supports_higher_order_operators = True

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.fakes = mode
        self._values: Any = WeakIdKeyDictionary()
        """By tensor, one of the same values; its memory is shared as that of the fake ones would be."""
        self._alive: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()
        """The fake tensors that somebody still holds, by their ids."""
        self._unknown: set[int] = set()
        """Where tensors lie into which an unknown value was written."""

    def fake(self, real: torch.Tensor) -> torch.Tensor:
        """A fake tensor like *real*, the same one whenever the same is asked for; its values are not known."""
        fake: torch.Tensor = self.fakes.from_tensor(real)
        self._alive[id(fake)] = fake
        return fake

    def tell(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Lets *fake* have the values of *real*, which stays as it is whatever is written into *fake*."""
        if self._may_keep(real):
            with modes_off(), torch.no_grad():
                self._values[fake] = real.detach().clone()

    def some_fake_is_left(self) -> bool:
        """Whether anything still holds a fake tensor that this one made, or an operator inside."""
        return bool(self._alive)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._dispatched(func, args, kwargs or {})
        for one in _tensors(out):
            self._alive[id(one)] = one
        return out

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        flat, spec = tree_flatten((args, kwargs))
        reals = self._reals_of(func, flat)
        shape = SHAPES.get(func)
        try:
            out = func(*args, **kwargs) if shape is None else shape(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if reals is None:
                out = self._selected(func, args)
                if out is None:
                    raise
                return out
            real_args, real_kwargs = tree_unflatten(reals, spec)
            with modes_off():
                real = func(*real_args, **real_kwargs)
            out = tree_map_only(torch.Tensor, self.fakes.from_tensor, real)
            self._keep(out, real)
            return out
        if reals is None or not all(self._may_keep(item) for item in _tensors(out)):
            self._forget_written(func, args, kwargs)
            return out
        real_args, real_kwargs = tree_unflatten(reals, spec)
        try:
            with modes_off():
                real = func(*real_args, **real_kwargs)
            self._keep(out, real)
        except Exception:  # values that fit no more, as those of an example that was never filled in
            self._forget_written(func, args, kwargs)
        return out

    def _selected(self, func: Any, args: Any) -> torch.Tensor | None:
        """What a mask that is known selects of a tensor that is not; None where it is something else."""
        if func is torch.ops.aten.masked_select.default:
            source, mask = args
            selects = self._value_of(mask)
            if selects is None:
                return None
            with modes_off():
                shape = torch.broadcast_shapes(source.shape, mask.shape)  # type: ignore[no-untyped-call]
                count = int(selects.expand(shape).sum())
            chosen: torch.Tensor = source.new_empty(count)
            return chosen
        if func is not torch.ops.aten.index.Tensor:
            return None
        places: list[torch.Tensor | None] = []
        for index in args[1]:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                places.append(index)
                continue
            mask = self._value_of(index)
            if mask is None:
                return None
            with modes_off():
                found = mask.nonzero(as_tuple=True)
            places += [self.fakes.from_tensor(place) for place in found]
        result: torch.Tensor = func(args[0], places)
        return result

    def _value_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        value: torch.Tensor | None = self._values.get(tensor)
        return None if value is None or storage_number(value) in self._unknown else value

    def _reals_of(self, func: Any, flat: list[Any]) -> list[Any] | None:
        """The arguments with values in the place of fake tensors; None where one is not known."""
        if not isinstance(func, OpOverload) or torch.Tag.nondeterministic_seeded in func.tags:
            return None
        reals = []
        for item in flat:
            if isinstance(item, torch.Tensor):
                if item not in self._values and not isinstance(item, FakeTensor):
                    self.tell(item, item)  # a constant of the model's, which writes must not reach
                item = self._value_of(item)
                if item is None:
                    return None
            elif isinstance(item, torch.device) and item.type == "meta":
                return None
            reals.append(item)
        return reals

    def _keep(self, fake: Any, real: Any) -> None:
        for one, other in zip(_tensors(fake), _tensors(real), strict=True):
            if isinstance(one, FakeTensor) and not isinstance(other, FakeTensor) and self._may_keep(other):
                self._values[one] = other

    def _forget_written(self, func: Any, args: Any, kwargs: Any) -> None:
        """What *func* wrote into is known no more, nor is what shares its memory."""
        schema = schema_if_any(func)  # an operator of higher order has none, and writes into nothing
        if schema is None or not schema.is_mutable:
            return
        for place, argument in enumerate(schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            for item in _tensors(value):
                if (real := self._values.get(item)) is not None:
                    self._unknown.add(storage_number(real))

    @staticmethod
    def _may_keep(tensor: torch.Tensor) -> bool:
        """Whether it is a plain tensor of few elements: a subclass's values are not its elements alone."""
        if not isinstance(tensor, FakeTensor) and (
            type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type == "meta"
        ):
            return False
        return not tensor.is_nested and tensor.layout is torch.strided and tensor.numel() <= LARGEST


def _tensors(value: Any) -> list[torch.Tensor]:
    return [item for item in tree_flatten(value)[0] if isinstance(item, torch.Tensor)]


def _grouped_product(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``_grouped_mm``'s result: torch's own shape function takes bfloat16 alone, its kernels take other dtypes."""
    if first.dim() == 2 and second.dim() == 2:
        groups = 1 if offs is None else int(offs.shape[0])
        shape = [groups, first.shape[0], second.shape[1]]
    elif first.dim() == 3 and second.dim() == 3:
        shape = [first.shape[0], first.shape[1], second.shape[2]]
    elif second.dim() == 3:
        shape = [first.shape[0], second.shape[2]]
    else:
        shape = [first.shape[1], second.shape[1]]
    return first.new_empty(shape, dtype=out_dtype or first.dtype)


SHAPES: dict[Any, Callable[..., Any]] = (
    {torch.ops.aten._grouped_mm.default: _grouped_product} if hasattr(torch.ops.aten, "_grouped_mm") else {}
)
"""By operator, what works out its result where torch's own shape function refuses what its kernels take."""
