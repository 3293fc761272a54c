"""Looks into operators that nothing is known about: runs a Python kernel so that the operators it calls are seen.

Below a dispatch mode torch calls an operator's kernel with the mode off, and with autocast, lazy conjugation and the
rest of the dispatcher's upper half switched off too. Here the kernel is called as it would be without any mode, and
what it calls is counted as if it stood in the user's own code.

What a kernel does beside torch's operators (a launch of a compiled kernel, a call into a library) stays out of sight.
``BodyWatch`` tells whether there was any: it follows the data from what the operator is given to what it returns, and
sees by their sums which tensors changed in between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_flops.instrument.counting.operator_facts import Operator, operator_of
from lightning_flops.instrument.torch_private.compiler import hide
from lightning_flops.instrument.torch_private.dispatch import DispatchMode, hands_over, out_of_all_sight
from lightning_flops.instrument.torch_private.kernels import keys_of_kernel
from lightning_flops.instrument.torch_private.operators import schema_of
from lightning_flops.instrument.torch_private.tensors import has_no_memory, storage_number

Origin = Literal["given", "made", "constant", "blank"]
"""Where the data of a storage comes from.

``given``: from the operator's arguments; ``made``: worked out from them by operators that were seen; ``constant``:
filled by a seen operator that read none of them; ``blank``: never filled, as far as was seen.
"""

_weak_storage: Callable[[torch.UntypedStorage], StorageWeakRef] = StorageWeakRef

_PLACING = frozenset("index_put_ index_copy_ scatter_ masked_scatter_ _foreach_copy_ _foreach_zero_".split())
"""In-place operators that fill what they are given, or a part of it, without reading it."""

_ORDINARY = (torch.Tensor, nn.Parameter)

_SHAPES_ONLY = frozenset(
    (
        "zeros_like ones_like full_like rand_like randn_like randint_like new_zeros new_ones new_full "
        "_new_zeros_with_same_feature_meta"
    ).split()
)
"""Operators that take a tensor for its shape and dtype alone."""

_COMMUNICATION = frozenset(("c10d", "_c10d_functional", "symm_mem"))
"""Namespaces of operators that fill tensors of which their schemas do not say so."""


def keys_of_python_kernel(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The dispatch key under which the operator's Python kernel for these arguments stands; None if there is none.

    None too where it takes more than ordinary tensors to choose the kernel.
    """
    devices = set()
    for tensor in _tensors((*args, *kwargs.values())):
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
            return None
        devices.add(tensor.device.type)
    if len(devices) > 1:
        devices.discard("cpu")  # single numbers may lie there
    if len(devices) != 1 or _is_being_captured(devices):
        return None
    return keys_of_kernel(function, devices.pop())


def _is_being_captured(devices: set[str]) -> bool:
    """Whether a CUDA graph takes up what runs: nothing of ours may be in it."""
    return "cuda" in devices and torch.cuda.is_current_stream_capturing()


