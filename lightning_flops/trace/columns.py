"""A trace in memory: one numpy column per property, a row per event; and what names say, from torch 1.8 on."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from functools import cached_property, lru_cache, wraps
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_flops.errors import LightningFlopsError
from lightning_flops.records import MARKS, marked_phase
from lightning_flops.trace.intervals import Floats, Intervals, Ints, Lanes, Mask, T, group_by, merge


class Kind(IntEnum):
    """What an event of a trace stands for."""

    OTHER = 0  # known, but in no table: overheads, marks repeated on the device's lanes
    PYTHON = 1  # a call of a Python function or of a module; in no table of time
    OPERATOR = 2
    ANNOTATION = 3  # a named scope on the host: ``record_function``, a profiler step, an optimizer step
    RUNTIME = 4  # a call into the device's runtime or driver
    KERNEL = 5
    MEMCPY = 6
    MEMSET = 7


_RUNTIMES = ("", "cuda_", "hip_", "xpu_", "mtia_", "glow_", "privateuse1_")
_CATEGORIES = {
    Kind.OPERATOR: "cpu_op operator",
    Kind.ANNOTATION: "user_annotation",
    Kind.PYTHON: "python_function",
    Kind.KERNEL: "kernel mtia_ccp_events",
    Kind.MEMCPY: "gpu_memcpy memcpy",
    Kind.MEMSET: "gpu_memset memset",
    Kind.OTHER: "gpu_user_annotation overhead cuda_sync cuda_profiler_range collective_comm mtia_insight "
    "external_correlation",
    Kind.RUNTIME: " ".join(f"{api}{layer}" for api in _RUNTIMES for layer in ("runtime", "driver")),
}
# Lower-case category to kind; a category that is not here is not torch.profiler's, and its events are left out.
KIND_OF_CATEGORY = {category: kind for kind, words in _CATEGORIES.items() for category in words.split()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RecordedInputs:
    """What a trace with ``record_shapes`` says of one call's arguments; anything may stand in it."""

    dims: Sequence[Any] = ()  #: For each argument the sizes of a tensor, or of each of a list; empty for all else.
    #: For each argument the dtype of a tensor as C++ names it, or what else it is; empty for None.
    types: Sequence[Any] = ()
    #: Values of the arguments that are no tensors, as texts; None in files before torch 2.0.
    concrete: Sequence[Any] | None = None
    strides: Sequence[Any] | None = None  #: As *dims*; None where the file has none.


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedWork:
    """FLOPs of one recorded call."""

    #: ``counts``: its FLOPs stand here. ``free``: it has none, nor has what it called. ``composite``: it is made of the
    #: operators that it called. ``unread``: the file does not say enough for its formula. ``unknown``: it has none.
    role: Literal["counts", "free", "composite", "unread", "unknown"]
    operator: str = ""  #: Name as in ``OperatorCell``: ``aten.mm``.
    dtype: str = ""  #: Of the arithmetic, by the tensors: ``float32`` where the device may have used TF32.
    #: Model FLOPs, attention over the full score matrix; of a composite call those that count if no callee does.
    flops: int = 0
    recompute: int = 0  #: FLOPs with which a fused attention's backward repeats a part of its forward.
    skipped: int = 0  #: FLOPs of these that a kernel leaves out, because a mask rules them out.
    bytes: int | None = None  #: Of all tensors that it reads and writes; None where the result's shape is not known.
    #: May have FLOPs that are not counted: it takes floating-point tensors, or is named after a product.
    may_have_flops: bool = False
    reason: str = ""  #: Why it is not counted, without a full stop.


class TraceFormatError(LightningFlopsError, ValueError):
    """A trace file cannot be read; the message names the file and what is wrong with it."""


