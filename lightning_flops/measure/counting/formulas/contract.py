"""What a formula is, what it answers, and how one is bound to an operator's schema."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_flops.measure.torch_private.needed import is_fake, modes_off

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of one call of an operator, where a single number does not say them."""

    flops: int  #: Model FLOPs, which belong to the running phase; attention over the full score matrix.
    recompute: int = 0  #: FLOPs with which a fused attention's backward repeats a part of its forward.
    #: FLOPs of ``flops + recompute`` that belong to score-matrix entries the kernel's mask rules out. Exact for the
    #: mask's shape, rectangular masks and sliding windows included. A kernel skips whole tiles only, so what it
    #: executes is a little more than ``flops + recompute - skipped``.
    skipped: int = 0
    causal: bool = False  #: Whether the call was flagged causal, so that ``causal_attention="half"`` halves it.
    by_values: bool = False  #: Numbers in the call's tensors decide the FLOPs, as the lengths of packed sequences do.


#: FLOPs of one call, from its positional arguments, its keyword arguments and its result; a multiply-add is two.
#: The arguments are the dispatcher's: in the schema's order, trailing defaults left out.
Formula = Callable[[Arguments, Keywords, Any], "int | Work"]

DtypeRule = Callable[[Arguments, Keywords, Any], torch.dtype]  #: The dtype in which one call's arithmetic runs.


class Unreadable(ValueError):
    """A formula needs numbers that the call's tensors do not show (fake tensors, a CUDA graph being captured)."""


RESULT = "->"  #: Stands for the call's result where a rule lists the arguments its formula reads.

#: Real multiply-adds in a complex one: (a + bi)(c + di) is four products, and as many sums with what it is added to.
COMPLEX_PRODUCT = 4


@dataclass(frozen=True, slots=True)
class Rule:
    """How the FLOPs of one operator, in all its overloads, follow from its arguments."""

    #: Takes the values of *arguments*, in that order; a number that it answers is that of real multiply-adds.
    flops: Callable[..., int | Work]
    #: Schema names of what *flops* reads: ``a|b`` is the first of these that the schema has, ``RESULT`` the result. A
    #: name that ends in ``?`` reads None where the schema has no such argument. The first value gives the dtype.
    arguments: str
    estimate: str = ""  #: Where the leading terms come from, when they are an estimate; empty for an exact count.


def rules(names: str, flops: Callable[..., int | Work], *rest: Any, **others: Any) -> dict[str, Rule]:
    """One ``Rule`` under each of *names*, those without a namespace in ``aten``."""
    rule = Rule(flops, *rest, **others)
    return {name if "::" in name else f"aten::{name}": rule for name in names.split()}


#: The dtype that a peak is known for: a complex number's parts, a quantized number's integer.
ARITHMETIC = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.qint8: torch.int8,
    torch.quint8: torch.int8,
    torch.uint8: torch.int8,
}


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among *values*, lists and tuples searched one level deep."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, Tensor))


def dtype_of_first_tensor(args: Arguments, kwargs: Keywords, out: Any) -> torch.dtype:
    """Dtype of the first floating-point tensor given, else made, else of any tensor, else torch's default dtype."""
    dtypes = [tensor.dtype for tensor in tensors_in((*args, *kwargs.values(), out))]
    floats = (dtype for dtype in dtypes if dtype.is_floating_point)
    dtype = next(floats, dtypes[0] if dtypes else torch.get_default_dtype())
    return ARITHMETIC.get(dtype, dtype)


def whole_flops(answer: Any) -> int:
    """A formula's answer as an int.

    Raises:
        ValueError: it is no whole number, or negative.
    """
    flops = int(answer)
    if flops != answer or flops < 0:
        raise ValueError(f"it gave {answer}, and FLOPs are whole numbers, and not negative")
    return flops


def no_flops(args: Arguments, kwargs: Keywords, out: Any) -> int:
    """The FLOPs of a free operator: none."""
    return 0


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known about an operator."""

    name: str  #: Without overload, such as ``aten.mm``.
    kind: Literal["formula", "free", "unknown"]
    compute: Formula = no_flops  #: Zero for free and unknown operators.
    dtype_of: DtypeRule = dtype_of_first_tensor
    #: Source of the formula where it is an estimate, such as ``5 N log2 N for a complex FFT``; else empty.
    estimate: str = ""
    #: Unknown as a whole, but made of other operators, which ``op.decompose(*args, **kwargs)`` runs on plain tensors.
    #: They reach a dispatch mode undecomposed only where autograd's keys are off, as in inference mode.
    composite: bool = False


def _reader(schema: Any, names: str) -> Callable[[Arguments, Keywords, Any], Any]:
    """Reads an argument, or the result, of a call of the operator with this *schema*.

    Raises:
        LookupError: the schema has no argument of any of these *names*.
    """
    if names == RESULT:
        return lambda args, kwargs, out: out
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    name = next((name for name in names.removesuffix("?").split("|") if name in defaults), "")
    if not name and not names.endswith("?"):
        raise LookupError(f"{schema.name} has no argument {names!r}")
    default = defaults.get(name)
    # The dispatcher hands positional arguments over by position, a caller of our own formula may not.
    place = positional.index(name) if name in positional else sys.maxsize
    return lambda args, kwargs, out: args[place] if len(args) > place else kwargs.get(name, default)


def bind(rule: Rule, schema: Any) -> tuple[Formula, DtypeRule]:
    """The rule's formula and dtype for calls of one overload.

    Raises:
        LookupError: the schema lacks an argument the rule reads (an overload or a torch version with another shape).
    """
    readers = [_reader(schema, name) for name in rule.arguments.split()]
    first = readers[0]

    def compute(args: Arguments, kwargs: Keywords, out: Any) -> int | Work:
        values = [read(args, kwargs, out) for read in readers]
        answer = rule.flops(*values)
        operand = values[0] if isinstance(values[0], Tensor) else next(tensors_in((values[0],)), None)
        if isinstance(answer, Work) or operand is None or not operand.dtype.is_complex:
            return answer
        return COMPLEX_PRODUCT * answer

    def dtype_of(args: Arguments, kwargs: Keywords, out: Any) -> torch.dtype:
        value = first(args, kwargs, out)
        if isinstance(value, Tensor):
            return ARITHMETIC.get(value.dtype, value.dtype)
        return dtype_of_first_tensor((value, *args), kwargs, out)

    return compute, dtype_of


def host_integers(tensor: Tensor) -> list[int]:
    """Values of a small integer tensor, such as sequence offsets.

    Raises:
        Unreadable: the tensor has no values (fake, meta, functional), or reading it would break a CUDA graph capture.
    """
    if tensor.device.type == "meta" or is_fake(type(tensor)):
        raise Unreadable("its lengths are values of a tensor that holds none")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unreadable("its lengths cannot be read while a CUDA graph is captured")
    with modes_off():
        return [int(value) for value in tensor.detach().reshape(-1).tolist()]
