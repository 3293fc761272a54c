"""What a formula is, what it answers, and how one is bound to an operator's schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, Literal

import torch

from lightning_flops.instrument.torch_private.dispatch import is_fake, out_of_sight

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    """What one call of an operator spends, where a single number does not say it."""

    flops: int
    """Model FLOPs, which belong to the running phase; attention over the full score matrix."""
    recompute: int = 0
    """FLOPs with which a fused attention's backward repeats a part of its forward."""
    causal_skipped: int = 0
    """FLOPs of ``flops + recompute`` that belong to score-matrix entries the kernel's mask rules out.

    Exact for the mask's shape, rectangular masks and sliding windows included. A kernel skips whole tiles only, so what
    it executes is a little more than ``flops + recompute - causal_skipped``.
    """
    causal: bool = False
    """Whether the call was flagged causal, so that ``causal_attention="half"`` halves it."""
    by_values: bool = False
    """Numbers in the call's tensors decide it, as the lengths of packed sequences do: another call of the same shapes
    may spend something else."""


Formula = Callable[[Arguments, Keywords, Any], "int | Work"]
"""FLOPs of one call, from its positional arguments, its keyword arguments and its result; a multiply-add is two.

The arguments are the dispatcher's: in the schema's order, trailing defaults left out.
"""

DtypeRule = Callable[[Arguments, Keywords, Any], torch.dtype]
"""The dtype in which one call's arithmetic runs."""

Kind = Literal["formula", "free", "unknown"]


class Unreadable(ValueError):
    """A formula needs numbers that the call's tensors do not show (fake tensors, a CUDA graph being captured)."""


RESULT = "->"
"""Stands for the call's result where a rule lists the arguments its formula reads."""


@dataclass(frozen=True, slots=True)
class Rule:
    """How the FLOPs of one operator, in all its overloads, follow from its arguments."""

    flops: Callable[..., int | Work]
    """Takes the values of *arguments*, in that order; or, when *arguments* is empty, ``(args, kwargs, out)`` itself."""
    arguments: tuple[str, ...] = ()
    """Schema names of what *flops* reads; ``RESULT`` is the call's result.

    A name that ends in ``?`` reads None where the schema has no such argument (an older torch, another overload).
    """
    dtype: str | torch.dtype | None = None
    """Argument whose dtype the arithmetic has, or that dtype itself; None: the first tensor's."""
    estimate: str = ""
    """Where the leading terms come from, when they are an estimate; empty for an exact count."""
    complex_factor: int = 1
    """How often what *flops* answers runs where the first tensor is complex; 1 where it has seen to that itself."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known about an operator."""

    name: str
    """Without overload, such as ``aten.mm``."""
    kind: Kind
    compute: Formula
    """Zero for free and unknown operators."""
    dtype_of: DtypeRule
    estimate: str = ""
    """Source of the formula where it is an estimate, such as ``5 N log2 N for a complex FFT``; else empty."""
    composite: bool = False
    """Unknown as a whole, but made of other operators: ``op.decompose(*args, **kwargs)`` runs exactly those.

    Such operators reach a dispatch mode undecomposed only where autograd's keys are off, as in inference mode. Plain
    tensors only: a nested tensor or another subclass may have a kernel of its own for the whole operator.
    """
    dtype_place: int | None = None
    """Position of the tensor that *dtype_of* goes by, where ``ARITHMETIC`` turns its dtype into the answer; or None."""


ARITHMETIC = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
    torch.qint8: torch.int8,
    torch.quint8: torch.int8,
    torch.uint8: torch.int8,
}


COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))

COMPLEX_PRODUCT = 4
"""Real multiply-adds in a complex one: (a + bi)(c + di) is four products, and as many sums with what it is added to."""


def arithmetic_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a peak is known for: a complex number's parts, a quantized number's integer."""
    return ARITHMETIC.get(dtype, dtype)


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among *values*, lists and tuples searched one level deep."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, torch.Tensor))


def dtype_of_first_tensor(args: Arguments, kwargs: Keywords, out: Any) -> torch.dtype:
    """Dtype of the first floating-point tensor given, else made, else of any tensor, else torch's default dtype."""
    any_dtype = None
    for tensor in tensors_in((*args, *kwargs.values(), out)):
        dtype = tensor.dtype
        if dtype.is_floating_point:
            return dtype
        any_dtype = any_dtype or dtype
    return torch.get_default_dtype() if any_dtype is None else arithmetic_of(any_dtype)


def whole_flops(answer: Any) -> int:
    """A formula's answer as an int.

    Raises:
        ValueError: it is not a whole number.
    """
    flops = int(answer)
    if flops != answer:
        raise ValueError(f"it gave {answer}, and FLOPs are whole numbers")
    return flops


def no_flops(args: Arguments, kwargs: Keywords, out: Any) -> int:
    """The FLOPs of a free operator: none."""
    return 0