class DeviceProperties(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    rename={
        "index": "id", "sm_count": "numSms", "major": "computeMajor", "minor": "computeMinor",
        "max_threads": "maxThreadsPerMultiprocessor", "registers": "regsPerMultiprocessor",
        "shared_memory": "sharedMemPerMultiprocessor",
    },
):  # fmt: skip
    """One accelerator of the machine, as the trace's head describes it; the last three are of one multiprocessor."""

    index: int
    name: str = ""
    sm_count: int | None = None
    major: int | None = None
    minor: int | None = None
    max_threads: int | None = None
    registers: int | None = None
    shared_memory: int | None = None

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Major and minor, as the CUDA programming guide numbers them."""
        return None if self.major is None or self.minor is None else (self.major, self.minor)


class Collective(NamedTuple):
    """What a communication event says about itself."""

    name: str | None = None
    group: str | None = None  #: The group's name and the ranks that take part, as far as they are written.
    group_size: int | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Trace:
    """All of a trace file that the tables need; a row of the columns is one event.

    Times are whole nanoseconds on the trace's own clock, so sums are exact. -1 stands for an integer that an event does
    not have, NaN for a fraction.
    """

    source: str  #: The file it came from, for messages.
    names: tuple[str, ...]
    name: npt.NDArray[np.int32]  #: Index into ``names``.
    kind: npt.NDArray[np.int8]
    lane: npt.NDArray[np.int32]  #: A number for each process and thread, or device and stream.
    start_ns: Ints
    duration_ns: Ints
    correlation: Ints  #: One number on a device event and on the runtime call that launched it.
    external_id: Ints  #: The operator's number, repeated by the device events it launched.
    sequence: Ints  #: Autograd's sequence number of an operator.
    forward_thread: Ints  #: Above 0 on an operator that autograd runs for a backward.
    device: Ints
    blocks_per_sm: Floats
    occupancy_percent: Floats
    bytes: Ints  #: Bytes that a copy or a memset moves, and those of the larger side of a collective.
    inputs: npt.NDArray[np.int32]  #: Index into ``recorded_inputs``.
    recorded_inputs: tuple[RecordedInputs, ...]
    collective: npt.NDArray[np.int32]  #: Index into ``collectives``.
    collectives: tuple[Collective, ...]  #: The last one says nothing, for -1.
    #: Allocations and frees: ``lane``, ``time_ns``, ``size`` in bytes (frees: below 0), ``device`` (the host: -1) and
    #: ``total_allocated`` then (-1 where not written); empty where the trace was taken without ``profile_memory``.
    memory: Mapping[str, Ints]
    devices: tuple[DeviceProperties, ...]
    processes: tuple[str, ...] = ()  #: By lane, what its process is called in the file.
    rank: int | None = None
    #: The ranks of the only process group there is, to which all communication belongs; None if it is not known.
    only_group: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()  #: What was left out or mended while reading, in sentences.
    derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)  #: What ``once`` keeps.

    def __len__(self) -> int:
        return len(self.start_ns)

    end_ns = cached_property[Ints](lambda trace: trace.start_ns + trace.duration_ns)  #: End of each event.
    on_device = cached_property[Mask](lambda trace: trace.kind >= Kind.KERNEL)  #: Kernels, copies and memsets.
    #: Whether anything ran on an accelerator; False for a CPU trace, whose device figures are all unknown.
    has_device = cached_property[bool](lambda trace: bool(trace.on_device.any()))
    #: Lengths of all device events, added up.
    device_work_ns = cached_property[int](lambda trace: int(trace.duration_ns[trace.on_device].sum()))
    _rows = cached_property[Ints](lambda trace: np.arange(len(trace)))
    device_rows = cached_property[Ints](lambda trace: trace.by_start(trace.on_device))  #: Rows of these, by start.

    @cached_property
    def names_tell_tensor_cores(self) -> bool:
        """Whether kernels have NVIDIA's names, which show tensor cores; those of AMD and Intel do not."""
        calls = self.where(is_of_another_vendor, Kind.RUNTIME)
        return not (calls.any() or any(is_of_another_vendor(one.name) for one in self.devices))

    @cached_property
    def is_collective(self) -> Mask:
        """Rows that communicate with other ranks: collectives' kernels, and host scopes that communicate themselves."""
        found = self.where(lambda name: _DEVICE_COLLECTIVE.search(own_name(name)), Kind.KERNEL)
        # A kernel that says which collective it is needs no known name.
        found[(self.kind == Kind.KERNEL) & (self.collective >= 0)] = True
        return found | self.where(host_collective, Kind.ANNOTATION, Kind.OPERATOR)

    def only(self, rows: Mask, **changes: Any) -> Trace:
        """The trace of some rows alone, with other *changes*."""
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        cut: dict[str, Any] = {name: of[rows] for name, of in columns.items() if isinstance(of, np.ndarray)}
        return replace(self, **cut, **changes)

    def described(self, device: int) -> DeviceProperties | None:
        """What the head says of a device. AMD's numbers count processors too: where its devices are alike, of any."""
        alike = {(one.name, one.sm_count) for one in self.devices if is_of_another_vendor(one.name)}
        known = {one.index: one for one in self.devices}
        return known.get(device) or (self.devices[0] if len(alike) == 1 else None)

    @cached_property
    def used_device(self) -> DeviceProperties | None:
        """What ran the kernels; None where several kinds of devices did, or one that the head does not describe."""
        found = [self.described(index) for index in group_by(self.device[self.kind == Kind.KERNEL]).keys[0].tolist()]
        kinds = {one and (one.name, one.compute_capability, one.sm_count) for one in found}
        return found[0] if len(kinds) == 1 else None

    def by_start(self, rows: Mask | Ints) -> Ints:
        """The given rows (a mask or indices) by start."""
        rows = self._rows[rows]
        return rows[np.argsort(self.start_ns[rows], kind="stable")]

    def name_of(self, row: int) -> str:
        """The name of the event in *row*."""
        return self.names[int(self.name[row])]

    def texts(self, names: Lanes) -> list[str]:
        """The names with these numbers."""
        return [self.names[name] for name in names.tolist()]

    def merged(self, rows: Mask | Ints) -> Intervals:
        """The moments that the given rows (a mask or indices) cover."""
        rows = self._rows[rows]
        return merge(self.start_ns[rows], self.end_ns[rows])

    def where(self, holds: Callable[[str], object], *kinds: Kind) -> Mask:
        """Rows of these *kinds* for whose name *holds* returns anything true, called once for a kind and a name."""
        known, number = self._kinds_and_names
        return np.array([kind in kinds and bool(holds(name)) for kind, name in known], dtype=bool)[number]

    @cached_property
    def _kinds_and_names(self) -> tuple[list[tuple[int, str]], Ints]:
        """Each kind with each name that events of it have; and for each row the place of its own among these."""
        both = self.kind * np.int64(len(self.names)) + self.name
        used = np.bincount(both) > 0
        kinds, names = np.divmod(np.flatnonzero(used), len(self.names))
        return [*zip(kinds.tolist(), self.texts(names), strict=True)], (np.cumsum(used) - 1)[both]


