"""What a formula is, what it answers, how one is bound to an operator's schema, and what else that says of a call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from lightning_flops.measure.torch_private.needed import OpOverload, is_composite, is_fake, modes_off, schema_of

Arguments = tuple[Any, ...]
Keywords = Mapping[str, Any]


class Work(NamedTuple):
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
    return {name if "::" in name else f"aten::{name}": Rule(flops, *rest, **others) for name in names.split()}


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


def bytes_of(value: Any) -> int:
    """Bytes of a tensor, or of the tensors in a list, tuple or dict; 0 for anything else."""
    if isinstance(value, Tensor):
        try:
            return int(value.nbytes)
        except (RuntimeError, TypeError):
            return 0  # a sparse or opaque layout, or a subclass's
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    return sum(map(bytes_of, value.values())) if isinstance(value, dict) else 0


def dtype_of_first_tensor(args: Arguments, kwargs: Keywords, out: Any) -> torch.dtype:
    """Dtype of the first floating-point tensor given, else made, else of any tensor, else torch's default dtype."""
    dtypes = [tensor.dtype for tensor in tensors_in((*args, *kwargs.values(), out))]
    floats = (dtype for dtype in dtypes if dtype.is_floating_point)
    dtype = next(floats, dtypes[0] if dtypes else torch.get_default_dtype())
    return ARITHMETIC.get(dtype, dtype)


@functools.cache
def dtype_name(dtype: torch.dtype | str) -> str:
    """Name of a dtype as records have it: ``bfloat16``; one name for all 8-bit floats, one for all 4-bit ones."""
    name = str(dtype).removeprefix("torch.")
    return next((narrow for narrow in ("float8", "float4") if name.startswith(narrow)), name)


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


def bind(rule: Rule, schema: Any) -> tuple[Formula, DtypeRule]:
    """The rule's formula and dtype for calls of one overload.

    Raises:
        LookupError: the schema lacks an argument the rule reads (an overload or a torch version with another shape).
    """
    positional = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    sources = list[tuple[int, str]]()
    for names in rule.arguments.split():
        name = next((one for one in names.removesuffix("?").split("|") if one in defaults or one == RESULT), "")
        if not (name or names.endswith("?")):
            raise LookupError(f"{schema.name} has no argument {names!r}")
        # The dispatcher hands positional arguments over by position, a caller of our own formula may not.
        sources.append((positional.index(name) if name in positional else sys.maxsize, name))

    def read(args: Arguments, kwargs: Keywords, out: Any, count: int | None = None) -> list[Any]:
        named = {RESULT: out, **kwargs}
        return [args[at] if len(args) > at else named.get(name, defaults.get(name)) for at, name in sources[:count]]

    def compute(args: Arguments, kwargs: Keywords, out: Any) -> int | Work:
        values = read(args, kwargs, out)
        answer = rule.flops(*values)
        operand = values[0] if isinstance(values[0], Tensor) else next(tensors_in((values[0],)), None)
        if isinstance(answer, Work) or operand is None or not operand.dtype.is_complex:
            return answer
        # (a + bi)(c + di) is four real products, and as many sums with what it is added to.
        return 4 * answer

    def dtype_of(args: Arguments, kwargs: Keywords, out: Any) -> torch.dtype:
        (value,) = read(args, kwargs, out, 1)
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


#: Namespaces that torch itself fills.
TORCH_NAMESPACES = frozenset(
    "aten prim prims profiler quantized _quantized quantized_decomposed quantization sparse inductor "
    "inductor_prims _inductor_test mkl mkldnn mkldnn_prepacked onednn prepacked rngprims static_runtime "
    "streams symm_mem fsdp ao bucketing c10d _c10d_functional _c10d_functional_autograd c10d_functional "
    "_dtensor cplib debugprims export flex_lib onnx".split()
)

#: In-place operators that write their first argument without reading it.
_OVERWRITING = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_ eye "
    "trunc_normal_ _foreach_copy_ _foreach_zero_".split()
)

_ALLOCATING = frozenset(
    "empty empty_like empty_strided empty_permuted empty_quantized _empty_affine_quantized new_empty "
    "new_empty_strided lift_fresh".split()
)
#: Operators that move no tensor's data: they make a view, an unfilled tensor, or read its shape.
_NO_TRAFFIC = _ALLOCATING | frozenset(
    "_unsafe_view lift detach alias is_same_size size stride numel dim sym_size "
    "sym_stride sym_numel sym_storage_offset is_contiguous is_strides_like_format set_ resize_ resize_as_ "
    "_resize_output_ _local_scalar_dense _nested_tensor_size _nested_tensor_strides _nested_get_values "
    "_nested_tensor_storage_offsets _nested_view_from_jagged _nested_get_offsets _nested_get_lengths "
    "_nested_get_jagged_dummy device layout wait_tensor".split()
)

#: Operators that read of their first argument only what they put out.
_SELECTING = frozenset("embedding index index_select gather take take_along_dim select_copy slice_copy".split())

