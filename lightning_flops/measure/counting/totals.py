"""What is known of an operator: its formula, the bytes that a call moves, what values decide; and sums of all calls."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_flops.measure.counting.formulas.contract import Entry
from lightning_flops.measure.counting.formulas.registry import TORCH_NAMESPACES, lookup, makes_views
from lightning_flops.measure.torch_private.needed import OpOverload, schema_of
from lightning_flops.records import OUTSIDE, FlopPhase, FlopRecord, OperatorCell, UncountedOperator
from lightning_flops.signals import words_of
from lightning_flops.units import package_logger

#: In-place operators that write their first argument without reading it.
_OVERWRITING = frozenset(
    "copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_ eye "
    "trunc_normal_ _foreach_copy_ _foreach_zero_".split()
)

_UNWRITTEN = "grads"  #: What fused optimizers may write, and write only where gradients are scaled.

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

#: The operator behind ``Tensor.item``, and wherever else a tensor stands for a number.
READS_NUMBER = "_local_scalar_dense"


class Operator:
    """One overload of an operator, or a higher-order operator, which has no schema."""

    keywords: tuple[str, ...] | None = None  #: What a call reads by name; None: whatever it is given so.
    #: Places of the arguments that a call writes which returns nothing, as of lists of tensors.
    writes: tuple[int, ...] = ()
    #: Asks a call's arguments whether numbers in tensors decide the size of its result; None: they never do.
    sized_by_values: Callable[[tuple[Any, ...]], bool] | None = None
    moves_nothing = looks_inside = False

    def __init__(self, function: Any, entry: Entry | None = None) -> None:
        self.function = function
        self.entry = entry = lookup(function) if entry is None else entry
        self.name, self.short = entry.name, entry.name.rpartition(".")[2]
        self.counted = entry.kind == "formula"
        if isinstance(function, OpOverload):
            self._read(schema_of(function))
        if self.counted and self.sized_by_values is None:
            self.sized_by_values = _has_sparse
        #: Whether anything of a call is counted.
        self.counts = not self.moves_nothing or self.sized_by_values is not None
        self.allocates = self.counts or self.short in _ALLOCATING

    def _read(self, schema: Any) -> None:
        """What the *schema* says of a call."""
        taken, kind = schema.arguments, self.entry.kind
        written = [place for place, one in enumerate(taken) if one.alias_info is not None and one.alias_info.is_write]
        self.keywords = tuple(one.name for at, one in enumerate(taken) if one.kwarg_only and at not in written)
        if not schema.returns:
            self.writes = tuple(at for at in written if taken[at].name != _UNWRITTEN)
        always = _always if torch.Tag.dynamic_output_shape in self.function.tags else None
        self.sized_by_values = _SIZED_BY_VALUES.get(self.short, always)
        makes_no_data = not self.writes and (not schema.returns or makes_views(self.function))
        self.moves_nothing = kind == "free" and (self.short in _NO_TRAFFIC or makes_no_data)
        of_others = schema.name.partition("::")[0] not in TORCH_NAMESPACES
        self.looks_inside = kind == "unknown" or (self.counted and of_others)

    def bytes_written(self, args: tuple[Any, ...], out: Any) -> int:
        """Bytes of the tensors that a call writes."""
        return sum(bytes_of(args[at]) for at in self.writes if at < len(args)) if self.writes else bytes_of(out)

    def bytes_read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], written: int) -> int:
        """Bytes of the tensors that a call reads, which puts out so many."""
        names = kwargs if self.keywords is None else self.keywords
        read = bytes_of(args[1:] if self.short in _OVERWRITING else args) + bytes_of(
            [kwargs.get(name) for name in names]
        )
        return read - max(0, bytes_of(args[0]) - written) if self.short in _SELECTING and args else read


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether the second argument, which are indexes, has a mask among them."""
    indexes = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else ()
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in indexes)


def _has_sparse(args: tuple[Any, ...]) -> bool:
    return any(isinstance(arg, Tensor) and arg.layout is not torch.strided for arg in args)


def _is_whole(args: tuple[Any, ...]) -> bool:
    """Whether the first argument holds whole numbers, which may become sizes."""
    return not (args[0].dtype is torch.bool or args[0].is_floating_point() or args[0].is_complex())


def _always(args: tuple[Any, ...]) -> bool:
    return True


