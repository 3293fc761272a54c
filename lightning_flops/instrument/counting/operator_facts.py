"""What the counter keeps about one operator, worked out once: how to call it, what it reads, what it spends."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import Parameter

from lightning_flops.instrument.counting.formulas import TORCH_NAMESPACES, Entry, lookup
from lightning_flops.instrument.torch_private.dispatch import fake_mode, is_fake
from lightning_flops.instrument.torch_private.operators import OpOverload, call_of, schema_of
from lightning_flops.instrument.torch_private.tensors import stored_values

_OVERWRITING = frozenset(
    (
        "copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_ set_ "
        "resize_ resize_as_ _resize_output_ eye trunc_normal_"
    ).split()
)
"""In-place operators that write their first argument without reading it."""

_NO_TRAFFIC = frozenset(
    (
        "empty empty_like empty_strided empty_permuted empty_quantized _empty_affine_quantized new_empty "
        "new_empty_strided _unsafe_view lift_fresh lift detach alias is_same_size size stride numel dim sym_size "
        "sym_stride sym_numel sym_storage_offset is_contiguous is_strides_like_format _local_scalar_dense set_ resize_ "
        "_nested_tensor_size _nested_tensor_strides _nested_tensor_storage_offsets _nested_get_values "
        "_nested_view_from_jagged _nested_get_offsets _nested_get_lengths _nested_get_jagged_dummy"
    ).split()
)
"""Operators that move no tensor's data: they make a view, an unfilled tensor, or read its shape."""

_SELECTING = frozenset("embedding index index_select gather take take_along_dim select_copy slice_copy".split())
"""Operators that read of their first argument only what they put out."""

_ONE_TENSOR = ("Tensor", "Optional[Tensor]")

_PLAIN_TYPES = (int, float, bool, complex, str, type(None), list, tuple, torch.Size, torch.Generator)

NO_TENSORS = frozenset((*_PLAIN_TYPES, torch.dtype, torch.device, torch.layout, torch.memory_format))
"""Types of arguments in which the hot path looks for no tensor; operators that take lists of tensors go another way."""


Way = Literal[0, 1, 2]
"""How the dispatch mode runs an operator: as most, and books it; or one of the next two."""

QUIET: Literal[1] = 1
"""As it is, and books nothing: it moves no data."""

OPENS: Literal[2] = 2
"""So that what runs inside it is seen, or its kernel in Python runs as it does without a dispatch mode."""


class Operator:
    """One overload of an operator, or a higher-order operator, as the counter's hot path needs it."""

    __slots__ = (
        "call",
        "compute",
        "counted",
        "dtype_of",
        "dtype_place",
        "entry",
        "function",
        "higher_order",
        "is_only_asked",
        "keyword_reads",
        "listed",
        "name",
        "reads",
        "reads_number",
        "selects",
        "sized_by_values",
        "special",
        "splits",
        "views",
        "way",
    )

    def __init__(self, function: Any, entry: Entry | None = None) -> None:
        entry = lookup(function) if entry is None else entry
        self.function = function  # keeps the object, and with it the id that it is found by
        self.entry = entry
        self.name = entry.name
        self.higher_order = not isinstance(function, OpOverload)
        self.call = call_of(function)
        self.counted = entry.kind == "formula"
        self.listed = entry.kind == "unknown"
        self.splits = self.listed and entry.composite
        self.compute = entry.compute
        self.dtype_of = entry.dtype_of
        self.dtype_place = entry.dtype_place
        short = entry.name.rpartition(".")[2]
        self.views = not self.higher_order and _views(function, short)
        moves_nothing = not self.higher_order and (self.views or not schema_of(function).returns)
        self.way: Way = 0
        self.sized_by_values = None if self.higher_order else _sized_by_values(function, short)
        self.reads_number = short == _READS_NUMBER
        self.is_only_asked = False
        if moves_nothing and not self.counted and not self.listed:
            self.is_only_asked = self.sized_by_values is not None
            self.way = 0 if self.is_only_asked else QUIET
        elif self.splits or (not self.higher_order and _may_have_python_kernel(function, entry)):
            self.way = OPENS
        self.selects = short in _SELECTING
        self.reads, self.keyword_reads = _reads(function, short, self.higher_order)
        # The hot path reads every tensor among the positional arguments, and none anywhere else.
        every = _tensor_places(function) if not self.higher_order else ()
        self.special = bool(
            self.higher_order
            or self.listed
            or self.selects
            or self.sized_by_values is not None
            or self.keyword_reads
            or every != self.reads
        )


_operators: dict[Any, Operator] = {}


def operator_of(function: Any) -> Operator:
    """What is kept about an operator: worked out once for all counters, anew when another formula was registered."""
    entry = lookup(function)
    operator = _operators.get(function)
    if operator is None or operator.entry is not entry:
        operator = _operators[function] = Operator(function, entry)
    return operator


def current_operators() -> dict[Any, Operator]:
    """What is kept about all operators that ran so far, by the function that each calls."""
    return {
        operator.call: operator
        for function, operator in list(_operators.items())
        if lookup(function) is operator.entry and operator.call is not function
    }