def once(find: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """*find*, worked out once for each trace: what several tables derive from its columns."""

    @wraps(find, updated=())
    def known(trace: Trace) -> T:
        if find not in trace.derived:
            trace.derived[find] = find(trace)
        return trace.derived[find]  # type: ignore[no-any-return]

    return known


# ---- names: the kind of an event, collectives, tensor cores, phases


_STEP = re.compile(r"ProfilerStep#([0-9]{1,18})$")
_HOST_COLLECTIVE = re.compile(r"(gloo|mpi|ucc):(\w+)")
_STARTS_COLLECTIVE = re.compile(r"[nrx]ccl:_?(\w+)")
# Scopes that torch itself opens, up to 1.8 as operators; every other scope, but for marks, is the user's.
_OF_TORCH = re.compile(r"ProfilerStep#|enumerate\(|Optimizer\.(step|zero_grad)#|(gloo|nccl|mpi|ucc|xccl):")
_PHASES = {
    "data loader": re.compile(r"enumerate\((DataLoader|DataPipe)\)#"),
    "forward": re.compile(r"(.*[./ \]#])?(forward|training_step)[# ]*$"),
    "backward": re.compile(r"(.*[./ \]#])?backward[# ]*$"),
    "optimizer": re.compile(r"Optimizer\.step#"),
}
_MARKED_PHASES = {"data_wait": "data loader", "forward": "forward", "backward": "backward", "optimizer": "optimizer"}

_DEVICE_COLLECTIVE = re.compile(r"[nr]ccl|oneccl|mscclpp|cross_device_reduce|(one|two)_shot_all_r|multimem_all", re.I)
_COLLECTIVE_OF_KERNEL = re.compile(r"(?:nccl|rccl)(?:Dev)?(?:Kernel_?)?([A-Z][A-Za-z]*)", re.I)
_STARTS_OR_WAITS = re.compile(r"_?c10d(_functional\w*)?::|autograd::engine::|torch::autograd::")

# Patterns of names that NVIDIA's and PyTorch's libraries give kernels built on tensor-core instructions.
_TENSOR_CORE = re.compile(
    r"[hi]mma|gmma|[hi]884|[hi]1688|16816|s161616|(?<![a-z])tensorop(?![a-z])|mmatensorop|_tensor\d|xmma(?!\w*_[fd]fma)|nvjet|s1688|tf32(?!x?_?simt)"
    r"|flash_(fwd|bwd)|pytorch_flash|fmha_v2|fmha_cutlass[fb]_(f16|bf16).*_sm(7[05]|8\d|9\d|1\d\d)"
    r"|cudnn_generated_fort_native_sdpa|cutlass3x_sm(90|1\d\d)|cutlass_\d+_wmma|device_kernel.*sm(90|100)",
    re.I,
)

# Whether an operator is one of matrix products, convolutions, attention or recurrent layers.
may_use_tensor_cores = re.compile(
    r"aten::(mm|addmm|bmm|baddbmm|addbmm|_addmm_activation|_scaled_mm|_grouped_mm|matmul|linear|einsum|addmv|mv|dot"
    r"|_?convolution\w*|conv(_transpose)?[123]d|(cudnn|miopen)_convolution\w*"
    r"|_?(scaled_dot_product|flash|efficient|cudnn)_\w*attention\w*|_(cudnn|thnn_fused)_\w*rnn\w*|_cudnn_rnn\w*)$"
).match

# Kernels that run whatever their template argument names.
_LAUNCHERS = frozenset(("Kernel", "Kernel2", "kernel", "device_kernel", "kentry", "cutlass_kernel"))

_MANGLED = re.compile(r"_ZN?[KVr]*(?=\d)")
_LENGTH = re.compile(r"\d+")
_TEMPLATE = re.compile(r"<[^<>]*>")
# Inductor's pointwise kernels and reductions, whose names list what they were fused from.
_POINTWISE = re.compile(r"triton_(poi|per|red|for|split_scan)_")

# How names of kernels begin that multiply matrices, convolve or attend: libraries', and what people call theirs.
_MULTIPLIES = re.compile(
    r"(void |_ZN\d+)?(cutlass|cublas)|nvjet_|fmha|flash_(fwd|bwd)|sm\d+_xmma|cudnn_generated_fort_native_sdpa"
    r"|(cudnn_|infer_|train_)*(maxwell|volta|turing|ampere|hopper)_\w*(gemm|cudnn|winograd)"
    r"|[hs]?(\d{3,6})?gem[mv]|.* internal::gemvx::kernel|[dw]grad(\d|_alg|_engine)|winograd[FW]"
    r"|(pre|im|ex)\w*_convolve|(gen_|naive_)?conv(\dd?)?_"
    r"|_?((kernel|flash|paged|unified)_)*att(entio)?n_|Batch(Decode|Prefill)With"  # as people write them
    r"|_?b?mm_|_?matmul_|fused_moe|chunk_(scan|state|fwd|bwd)|[Mm]arlin|triton_tem_"
    r"|Cijk_|igemm_|miopenSp3AsmConv|kernel_\w*(gemm|conv)\w*_xdl|bwd_kernel_d[kqv]"  # AMD's
)

# Whether a device, or a call into a runtime, is AMD's or Intel's, whose kernels have other names than NVIDIA's.
is_of_another_vendor = re.compile(r"(hip|ze|ur)[A-Z]|.*(?i:AMD|Radeon|Instinct|gfx\d|Intel)").match


def step_number(name: str) -> int | None:
    """The number of the profiler step that a scope's name marks; None for any other name."""
    return int(match[1]) if (match := _STEP.match(name)) else None


def phase_of(name: str) -> str | None:
    """The phase of a step that a scope of this name is: ``data loader``, ``forward``, ``backward`` or ``optimizer``."""
    if name.startswith(MARKS):
        return _MARKED_PHASES.get(marked_phase(name) or "")
    return next((phase for phase, pattern in _PHASES.items() if pattern.match(name)), None)


def is_users_scope(name: str) -> bool:
    """Whether a scope of this name is neither torch's nor a mark of this package; an operator, that it is no scope."""
    return not name.startswith(MARKS) and _OF_TORCH.match(name) is None


def host_collective(name: str) -> str | None:
    """The collective that a host scope performs itself (``gloo:all_reduce``; ``nccl:`` only launches): its name."""
    return match[2] if (match := _HOST_COLLECTIVE.match(name)) else None


def scope_of_collective(name: str) -> str | None:
    """The collective that a scope of torch's starts on a device: ``all_to_all`` for ``nccl:all_to_all``."""
    return match[1] if (match := _STARTS_COLLECTIVE.match(name)) else None


@lru_cache(maxsize=4096)
def own_name(kernel: str) -> str:
    """The name of the function alone: no return type, namespaces, template arguments (but a launcher's), parameters."""
    if mangled := _MANGLED.match(kernel):
        place, found = mangled.end(), ""
        while length := _LENGTH.match(kernel, place):
            place = length.end() + int(length[0])
            found = kernel[length.end() : place]
        return kernel if found in _LAUNCHERS else found
    name = own = kernel.replace("(anonymous namespace)", "")
    while own != (own := _TEMPLATE.sub("", own)):
        pass
    own = own.partition("(")[0].strip().rpartition(" ")[2].rpartition("::")[2]
    return name if own in _LAUNCHERS else own


def collective_of(name: str) -> str:
    """The collective that the name of a host scope or kernel says: ``allreduce`` for ``ncclDevKernel_AllReduce_…``."""
    match = _COLLECTIVE_OF_KERNEL.search(name)
    if (of_host := host_collective(name)) or not match:
        return of_host or own_name(name)
    word = re.sub(r"(Ring|Tree|CollNet|NVLS|PAT|Sum|Max|Min|Prod).*", "", match[1])
    return (word or match[1]).lower()


def computes_on_host(operator: str) -> bool:
    """Whether an operator of this name computes, and does not start communication, wait for it or run any Python."""
    # A node of autograd, or a Function of the user's, runs operators that compute, and hooks that may well wait.
    is_compiled = operator.startswith(("CompiledFunction", "Torch-Compiled Region"))  # its loops are no operators
    return is_compiled or ("::" in operator and _STARTS_OR_WAITS.match(operator) is None)


def uses_tensor_cores(name: str) -> bool:
    """Whether a kernel's name says that it runs on tensor cores; one that Triton made has no name that says so."""
    return _POINTWISE.match(name) is None and _TENSOR_CORE.search(own_name(name)) is not None


def multiplies(kernel: str) -> bool:
    """Whether a kernel's name says that it is a matrix product, a convolution or attention."""
    by_name = _POINTWISE.match(kernel) is None and _MULTIPLIES.match(own_name(kernel)) is not None
    return by_name or uses_tensor_cores(kernel)
