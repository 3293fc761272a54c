"""What a call in a trace cost, by the counter's own formulas.

A trace with ``record_shapes`` has what *meta* tensors are made of, and the other arguments; torch itself works out the
shape of the result. A call that lacks what its formula asks for is listed instead of counted.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn

import torch

from lightning_flops.measure.counting.formulas.contract import Unreadable, Work, bytes_of, dtype_name, tensors_in
from lightning_flops.measure.counting.formulas.registry import lookup, name_says_flops
from lightning_flops.measure.torch_private.needed import is_composite, overloads_named, schema_of
from lightning_flops.trace.columns import RecordedInputs, RecordedWork

_NAME = re.compile(r"\w+::\w+")

#: What C++ calls the dtypes, in lower case: several compilers differ in the words, and old files in their case.
_DTYPES: Mapping[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::half": torch.float16,
    "c10::complex<float>": torch.complex64,
    "c10::complex<double>": torch.complex128,
    "c10::complex<c10::half>": torch.complex32,
    **{
        f"c10::{name}": getattr(torch, name)
        for name in "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu".split()
        if hasattr(torch, name)
    },
    **dict.fromkeys(("long int", "long", "__int64"), torch.int64),
    "int": torch.int32,
    **dict.fromkeys(("short int", "short"), torch.int16),
    **dict.fromkeys(("signed char", "char"), torch.int8),
    "unsigned char": torch.uint8,
    "bool": torch.bool,
}

_TENSOR_LISTS = ("tensorlist", "tensor[]")


class _NotWritten:
    """Stands for an argument that the file does not give. Whatever a formula asks of it ends the counting."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *_: Any) -> NoReturn:
        raise Unreadable(f"{self._what} is not in the file")

    def __getattr__(self, name: str) -> NoReturn:
        self._refuse()

    __bool__ = __int__ = __float__ = __index__ = __len__ = __iter__ = __getitem__ = __eq__ = __hash__ = _refuse


def recorded_work(operator: str, inputs: RecordedInputs) -> RecordedWork:
    """What a call of *operator* cost, by the formulas of the counter. Nothing that stands in a file makes it raise."""
    name = operator.replace("::", ".", 1)
    if _NAME.fullmatch(operator) is None:
        return RecordedWork(role="composite", operator=name)  # a scope or a node of autograd
    types = [str(one).lower() for one in inputs.types]
    found = _overloads(operator, tuple(types))
    if not found:
        return RecordedWork(
            role="unknown",
            operator=name,
            may_have_flops=_may_multiply(name, types),
            reason=(
                "this torch has an operator of this name with other arguments, which its formula cannot read"
                if overloads_named(operator)
                else "this torch has no such operator, and no formula is known for it"
            ),
        )
    works = (_work(name, types, inputs, one) for one in found)
    first = next(works)
    return first if not first.reason else next((work for work in works if not work.reason), first)


def _work(name: str, types: Sequence[str], inputs: RecordedInputs, function: Any) -> RecordedWork:
    """What a call cost if it was one of this overload."""
    composite, entry, schema = is_composite(function), lookup(function), schema_of(function)
    if entry.kind != "formula":
        unknown = entry.kind == "unknown"
        return RecordedWork(
            role="composite" if composite else entry.kind,
            operator=name,
            may_have_flops=unknown and _may_multiply(name, types),
            reason="it has no formula" if unknown else "",
        )
    try:
        # The last arguments are the call's: TorchScript records all that its interpreter has on the stack.
        start = max(0, len(types) - len(schema.arguments))
        dtype = next((_DTYPES[one] for one in types[start:] if one in _DTYPES), None)
        values = {one.name: _value(one, place, inputs, dtype) for place, one in enumerate(schema.arguments, start)}
        kwargs = {one.name: values.pop(one.name) for one in schema.arguments if one.kwarg_only}
        args = tuple(values.values())
        out = _result(function, args, kwargs)
        answer = entry.compute(args, kwargs, out)
        work = answer if isinstance(answer, Work) else Work(answer)
        name_of_dtype = dtype_name(entry.dtype_of(args, kwargs, out))
    except Exception as error:  # a formula on shapes that no torch has written may raise anything
        known = isinstance(error, Unreadable)
        why = str(error) if known else f"its formula cannot read these shapes ({type(error).__name__})"
        return RecordedWork(role="composite" if composite else "unread", operator=name, may_have_flops=True, reason=why)
    return RecordedWork(
        role="composite" if composite else "counts",
        operator=name,
        dtype=name_of_dtype,
        flops=work.flops,
        recompute=work.recompute,
        skipped=work.skipped,
        bytes=None if isinstance(out, _NotWritten) else bytes_of([*tensors_in((*args, *kwargs.values(), out))]),
    )


