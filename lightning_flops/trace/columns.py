"""A trace in memory: one numpy column per property, a row per event; names stand once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, wraps
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from lightning_flops.errors import LightningFlopsError
from lightning_flops.trace.intervals import Floats, Intervals, Ints, Lanes, Mask, group_by, merge
from lightning_flops.trace.names import Kind, host_collective, is_collective_kernel, is_of_another_vendor


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
    rename={"index": "id", "sm_count": "numSms", "major": "computeMajor", "minor": "computeMinor"},
):
    """One accelerator of the machine, as the trace's head describes it."""

    index: int
    name: str = ""
    sm_count: int | None = None
    major: int | None = None
    minor: int | None = None

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
        found = self.where(is_collective_kernel, Kind.KERNEL)
        # A kernel that says which collective it is needs no known name.
        found[(self.kind == Kind.KERNEL) & (self.collective >= 0)] = True
        return found | self.where(host_collective, Kind.ANNOTATION, Kind.OPERATOR)

    def only(self, rows: Mask, **changes: Any) -> Trace:
        """The trace of some rows alone, with other *changes*."""
        for one in fields(self):
            if isinstance(column := getattr(self, one.name), np.ndarray):
                changes[one.name] = column[rows]
        return replace(self, **changes)

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

    def of(self, kind: Kind) -> Ints:
        """Rows of one kind."""
        return np.flatnonzero(self.kind == kind)

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


T = TypeVar("T")


def once(find: Callable[[Trace], T]) -> Callable[[Trace], T]:
    """*find*, worked out once for each trace: what several tables derive from its columns."""

    @wraps(find, updated=())
    def known(trace: Trace) -> T:
        if find not in trace.derived:
            trace.derived[find] = find(trace)
        return trace.derived[find]  # type: ignore[no-any-return]

    return known