COPYING = frozenset({"clone", "_to_copy"})  #: Operators that compute nothing of what they read.

READS_NUMBER = "_local_scalar_dense"  #: Behind ``Tensor.item``, and wherever else a tensor stands for a number.
#: What decides the size of a call's result, or what it costs, where torch may not say so: values always, numbers that
#: are read, a mask among indexes.
_SIZED_BY: Mapping[str, str] = {
    **dict.fromkeys(
        "_pack_padded_sequence _nested_tensor_from_mask _nested_tensor_from_tensor_list _nested_view_from_jagged "
        "_to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc".split(),
        "values",
    ),
    READS_NUMBER: "number",
    "index": "mask",
}


def makes_views(operator: Any) -> bool:
    """Whether all that the operator returns are views of what it is given, and it writes nothing."""
    schema = schema_of(operator)
    aliases = [value.alias_info for value in schema.returns]
    written = any(value.alias_info is not None and value.alias_info.is_write for value in schema.arguments)
    return bool(aliases) and not written and all(alias is not None and not alias.is_write for alias in aliases)


class Operator:
    """What is known of an overload of an operator, or of what has no schema: one of higher order, a user's function.

    Unknown as a whole, an operator may be made of others, which reach a dispatch mode undecomposed only where
    autograd's keys are off, as in inference mode.
    """

    keywords: tuple[str, ...] | None = None  #: What a call reads by name; None: whatever it is given so.
    #: Places of the arguments that a call writes which returns nothing, as of lists of tensors.
    writes: tuple[int, ...] = ()
    sized_by = ""  #: What may decide the size of a call's result: ``values``, a ``number``, a ``mask``, a ``layout``.
    moves_nothing = looks_inside = False

    def __init__(
        self,
        name: str,
        kind: Literal["formula", "free", "unknown"],
        compute: Formula = no_flops,
        dtype_of: DtypeRule = dtype_of_first_tensor,
        estimate: str = "",
        *,
        function: Any = None,
    ) -> None:
        self.name, self.short = name, name.rpartition(".")[2]  #: Without overload, such as ``aten.mm``.
        self.kind, self.counted = kind, kind == "formula"
        self.compute, self.dtype_of = compute, dtype_of
        #: Source of the formula where it is an estimate, such as ``5 N log2 N for a complex FFT``; else empty.
        self.estimate = estimate
        self.function = function
        if isinstance(function, OpOverload):
            self._read(schema_of(function))
        if self.counted:
            self.sized_by = self.sized_by or "layout"
        self.counts = bool(not self.moves_nothing or self.sized_by)  #: Whether anything of a call is counted.
        self.allocates = self.counts or self.short in _ALLOCATING

    def _read(self, schema: Any) -> None:
        """What the *schema* says of a call."""
        taken = schema.arguments
        written = [place for place, one in enumerate(taken) if one.alias_info is not None and one.alias_info.is_write]
        self.keywords = tuple(one.name for at, one in enumerate(taken) if one.kwarg_only and at not in written)
        if not schema.returns:
            # Fused optimizers may write gradients, too, and do so only where these are scaled.
            self.writes = tuple(at for at in written if taken[at].name != "grads")
        is_dynamic = torch.Tag.dynamic_output_shape in self.function.tags
        self.sized_by = _SIZED_BY.get(self.short, "values" if is_dynamic else "")
        # What is made of others, as ``to`` and ``reshape``, may copy where its schema speaks of a view.
        is_view = makes_views(self.function) and not is_composite(self.function)
        makes_no_data = not self.writes and (not schema.returns or is_view)
        self.moves_nothing = self.kind == "free" and (self.short in _NO_TRAFFIC or makes_no_data)
        of_others = schema.name.partition("::")[0] not in TORCH_NAMESPACES
        self.looks_inside = of_others if self.counted else self.kind == "unknown" or is_composite(self.function)

    def is_sized_by_values(self, args: Arguments) -> bool:
        """Whether numbers in a call's tensors decide the size of its result, or what it costs."""
        if self.sized_by == "number":  # a whole one may become a size
            return not (args[0].dtype is torch.bool or args[0].is_floating_point() or args[0].is_complex())
        if self.sized_by == "mask":
            return any(one.dtype in (torch.bool, torch.uint8) for one in tensors_in(args[1:2]))
        sparse = (isinstance(one, Tensor) and one.layout is not torch.strided for one in args)
        return self.sized_by == "values" or any(sparse)

    def moved(self, args: Arguments, kwargs: Keywords, out: Any) -> tuple[int, int]:
        """Bytes of the tensors that a call reads, and of those that it writes."""
        written = sum(bytes_of(args[at]) for at in self.writes if at < len(args)) if self.writes else bytes_of(out)
        names = kwargs if self.keywords is None else self.keywords
        read = bytes_of(args[1:] if self.short in _OVERWRITING else args)
        read += bytes_of([kwargs.get(name) for name in names])
        if self.short in _SELECTING and args:
            read -= max(0, bytes_of(args[0]) - written)
        return read, written