class BodyWatch(DispatchMode):  # type: ignore[no-untyped-call]
    """Follows the data through the operators that one kernel calls.

    Args:
        args: what the kernel is called with.
        kwargs: the same by keyword.
    """

    supports_higher_order_operators = True

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: dict[int, Origin] = {}
        self._sums: dict[int, int] = {}
        """Of the storages that were filled, as they were when the operator that filled them was done."""
        self._written: set[int] = set()
        self._kept: list[StorageWeakRef] = []  # so that no other storage gets the same address
        self._whole = True
        self.ran = False
        """An operator was called that moves data."""
        try:
            for tensor in _tensors((*args, *kwargs.values())):
                self._set_origin(tensor, "given")
                self._remember(tensor)
        except Exception:  # whatever it is: the kernel runs, and counts for opaque
            self._whole = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As the counting mode has it."""
        return not hide(cls.__torch_dispatch__)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code stays compiled."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(hands_over(tensor_type) for tensor_type in types):
            return NotImplemented
        depends = False
        try:
            operator = operator_of(func)
            depends = self._reads(operator, args, kwargs)
        except Exception:
            self._whole = False
        out = func(*args, **kwargs)
        try:
            self._writes(operator, args, kwargs, out, depends)
        except Exception:
            self._whole = False
        return out

    def wrote(self, values: Iterable[Any]) -> None:
        """A kernel that has a formula of its own was given *values*: what it may have filled is accounted for."""
        try:
            for tensor in _tensors(values):
                self._set_origin(tensor, "made")
                self._remember(tensor)
                self._written.add(_storage_of(tensor))
        except Exception:
            self._whole = False

    def saw_everything(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> bool:
        """Whether all that the operator put out was worked out by operators that were seen."""
        try:
            made = [tensor for tensor in _tensors((out,)) if tensor.numel()]
            changed = [tensor for tensor in _tensors(_changed(function, args, kwargs)) if tensor.numel()]
            return (
                self._whole
                and bool(made or changed)
                and all(map(self._is_as_it_was, (*made, *changed)))
                and all(self._origin(tensor) in ("given", "made") for tensor in made)
                and all(
                    self._origin(tensor) in ("given", "made") and _storage_of(tensor) in self._written
                    for tensor in changed
                )
            )
        except Exception:
            return False

    def _reads(self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Whether the data that an operator is about to read comes from what the kernel was given."""
        short = operator.name.rpartition(".")[2]
        if operator.views or short in _SHAPES_ONLY:
            return False
        self.ran = True
        if operator.name.partition(".")[0] in _COMMUNICATION:
            return True
        skipped: tuple[Any, ...] = ()
        if operator.listed and not operator.splits and not operator.higher_order:
            skipped = _changed(operator.function, args, kwargs)  # may be blank: it is listed itself
        elif short in _PLACING and args:
            skipped = (args[0],)
        values = [
            *(args[place] for place in operator.reads if place < len(args)),
            *(kwargs[key] for key in operator.keyword_reads if key in kwargs),
        ]
        depends = False
        for tensor in _tensors(value for value in values if all(value is not one for one in skipped)):
            origin = self._origin(tensor)
            if origin == "blank" or (origin is None and tensor.numel() > 1) or not self._is_as_it_was(tensor):
                self._whole = False
            depends = depends or origin in ("given", "made")
        return depends

    def _writes(
        self, operator: Operator, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, depends: bool
    ) -> None:
        short = operator.name.rpartition(".")[2]
        if not operator.views:
            changed: Iterable[Any] = () if operator.higher_order else _changed(operator.function, args, kwargs)
            communicates = operator.name.partition(".")[0] in _COMMUNICATION
            if communicates:
                changed = (*args, *kwargs.values())
            for tensor in _tensors(changed):
                self._written.add(_storage_of(tensor))
                if depends:
                    self._set_origin(tensor, "made")
                elif self._origin(tensor) in (None, "blank"):
                    self._set_origin(tensor, "constant")
                if communicates:
                    self._sums.pop(_storage_of(tensor), None)  # it may go on after the call
                else:
                    self._remember(tensor)
        origin: Origin | None = "made" if depends else "constant"
        if operator.views:
            # A view has the storage of what it views; some make a copy where they must.
            first = next(_tensors(args), None)
            origin = "blank" if "empty" in short else None if first is None else self._origin(first)
            if short == "lift_fresh" and origin is None and first is not None and not first.is_floating_point():
                origin = "constant"  # torch.tensor([2, 0, 1])
        if origin is not None:
            for tensor in _tensors((out,)):
                if self._origin(tensor) is None:
                    self._set_origin(tensor, origin)
                    if origin != "blank":
                        self._remember(tensor)

    def _origin(self, tensor: torch.Tensor) -> Origin | None:
        return self._origins.get(_storage_of(tensor))

    def _set_origin(self, tensor: torch.Tensor, origin: Origin) -> None:
        storage = _storage_of(tensor)
        if storage not in self._origins:
            self._kept.append(_weak_storage(tensor.untyped_storage()))
        self._origins[storage] = origin

    def _remember(self, tensor: torch.Tensor) -> None:
        storage = _storage_of(tensor)
        self._sums[storage] = _sum_of(tensor)

    def _is_as_it_was(self, tensor: torch.Tensor) -> bool:
        """Whether nothing but the operators that were seen has changed the tensor's storage."""
        known = self._sums.get(_storage_of(tensor))
        return known is None or known == _sum_of(tensor)


def _sum_of(tensor: torch.Tensor) -> int:
    """A sum of the bits in a tensor's storage; one that is the same after its elements have changed places."""
    storage = tensor.untyped_storage()
    if tensor.is_meta or has_no_memory(tensor) or not storage.nbytes() or not storage.data_ptr():
        return 0  # there is no memory to look at
    dtype = torch.int32 if storage.nbytes() % 4 == 0 else torch.uint8
    with out_of_all_sight():
        bits = torch.empty(0, dtype=dtype, device=tensor.device)
        bits.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
        return int(bits.sum(dtype=torch.int64))


def _storage_of(tensor: torch.Tensor) -> int:
    """A number for a tensor's storage.

    Raises:
        TypeError: it is a tensor of a class that has others inside: its own storage has no memory.
    """
    if type(tensor) not in _ORDINARY:
        raise TypeError(f"a {type(tensor).__name__} has no storage of its own")
    return storage_number(tensor)


def _changed(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The arguments of which the operator's schema says that it changes them."""
    changed = []
    place = 0
    for argument in schema_of(function).arguments:
        written = argument.alias_info is not None and argument.alias_info.is_write
        if argument.kwarg_only:
            if written and argument.name in kwargs:
                changed.append(kwargs[argument.name])
            continue
        if written and place < len(args):
            changed.append(args[place])
        place += 1
    return tuple(changed)


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among *values*, lists, tuples and dicts searched too."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
        elif isinstance(value, dict):
            yield from _tensors(value.values())