#: Operators of whose results torch does not say that numbers in tensors may decide their sizes.
_SIZED_BY_VALUES: Mapping[str, Callable[[tuple[Any, ...]], bool]] = {
    **dict.fromkeys(
        "_pack_padded_sequence _nested_tensor_from_mask _nested_tensor_from_tensor_list _nested_view_from_jagged "
        "_to_sparse _to_sparse_csr _to_sparse_csc _to_sparse_bsr _to_sparse_bsc".split(),
        _always,
    ),
    READS_NUMBER: _is_whole,
    "index": _has_mask,
}


def operands(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What is the same for two calls of the operator of this *name* on the same memory, laid out in the same way."""
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    if any(hasattr(one, "fake_mode") for one in tensors):  # asking it for its memory gives it some
        return (name, object())
    try:
        return (name, *((one.data_ptr(), one.dtype, one.shape, one.stride()) for one in tensors))
    except (RuntimeError, NotImplementedError):  # a tensor without memory is like no other
        return (name, object())


def bytes_of(value: Any) -> int:
    """Bytes of a tensor, or of the tensors in a list, tuple or dict; 0 for anything else."""
    if isinstance(value, Tensor):
        try:
            return int(value.nbytes)
        except (RuntimeError, TypeError):
            return 0  # a sparse or opaque layout, or a subclass's
    if isinstance(value, (list, tuple)):
        return sum(map(bytes_of, value))
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    return 0


@functools.cache
def dtype_name(dtype: torch.dtype | str) -> str:
    """Name of a dtype as records have it: ``bfloat16``; one name for all 8-bit floats, one for all 4-bit ones."""
    name = str(dtype).removeprefix("torch.")
    return next((narrow for narrow in ("float8", "float4") if name.startswith(narrow)), name)


def tf32_operators() -> Callable[[str], bool] | None:
    """Which operators, by name, the CUDA backend would run in TF32 when their tensors are float32, as things stand.

    None without a CUDA device.
    """
    if not torch.cuda.is_available():
        return None
    # The older switches (allow_tf32, set_float32_matmul_precision) set these too; they raise when asked after these
    # were set on their own.
    backends: Any = torch.backends
    kinds = {"conv": backends.cudnn.conv, "rnn": backends.cudnn.rnn, "": backends.cuda.matmul}
    fast = {word: kind.fp32_precision == "tf32" for word, kind in kinds.items()}
    # The fused kernels that take float32 multiply in float32.
    return lambda name: "attention" not in name and next(on for word, on in fast.items() if word in name)


logger = package_logger(__name__)


@dataclass(slots=True)
class Cell:
    """What one operator cost in one module, phase and dtype."""

    calls: int = 0
    flops: int = 0
    skipped: int = 0
    bytes_read: int = 0
    bytes_written: int = 0

    def moves(self, written: int, read: int) -> None:
        """A call writes and reads so many bytes."""
        self.bytes_written += written
        self.bytes_read += read

    def add(self, other: Cell) -> None:
        """Adds what *other* has."""
        for name, amount in asdict(other).items():
            setattr(self, name, getattr(self, name) + amount)


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse, or of functorch: such a tensor stands for itself
        return id(tensor)


class Totals:
    """What was counted on all threads."""

    def __init__(self) -> None:
        #: Held by whoever adds to it: what fails meanwhile ends the counter, which asks for it again.
        self.lock = threading.RLock()
        self.flops: Counter[tuple[str, str]] = Counter()  # by phase and dtype
        self.calls: dict[str, int] = {}
        self.estimates: dict[str, str] = {}  # operators whose FLOPs are estimates, and where those come from
        #: By the name of a called module: its class, and its matrices, where nothing that is seen reads them.
        self.unread: dict[str, tuple[str, list[Any]]] = {}
        self._notes: dict[str, None] = {}
        self._failures: set[str] = set()
        self._cells: dict[tuple[str, FlopPhase, str, str], Cell] = {}
        #: What runs in no module, by the autograd node that is made, operator and dtype; then what of it is no forward.
        self._undecided: dict[tuple[int, str, str], Cell] = {}
        self._outside: dict[tuple[int, str, str], Cell] = {}
        self.divides = False  #: Whether it is asked what of that is a forward.
        self.made: int | None = None  #: The node that the call has made which is added next; None: it is in a module.
        self._uncounted: dict[str, list[Any]] = {}  # by operator: calls, modules, whether any call may have had FLOPs

    def cell(self, module: str, phase: FlopPhase, operator: str, dtype: str = "") -> Cell:
        """A cell, made if there is none; *dtype* is that of the arithmetic, none where no FLOPs are counted."""
        if module == OUTSIDE and phase == "forward" and self.made is not None:
            return self._undecided.setdefault((self.made, operator, dtype), Cell())
        return self._cells.setdefault((module, phase, operator, dtype), Cell())

    def decide(self, *, is_forward: bool) -> None:
        """Whether what ran in no module, backward or update since this was last said is a forward."""
        with self.lock:
            for key, cell in self._undecided.items():
                if is_forward:
                    self._cells.setdefault((OUTSIDE, "forward", *key[1:]), Cell()).add(cell)
                else:
                    self._outside.setdefault(key, Cell()).add(cell)
                    self.flops["forward", key[-1]] -= cell.flops
                    self.flops["outside", key[-1]] += cell.flops
            self._undecided.clear()

    def settle(self, ran: Set[int]) -> None:
        """Of what was in no forward, that is one which made a node that *ran* in a backward."""
        with self.lock:
            for (node, operator, dtype), cell in self._outside.items():
                phase: FlopPhase = "forward" if node in ran else "outside"
                self._cells.setdefault((OUTSIDE, phase, operator, dtype), Cell()).add(cell)
                self.flops["outside", dtype] -= cell.flops
                self.flops[phase, dtype] += cell.flops
            self._outside.clear()

    def called(self, name: str, module: nn.Module) -> None:
        """*module* is called: if it has no others inside, something that is seen has to read its matrices.

        In inference mode torch does not show every operator.
        """
        with self.lock:
            self.calls[name] = self.calls.get(name, 0) + 1
        if self.calls[name] > 1 or any(True for _ in module.children()) or torch.is_inference_mode_enabled():
            return
        # What is of a library's class may be kept elsewhere.
        own = (one for one in module.parameters(recurse=False) if type(one) is nn.Parameter)
        if matrices := [weakref.ref(one) for one in own if one.dim() > 1 and one.numel()]:
            self.unread[name] = type(module).__qualname__, matrices

    def read(self, name: str, tensors: Iterable[torch.Tensor], out: Iterable[torch.Tensor] = ()) -> None:
        """In the module of this name *tensors* were read to make *out*, which is no view of them."""
        seen = {_storage(one) for one in tensors}.difference(map(_storage, out))
        _, matrices = self.unread.get(name, ("", ()))
        if any(_storage(one) in seen for held in matrices if (one := held()) is not None):
            self.unread.pop(name, None)  # another thread may have

    def add(self, cell: Cell, phase: FlopPhase, dtype: str, flops: int, skipped: int) -> None:
        """Add FLOPs to a cell of *phase* and *dtype*."""
        cell.flops += flops
        cell.skipped += skipped
        self.flops[phase, dtype] += flops

    def list(self, operator: str, module: str, may_have_flops: bool) -> None:
        """List one call of an operator that could not be counted."""
        listed = self._uncounted.setdefault(operator, [0, set(), False])
        listed[0] += 1
        listed[1].add(module)
        listed[2] |= may_have_flops

    def note(self, sentence: str) -> None:
        """Add a sentence for the report; one that is there already changes nothing."""
        self._notes.setdefault(sentence)

    def failed(self, where: str, error: Exception) -> None:
        """Note that the counter failed in *where*, and say so in the log, the first time of all.

        It raises nothing but what a signal handler of the user's has raised.
        """
        words = words_of(error)
        if where not in self._failures:
            self._failures.add(where)
            sentence = f"Counting failed in {where} ({words}); FLOPs may be missing."
            self.note(sentence)
            logger.log(logging.WARNING if len(self._failures) == 1 else logging.DEBUG, sentence, exc_info=error)

    def record(self, more_notes: Iterable[str]) -> FlopRecord:
        """All of it; what ran in no module, and no part of a step has ended since, is forward."""
        with self.lock:
            self.decide(is_forward=True)
            unread = sorted((f"{kind}.forward", name) for name, (kind, _) in self.unread.items())
            silent = {one: [name for other, name in unread if other == one] for one, _ in unread}
            return FlopRecord(
                cells=tuple(
                    OperatorCell(module=module, phase=phase, operator=operator, dtype=dtype, **asdict(cell))
                    for (module, phase, operator, dtype), cell in sorted(self._cells.items())
                ),
                module_calls=dict(sorted(self.calls.items())),
                uncounted={
                    operator: UncountedOperator(calls=calls, modules=tuple(sorted(modules)), may_have_flops=may)
                    for operator, (calls, modules, may) in sorted(self._uncounted.items())
                }
                | {
                    kind: UncountedOperator(
                        calls=sum(self.calls[name] for name in names), modules=tuple(names), may_have_flops=True
                    )
                    for kind, names in silent.items()
                },
                notes=(
                    *self._notes,
                    *more_notes,
                    *(f"The FLOPs of {name} are an estimate: {why}." for name, why in sorted(self.estimates.items())),
                ),
            )