def argument_reader(schema: Any, name: str) -> Formula | Callable[[Arguments, Keywords, Any], Any]:
    """Reads the argument *name* of a call of the operator with this *schema*; its default where the call leaves it out.

    Raises:
        LookupError: the schema has no argument of that name.
    """
    if name == RESULT:
        return lambda args, kwargs, out: out
    name, optional = name.removesuffix("?"), name.endswith("?")
    position = 0
    for argument in schema.arguments:
        if argument.name == name:
            break
        if not argument.kwarg_only:
            position += 1
    else:
        if optional:
            return lambda args, kwargs, out: None
        raise LookupError(f"{schema.name} has no argument {name!r}")
    default = argument.default_value

    def read_keyword(args: Arguments, kwargs: Keywords, out: Any) -> Any:
        return kwargs.get(name, default)

    def read(args: Arguments, kwargs: Keywords, out: Any) -> Any:
        # The dispatcher hands positional arguments over by position, a caller of our own formula may not.
        return args[position] if len(args) > position else kwargs.get(name, default)

    return read_keyword if argument.kwarg_only else read


def bind_formula(rule: Rule, schema: Any) -> Formula:
    """The rule's formula for calls of one overload.

    Raises:
        LookupError: the schema lacks an argument the rule reads (an overload or a torch version with another shape).
    """
    formula, factor = _bind_real(rule, schema), rule.complex_factor
    if factor == 1:
        return formula

    def times_factor(args: Arguments, kwargs: Keywords, out: Any) -> int | Work:
        flops = formula(args, kwargs, out)
        return flops if isinstance(flops, Work) or not _is_complex(args, kwargs, out) else factor * flops

    return times_factor


def _is_complex(args: Arguments, kwargs: Keywords, out: Any) -> bool:
    for tensor in tensors_in((*args, *kwargs.values(), out)):
        return tensor.dtype in COMPLEX
    return False


def _bind_real(rule: Rule, schema: Any) -> Formula:
    flops = rule.flops
    if not rule.arguments:
        return flops
    readers = [argument_reader(schema, name) for name in rule.arguments]

    def read_all(args: Arguments, kwargs: Keywords, out: Any) -> int | Work:
        return flops(*[read(args, kwargs, out) for read in readers])

    # Where positional arguments are all the formula reads, and the call gives them, they are picked at once.
    names = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    with_result = rule.arguments[-1] == RESULT
    wanted = rule.arguments[:-1] if with_result else rule.arguments
    if len(wanted) < 2 or not set(wanted) <= set(names):
        return read_all
    positions = [names.index(name) for name in wanted]
    pick, enough = itemgetter(*positions), max(positions) + 1

    def pick_and_result(args: Arguments, kwargs: Keywords, out: Any) -> int | Work:
        return flops(*pick(args), out) if len(args) >= enough else read_all(args, kwargs, out)

    def pick_all(args: Arguments, kwargs: Keywords, out: Any) -> int | Work:
        return flops(*pick(args)) if len(args) >= enough else read_all(args, kwargs, out)

    return pick_and_result if with_result else pick_all


def bind_dtype(rule: Rule, schema: Any) -> DtypeRule:
    """The rule's dtype for calls of one overload."""
    dtype = rule.dtype
    if dtype is None:
        return dtype_of_first_tensor
    if isinstance(dtype, torch.dtype):
        return lambda args, kwargs, out: dtype
    read = argument_reader(schema, dtype)
    position = _position(schema, dtype)
    arithmetic = ARITHMETIC

    def dtype_of(args: Arguments, kwargs: Keywords, out: Any) -> torch.dtype:
        try:
            own: torch.dtype = args[position].dtype
        except (AttributeError, IndexError):  # a list, nothing, or given by keyword
            value = read(args, kwargs, out)
            return dtype_of_first_tensor((value, *args), kwargs, out)
        return arithmetic.get(own, own)

    return dtype_of


def dtype_place(rule: Rule, schema: Any) -> int | None:
    """Position of the argument whose dtype the arithmetic has, where that is what ``bind_dtype`` goes by."""
    return _position(schema, rule.dtype) if isinstance(rule.dtype, str) else None


def _position(schema: Any, name: str) -> int:
    return [argument.name for argument in schema.arguments if not argument.kwarg_only].index(name)


def host_integers(tensor: torch.Tensor) -> list[int]:
    """Values of a small integer tensor, such as sequence offsets.

    Raises:
        Unreadable: the tensor has no values (fake, meta, functional), or reading it would break a CUDA graph capture.
    """
    if tensor.device.type == "meta" or is_fake(type(tensor)):
        raise Unreadable("its lengths are values of a tensor that holds none")
    if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
        raise Unreadable("its lengths cannot be read while a CUDA graph is captured")
    with out_of_sight():
        return [int(value) for value in tensor.detach().reshape(-1).tolist()]