def _views(function: Any, short: str) -> bool:
    """Whether the operator moves no data: it makes a view, an unfilled tensor, or reads a shape."""
    returns = schema_of(function).returns
    return short in _NO_TRAFFIC or (
        bool(returns) and all(value.alias_info is not None and not value.alias_info.is_write for value in returns)
    )


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether the second argument, which are indexes, has a mask among them."""
    indexes = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(one, torch.Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indexes)


def _always(args: tuple[Any, ...]) -> bool:
    return True


def _is_whole(args: tuple[Any, ...]) -> bool:
    """Whether the first argument holds whole numbers, which may become sizes."""
    return not (args[0].dtype is torch.bool or args[0].is_floating_point() or args[0].is_complex())


_Predicate = Callable[[tuple[Any, ...]], bool]

_READS_NUMBER = "_local_scalar_dense"
"""The operator behind ``Tensor.item``, and wherever else a tensor stands for a number."""

_SIZED_BY_VALUES = frozenset(
    (
        "_pack_padded_sequence _nested_tensor_from_mask _nested_tensor_from_tensor_list _nested_view_from_jagged "
        "_to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc"
    ).split()
)
"""Operators of whose results torch does not say that numbers in tensors may decide their sizes."""


def _sized_by_values(function: Any, short: str) -> _Predicate | None:
    """Asks an operator's arguments whether numbers in tensors decide the size of its result; None: they never do.

    Torch says of most operators whether they may. A number that is read from a tensor may be such a size itself.
    """
    if short == _READS_NUMBER:
        return _is_whole
    if torch.Tag.dynamic_output_shape in function.tags:
        return _has_mask if short == "index" else _always
    return _always if short in _SIZED_BY_VALUES else None


def _may_have_python_kernel(function: Any, entry: Entry) -> bool:
    if entry.kind == "unknown":
        return True
    return entry.kind == "formula" and schema_of(function).name.partition("::")[0] not in TORCH_NAMESPACES


def _tensor_places(function: Any) -> tuple[int, ...]:
    """Positions of the arguments that are single tensors."""
    arguments = [argument for argument in schema_of(function).arguments if not argument.kwarg_only]
    return tuple(place for place, argument in enumerate(arguments) if str(argument.type) in _ONE_TENSOR)


def _reads(function: Any, short: str, higher_order: bool) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Positions and keywords of the arguments whose data the operator reads."""
    if higher_order:
        return tuple(range(32)), ()
    arguments = schema_of(function).arguments
    positional = [argument for argument in arguments if not argument.kwarg_only]
    places = tuple(
        place
        for place, argument in enumerate(positional)
        if "Tensor" in str(argument.type) and not (place == 0 and short in _OVERWRITING)
    )
    keywords = tuple(
        argument.name
        for argument in arguments
        if argument.kwarg_only
        and "Tensor" in str(argument.type)
        and not (argument.alias_info is not None and argument.alias_info.is_write)
    )
    return places, keywords


def bytes_of(value: Any) -> int:
    """Bytes of a tensor, or of the tensors in a list, tuple or dict; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        try:
            return int(value.nbytes)
        except (RuntimeError, TypeError):
            return _stored_bytes(value)
    if isinstance(value, (list, tuple)):
        return sum(bytes_of(item) for item in value)
    if isinstance(value, Mapping):
        return sum(bytes_of(item) for item in value.values())
    return 0


def _stored_bytes(tensor: torch.Tensor) -> int:
    try:
        values = stored_values(tensor) if tensor.layout is torch.sparse_coo else tensor.values()
        return int(values.numel()) * int(values.element_size())
    except (RuntimeError, TypeError, AttributeError):
        return 0  # an opaque layout, or a subclass's


def elements_of(value: Any) -> int:
    """Elements of a tensor, or of the tensors in a list or tuple; 0 for anything else."""
    if isinstance(value, torch.Tensor):
        try:
            return int(value.numel())
        except (RuntimeError, TypeError):
            return 0
    if isinstance(value, (list, tuple)):
        return sum(elements_of(item) for item in value)
    return 0


def needs_gradient(values: Any) -> bool:
    """Whether any tensor among *values*, lists searched too, requires a gradient."""
    for value in values:
        # The first test spares parameters the second one, which their class answers in Python.
        if value.__class__ is Parameter or isinstance(value, torch.Tensor):
            if value.requires_grad:
                return True
        elif isinstance(value, (list, tuple)) and needs_gradient(value):
            return True
    return False


@functools.cache
def dtype_name(dtype: torch.dtype | str) -> str:
    """Name of a dtype as records have it: ``bfloat16``; one name for all 8-bit floats, one for all 4-bit ones."""
    name = str(dtype).removeprefix("torch.")
    for narrow in ("float8", "float4"):
        if name.startswith(narrow):
            return narrow
    return name


def tf32_operators() -> Callable[[Operator], bool] | None:
    """Which operators the CUDA backend would run in TF32 when their tensors are float32, as its switches stand now.

    None when it would run none.
    """
    if not torch.cuda.is_available():
        return None
    # The older switches (allow_tf32, set_float32_matmul_precision) set these too; they raise when asked after these
    # were set on their own.
    backends: Any = torch.backends
    matmul = bool(backends.cuda.matmul.fp32_precision == "tf32")
    convolution = bool(backends.cudnn.conv.fp32_precision == "tf32")
    recurrent = bool(backends.cudnn.rnn.fp32_precision == "tf32")
    if not (matmul or convolution or recurrent):
        return None

    def runs_in_tf32(operator: Operator) -> bool:
        name = operator.name
        if "attention" in name:
            return False  # the fused kernels that take float32 multiply in float32
        if "conv" in name:
            return convolution
        if "rnn" in name:
            return recurrent
        return matmul

    return runs_in_tf32


def computes_on_fake_tensors(root: nn.Module | None) -> bool:
    """Whether the user runs the model on fake tensors, to learn its shapes or its FLOPs without the work."""
    if fake_mode() is not None:
        return True
    first = None if root is None else next(root.parameters(), None)
    return first is not None and (is_fake(type(first)) or is_fake(type(first.data)))