@lru_cache(maxsize=4096)
def _overloads(name: str, types: tuple[str, ...]) -> tuple[Any, ...]:
    """What a call with arguments of these types can be, likeliest first."""
    overloads = overloads_named(name)
    found = [one for one in overloads if _takes(schema_of(one), types)]
    # What is left over of a call by TorchScript stands before its arguments.
    found.sort(key=lambda one: -len(schema_of(one).arguments))
    if not found and overloads and (lookup(overloads[0]).kind != "formula" or is_composite(overloads[0])):
        found = overloads[:1]  # a formula would take arguments of another version of torch for those that it knows
    return tuple(found)


def _takes(schema: Any, types: Sequence[str]) -> bool:
    """Whether a call whose last arguments are of these types can be one of this overload."""
    count = len(schema.arguments)
    own = types[len(types) - count :] if 0 < count <= len(types) else types
    return len(own) == count and all(
        _fits(str(argument.type), written) for argument, written in zip(schema.arguments, own, strict=True)
    )


def _fits(declared: str, written: str) -> bool:
    if declared in ("Tensor", "Optional[Tensor]"):
        return written in _DTYPES or written == "" or written.startswith("c10::")
    if "Tensor" in declared:
        return written in _TENSOR_LISTS or written in ("", "genericlist")
    # Old files write a plain number's type with a capital, which is lost here.
    return written not in _TENSOR_LISTS and not written.startswith("c10::")


def _may_multiply(name: str, types: Sequence[str]) -> bool:
    return name_says_flops(name.partition(".")[2]) or any(
        _DTYPES[one].is_floating_point or _DTYPES[one].is_complex for one in types if one in _DTYPES
    )


def _value(argument: Any, place: int, inputs: RecordedInputs, of_lists: torch.dtype | None) -> Any:
    """The argument at a *place* of a call; a tensor is a meta tensor. Those of a list are *of_lists*."""
    declared, written = str(argument.type), str(_at(inputs.types, place) or "").lower()
    missing = _NotWritten(f"the argument {argument.name}")
    if "Tensor" in declared:
        return _tensors(declared, written, place, inputs, of_lists, missing)
    text = None if inputs.concrete is None else _at(inputs.concrete, place)
    if isinstance(text, str) and text:
        with suppress(ValueError, SyntaxError, RecursionError, MemoryError):
            return ast.literal_eval(text)
        return missing
    if not written and declared.startswith("Optional"):
        return None
    # What a result is scaled by: no shape and no count depends on it.
    return argument.default_value if declared == "number" and argument.default_value is not None else missing


def _tensors(
    declared: str, written: str, place: int, inputs: RecordedInputs, of_lists: torch.dtype | None, missing: _NotWritten
) -> Any:
    dims, strides = _at(inputs.dims, place), None if inputs.strides is None else _at(inputs.strides, place)
    if declared in ("Tensor", "Optional[Tensor]"):
        is_none = declared != "Tensor" and not written
        return None if is_none else _tensor(dims, strides, _DTYPES.get(written), missing)
    if not isinstance(dims, Sequence) or written not in _TENSOR_LISTS:
        return missing
    # Their shapes are what formulas ask for.
    many = strides if isinstance(strides, Sequence) and len(strides) == len(dims) else [None] * len(dims)
    return [_tensor(one, its, of_lists, missing) for one, its in zip(dims, many, strict=True)]


def _at(values: Sequence[Any], place: int) -> Any:
    """What stands at *place*; an empty list beyond the end: torch 1.9 leaves the last ones out where they are empty."""
    return values[place] if place < len(values) else []


def _tensor(dims: Any, strides: Any, dtype: torch.dtype | None, missing: _NotWritten) -> Any:
    sizes = _sizes(dims)
    if sizes is None or dtype is None:
        return missing
    steps = torch.empty(sizes, device="meta").stride() if strides is None else _sizes(strides)
    if steps is None or len(steps) != len(sizes):
        return missing  # a sparse tensor: how many elements it stores is not written
    return torch.empty_strided(sizes, steps, dtype=dtype, device="meta")


def _sizes(dims: Any) -> list[int] | None:
    is_list = isinstance(dims, Sequence) and not isinstance(dims, str)
    return list(dims) if is_list and all(type(size) is int and size >= 0 for size in dims) else None


def _result(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """What the call returned, as meta tensors, by torch's own rules."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]
    try:
        with torch.no_grad():
            return function(*args, **kwargs)
    except Exception:  # an argument is not written, or the operator has no rule for shapes
        return _NotWritten("the shape of its result")
